"""`grpo-rl check-model`: each line on tiny models that are in order, and on models with one thing wrong."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import run_script
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer

from grpo_rl.checks import trial
from grpo_rl.checks.model import template_findings
from grpo_rl.cli import main
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import TransformersEngine
from tests.checks.test_doctor import to_fix

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

ROOT = Path(__file__).parents[2]
SHORT = ["inference_model.max_model_len=256", "sampling.max_new_tokens=32"]
ENGINE = ["--engine", "transformers"]


@pytest.fixture
def copied(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def check(capsys):
    """Runs the command; its exit code and its lines, as kind and text by what they are about."""

    def run(*arguments):
        code = main(["check-model", *map(str, arguments)])
        lines = re.findall(r"^(OK|note|FIX) +(\S+(?: \S+)*)  +(.*)$", capsys.readouterr().out, re.MULTILINE)
        return code, {about: (kind, text) for kind, about, text in lines}

    return run


def plant(monkeypatch, engine):
    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: engine(folder, 256))


def edit(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_model_in_order_has_every_line_and_its_command_line_trains_it(tiny_run, capsys, tmp_path):
    name = tiny_run[0].removeprefix("model.name=")
    assert main(["check-model", name, *tiny_run[1:], "train.total_dialog_turns=32", "train_model.compile=false"]) == 0
    out = capsys.readouterr().out
    words = shlex.split(out.rpartition("Train it: ")[2])
    assert words[:3] == ["grpo-rl", "train", f"model.name={name}"]
    assert [line.split()[0] for line in out.splitlines() if line.strip()] == ["OK"] * 13 + ["OK."]
    folder = run_script(ROOT / "sota" / "grpo.py", words[2:], tmp_path / "run")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    (mean,) = re.findall(r"log-probs differ by (\S+) nats", out)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["mismatch/mean"]
    assert first / 3 < float(mean) < 3 * first  # other prompts, the same rounding


def test_responses_are_sampled_as_in_training_but_for_their_length(tiny_model, check, monkeypatch):
    asked = []

    class Asked(TransformersEngine):
        def generate(self, prompts, n, sampling):
            asked.append(sampling)
            return super().generate(prompts, n, sampling)

    plant(monkeypatch, Asked)
    cuts = dict(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01)
    words = [*(f"sampling.{name}={value}" for name, value in cuts.items()), "sampling.stop=[ab]"]
    more = ["sampling.ignore_eos=true", "sampling.max_new_tokens=40", "inference_model.max_model_len=256"]
    code, lines = check(tiny_model, *words, *more, *ENGINE)
    assert asked == [Sampling(**cuts, stop=("ab",), ignore_eos=True, max_new_tokens=32)]
    assert code == 0 and lines["sampler, trainer"][0] == "OK"  # which scored with the kept sets


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("temperature", "shift", "line", "told"),
    [
        (0.6, 0.0, "sampler, trainer", "more than mismatch.bound=0.2: wrong temperature"),
        (1.0, float("nan"), "sampling", "none of which is a finite number"),
        (1.0, 0.5, "sampler, trainer", "more than mismatch.bound=0.2: unexplained"),
    ],
)
def test_a_sampler_unlike_the_trainer_is_to_be_fixed(tiny_model, check, monkeypatch, temperature, shift, line, told):
    class Faulty(TransformersEngine):
        def generate(self, prompts, n, sampling):
            samples = super().generate(prompts, n, Sampling(temperature, max_new_tokens=sampling.max_new_tokens))
            for sample in samples:
                sample.log_probs.sub_(shift)
            return samples

    plant(monkeypatch, Faulty)
    code, lines = check(tiny_model, *SHORT, *ENGINE)
    assert code == 1 and list(to_fix(lines)) == [line] and told in to_fix(lines)[line]


def test_damaged_weights_are_to_be_fixed(copied, check):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    code, lines = check(copied, *SHORT, *ENGINE)
    assert code == 1 and list(to_fix(lines)) == ["weights"]
    assert "not finite, in model.norm.weight" in to_fix(lines)["weights"]


@pytest.mark.parametrize(
    ("file", "change", "about", "told"),
    [
        ("config.json", dict(hidden_size="wide"), "config", "'hidden_size' expected int"),
        ("config.json", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "gate", "rope_type dynamic"),
        ("config.json", dict(vocab_size=100), "tokenizer", "it has ids up to 256, and the model embeds 100"),
        ("chat_template.jinja", "{% for m in messages %}", "chat template", "chat template refuses messages"),
        ("generation_config.json", dict(eos_token_id=[5]), "end of turn", "and generation stops at 5 alone"),
        ("config.json", dict(max_position_embeddings=128), "context", "set inference_model.max_model_len=128"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line_without_its_weights(copied, check, file, change, about, told):
    if isinstance(change, str):
        (copied / file).write_text(change)
    else:
        edit(copied, file, **change)
    code, lines = check(copied, "--quick", *SHORT)
    assert code == 1 and list(to_fix(lines)) == [about] and told in to_fix(lines)[about]


def test_entries_that_a_trained_models_generation_config_will_not_have_are_a_note(copied, check):
    edit(copied, "generation_config.json", do_sample=False, temperature=0.9)
    code, lines = check(copied, "--quick", *SHORT)
    assert code == 0 and lines["written files"][0] == "note" and "temperature" in lines["written files"][1]


def test_no_code_of_a_folder_is_run_and_no_question_is_asked(copied, check, monkeypatch):
    (copied / "foo.py").write_text(f"open({str(copied / 'ran')!r}, 'w')\n")
    edit(copied, "config.json", model_type="foo", auto_map={"AutoConfig": "foo.FooConfig"})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    for quick in ([], ["--quick"]):
        assert list(to_fix(check(copied, *quick, *SHORT)[1])) == ["model"]
    edit(copied, "config.json", model_type="llama")
    edit(copied, "tokenizer_config.json", tokenizer_class="Foo", auto_map={"AutoTokenizer": ["foo.Foo", "foo.Foo"]})
    assert list(to_fix(check(copied, "--quick", *SHORT)[1])) == ["tokenizer"]
    assert not (copied / "ran").exists()


@pytest.mark.nightly
def test_a_model_that_does_not_fit_is_reported_before_it_is_loaded(check):
    _, lines = check(ROOT / "tests" / "planner" / "data" / "llama-70b", "--quick")
    assert re.search(r"train [\d,]{3,}\.\d of [\d,]+\.\d GiB", to_fix(lines)["memory"])


TURN = "{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKS}"


def on_template(folder, template, ends=(0,), normalizer=None):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.backend_tokenizer.normalizer = normalizer or tokenizer.backend_tokenizer.normalizer
    return {finding.about: finding for finding in template_findings(tokenizer, set(ends), len(tokenizer))}


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (PLAIN, None),
        (  # the first user's message says how many there are
            f"{{% for m in messages %}}{{{{ messages | length if loop.first }}}}{TURN}{{% endfor %}}{ASKS}",
            "use a template that only appends",
        ),
        (  # as Qwen3's: thoughts before the last question are left out
            "{% for m in messages %}{% set text = m['content'] if loop.revindex0 < 1 else "
            "m['content'].split('</think>')[-1] %}<{{ m['role'] }}>{{ text }}<end>{% endfor %}" + ASKS,
            "strips <think>…</think> from earlier responses",
        ),
    ],
)
def test_templates_that_change_earlier_turns_are_reported(tiny_model, template, told):
    finding = on_template(tiny_model, template)["several turns"]
    assert (finding.kind == "OK") if told is None else (finding.kind == "note" and told in finding.text)


@pytest.mark.parametrize(
    ("template", "ends", "kind", "told"),
    [
        (PLAIN, [7, 0], "OK", "<end> (0), where generation stops"),
        (PLAIN, [7, 8], "FIX", "generation stops at 7, 8 alone"),
        (PLAIN, [], "FIX", "no response would end"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", [0], "note", "writes none"),
        (None, [0], "OK", "<end> (0)"),  # the tokenizer's own eos is <end>
    ],
)
def test_the_token_behind_a_response_has_to_end_generation(tiny_model, template, ends, kind, told):
    found = on_template(tiny_model, template, ends)
    assert found["end of turn"].kind == kind and told in found["end of turn"].text
    assert (found["chat template"].kind == "OK") == (template is not None)


def test_a_refused_system_role_is_an_override_of_the_command_line(copied, capsys):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (copied / "chat_template.jinja").write_text(f"{refusing}{PLAIN}")
    assert main(["check-model", str(copied), "--quick", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "no system role: env.system_prompt=null" in out and "no tool role" not in out
    assert " env.system_prompt=null " in out.rpartition("Train it: ")[2]


def test_a_tokenizer_that_changes_text_is_reported(tiny_model):
    finding = on_template(tiny_model, PLAIN, normalizer=Lowercase())["text of ids"]
    assert finding.kind == "note" and "'so \\\\frac{1}{2} , or 0.5 .'" in finding.text
