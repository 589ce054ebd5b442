"""`grpo-rl check-model`: each line on tiny models that are in order, and on models with one thing wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_rl.checks import trial
from grpo_rl.checks.template import template_findings
from grpo_rl.cli import main
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.testing import run_script, save_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHORT = ["inference_model.max_model_len=256", "sampling.max_new_tokens=32"]
ENGINE = ["--engine", "transformers"]
SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8
)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(own_cache):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def copied(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture
def check(capsys):
    """Runs the command; its exit code and its lines, as kind and text by what they are about."""

    def run(*arguments):
        code = main(["check-model", *map(str, arguments)])
        lines = re.findall(r"^(OK|note|FIX) +(\S+(?: \S+)*)  +(.*)$", capsys.readouterr().out, re.MULTILINE)
        return code, {about: (kind, text) for kind, about, text in lines}

    return run


def fixes(lines):
    return {about: text for about, (kind, text) in lines.items() if kind == "FIX"}


def edit(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without(folder, *patterns):
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


# ---- the whole check ----


def test_a_model_in_order_has_every_line_and_its_command_line_trains_it(tiny_run, capsys, tmp_path):
    name = tiny_run[0].removeprefix("model.name=")
    assert main(["check-model", name, *tiny_run[1:], "train.total_dialog_turns=32", "train_model.compile=false"]) == 0
    out = capsys.readouterr().out
    words = shlex.split(out.rpartition("Train it: ")[2])
    assert words[:3] == ["grpo-rl", "train", f"model.name={name}"]
    assert [line.split()[0] for line in out.splitlines() if line.strip()] == ["OK"] * 14 + ["OK."]
    folder = run_script(ROOT / "sota" / "grpo.py", words[2:], tmp_path / "run")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    (mean,) = re.findall(r"log-probs differ by (\S+) nats", out)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["mismatch/mean"]
    assert first / 3 < float(mean) < 3 * first  # other prompts, the same rounding


def test_responses_are_sampled_as_in_training_but_for_their_length(model, check, monkeypatch):
    asked = []

    class Asked(TransformersEngine):
        def generate(self, prompts, n, sampling):
            asked.append(sampling)
            return super().generate(prompts, n, sampling)

    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: Asked(folder, 256))
    cuts = dict(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01)
    words = [*(f"sampling.{name}={value}" for name, value in cuts.items()), "sampling.stop=[ab]"]
    more = ["sampling.ignore_eos=true", "sampling.max_new_tokens=40", "inference_model.max_model_len=256"]
    code, lines = check(model, *words, *more, *ENGINE)
    assert asked == [Sampling(**cuts, stop=("ab",), ignore_eos=True, max_new_tokens=32)]
    assert code == 0 and lines["sampler, trainer"][0] == "OK"  # which scored with the kept sets


def mixture():
    sizes = SIZES | dict(vocab_size=257, eos_token_id=0, max_position_embeddings=512)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2))


def hybrid():
    sizes = SIZES | dict(vocab_size=257, eos_token_id=0, pad_token_id=0, max_position_embeddings=512)
    return Lfm2ForCausalLM(Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"]))


@pytest.mark.nightly
@pytest.mark.parametrize("made", [mixture, hybrid])
def test_mixtures_and_hybrids_are_looked_at_with_their_weights(copied, check, made):
    torch.manual_seed(0)
    made().to(torch.bfloat16).save_pretrained(copied)
    code, lines = check(copied, *SHORT, *ENGINE)
    assert code == 0 and not fixes(lines)
    for about in ("weights", "sampling", "sampler, trainer", "gradient"):
        assert lines[about][0] == "OK", lines[about]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "line", "told"),
    [
        (
            dict(sampled_at=0.6),
            "sampler, trainer",
            "more than mismatch.bound=0.2: wrong temperature",
        ),
        (dict(shifted_by=float("nan")), "sampling", "none of which is a finite number"),
        (
            dict(shifted_by=0.5),
            "sampler, trainer",
            "more than mismatch.bound=0.2: unexplained",
        ),
    ],
)
def test_a_sampler_that_differs_from_the_trainer_is_to_be_fixed(model, check, monkeypatch, fault, line, told):
    class Faulty(TransformersEngine):
        def generate(self, prompts, n, sampling):
            if "sampled_at" in fault:
                sampling = type(sampling)(fault["sampled_at"], max_new_tokens=sampling.max_new_tokens)
            samples = super().generate(prompts, n, sampling)
            for sample in samples:
                sample.log_probs.sub_(fault.get("shifted_by", 0.0))
            return samples

    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: Faulty(folder, 256))
    code, lines = check(model, *SHORT, *ENGINE)
    assert code == 1 and list(fixes(lines)) == [line]
    assert told in fixes(lines)[line]


@pytest.mark.nightly
def test_weights_that_do_not_arrive_and_an_engine_that_fails_are_to_be_fixed(model, check, monkeypatch):
    class Deaf(TransformersEngine):
        def update_weights(self, weights, version):
            super().update_weights(((name, tensor + 1) for name, tensor in weights), version)

    def fails(settings, folder, devices):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: Deaf(folder, 256))
    code, lines = check(model, *SHORT, *ENGINE)
    assert code == 1 and "did not arrive" in fixes(lines)["delivery"]
    monkeypatch.setattr(trial, "make_engine", fails)
    code, lines = check(model, *SHORT)
    assert code == 1
    assert fixes(lines) == {
        "engine vllm": "RuntimeError: no such kernel; --engine transformers samples without vLLM, slowly"
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("change", "about", "told"),
    [
        (
            lambda folder: weights(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight")),
            "weights",
            r"lacks weights of LlamaForCausalLM: model\.layers\.0\.mlp\.up_proj\.weight",
        ),
        (
            lambda folder: weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan)),
            "weights",
            r"not finite, in model\.norm\.weight",
        ),
        (
            lambda folder: edit(folder, "config.json", intermediate_size=128),
            "weights",
            r"holds model\.layers\.0\.mlp\.down_proj\.weight with shape \[64, 96\], .* asks for \[64, 128\] \(6 such",
        ),
    ],
)
def test_damaged_weights_are_to_be_fixed(copied, check, change, about, told):
    change(copied)
    code, lines = check(copied, *SHORT, *ENGINE)
    assert code == 1 and list(fixes(lines)) == [about] and re.search(told, fixes(lines)[about])


# ---- without weights ----


@pytest.mark.parametrize(
    ("change", "about", "told"),
    [
        (lambda folder: without(folder, "config.json"), "model", "has no config.json"),
        (
            lambda folder: edit(folder, "config.json", model_type="foo", auto_map={"AutoConfig": "foo.FooConfig"}),
            "model",
            r"does not have; code in a model's folder \(trust_remote_code\) is never run",
        ),
        (lambda folder: edit(folder, "config.json", hidden_size="wide"), "config", "'hidden_size' expected int"),
        (
            lambda folder: edit(folder, "config.json", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "gate",
            "LlamaForCausalLM cannot be trained here: rope_type dynamic",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer", "needs the files that its tokenizer"),
        (
            lambda folder: edit(folder, "config.json", vocab_size=100),
            "tokenizer",
            "it has ids up to 256, and the model embeds 100",
        ),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}"),
            "chat template",
            "the tokenizer's chat template refuses messages",
        ),
        (
            lambda folder: edit(folder, "generation_config.json", eos_token_id=[5]),
            "end of turn",
            r"writes '<end>' \(0\) at the end of a response, and generation stops at 5 alone",
        ),
        (
            lambda folder: edit(folder, "config.json", max_position_embeddings=128),
            "context",
            "set inference_model.max_model_len=128",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line_without_its_weights(copied, check, change, about, told):
    change(copied)
    code, lines = check(copied, "--quick", *SHORT)
    assert code == 1 and list(fixes(lines)) == [about] and re.search(told, fixes(lines)[about])


def test_entries_that_a_trained_models_generation_config_will_not_have_are_a_note(copied, check):
    edit(copied, "generation_config.json", do_sample=False, temperature=0.9)
    code, lines = check(copied, "--quick", *SHORT)
    assert code == 0 and not fixes(lines)
    kind, text = lines["written files"]
    assert kind == "note" and text.startswith("transformers ignores temperature in")


def test_no_code_of_a_folder_is_run_and_nobody_is_asked(copied, check, monkeypatch):
    (copied / "foo.py").write_text(f"open({str(copied / 'ran')!r}, 'w')\n")
    edit(copied, "config.json", model_type="foo", auto_map={"AutoConfig": "foo.FooConfig"})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    for quick in ([], ["--quick"]):
        assert list(fixes(check(copied, *quick, *SHORT)[1])) == ["model"]
    edit(copied, "config.json", model_type="llama")
    edit(copied, "tokenizer_config.json", tokenizer_class="Foo", auto_map={"AutoTokenizer": ["foo.Foo", "foo.Foo"]})
    assert list(fixes(check(copied, "--quick", *SHORT)[1])) == ["tokenizer"]
    assert not (copied / "ran").exists()


@pytest.mark.nightly
def test_a_model_that_does_not_fit_is_told_before_it_is_loaded(check):
    _, lines = check(ROOT / "tests" / "planner" / "data" / "llama-70b", "--quick")
    assert re.search(r"train [\d,]{3,}\.\d of [\d,]+\.\d GiB", fixes(lines)["memory"])


# ---- chat templates ----

TURN = "{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"


def on_template(model, template, ends=(0,)):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return {finding.about: finding for finding in template_findings(tokenizer, set(ends), len(tokenizer))}


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKS}", None),
        (  # the first user's message says how many there are
            f"{{% for m in messages %}}{{{{ messages | length if loop.first }}}}{TURN}{{% endfor %}}{ASKS}",
            "use a template that only appends; until then, tasks of one turn only",
        ),
        (  # ids of a response change only when the one after the next comes
            f"{{% for m in messages %}}{TURN}{{{{ 'x' if messages | length > 4 }}}}{{% endfor %}}{ASKS}",
            "message 5 changes the ids of those before it",
        ),
        (  # as Qwen3's: thoughts before the last question are left out
            "{% for m in messages %}{% set text = m['content'] if loop.revindex0 < 1 else "
            "m['content'].split('</think>')[-1] %}<{{ m['role'] }}>{{ text }}<end>{% endfor %}" + ASKS,
            "strips <think>…</think> from earlier responses",
        ),
        (  # as Qwen3's without thoughts: an empty one since the last question, also where a tool replies
            "{% set at = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
            "{% set at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<{{ m['role'] }}>"
            "{% if loop.index0 > at.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
            "{{ m['content'] }}<end>{% endfor %}" + ASKS,
            "tasks of one turn, and those where tools reply (env.tool_role=tool)",
        ),
        (  # as DeepSeek-R1's: thoughts are always left out
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'].split('</think>')[-1] }}<end>{% endfor %}" + ASKS,
            "strips <think>…</think> from earlier responses",
        ),
    ],
)
def test_templates_that_change_earlier_turns_are_told(model, template, told):
    finding = on_template(model, template)["several turns"]
    assert (finding.kind == "OK") if told is None else (finding.kind == "note" and told in finding.text)


def test_the_token_behind_a_response_has_to_end_generation(model):
    template = f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKS}"
    assert str(on_template(model, template, ends=[7, 0])["end of turn"]).endswith("<end> (0), where generation stops")
    assert on_template(model, template, ends=[7, 8])["end of turn"].kind == "FIX"
    assert "generation stops at 7, 8 alone" in on_template(model, template, ends=[7, 8])["end of turn"].text
    assert "no response would end" in on_template(model, template, ends=[])["end of turn"].text
    assert on_template(model, "{% for m in messages %}{{ m['content'] }}{% endfor %}")["end of turn"].kind == "note"
    assert on_template(model, None)["end of turn"].kind == "OK"  # the tokenizer's own eos is <end>
    assert on_template(model, None, ends=[7])["end of turn"].kind == "FIX"


def test_a_refused_system_role_is_an_override_of_the_command_line(copied, capsys):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (copied / "chat_template.jinja").write_text(f"{refusing}{{% for m in messages %}}{TURN}{{% endfor %}}{ASKS}")
    assert main(["check-model", str(copied), "--quick", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "no system role: env.system_prompt=null" in out and "no tool role" not in out
    assert " env.system_prompt=null " in out.rpartition("Train it: ")[2]


def test_a_tokenizer_that_changes_text_is_told(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    from tokenizers.normalizers import Lowercase

    tokenizer.backend_tokenizer.normalizer = Lowercase()
    (finding,) = [f for f in template_findings(tokenizer, {0}, 257) if f.about == "text of ids"]
    assert finding.kind == "note" and "'so \\\\frac{1}{2} , or 0.5 .'" in finding.text
