"""The first seconds of a run: help and errors in a config come before torch is imported, others before more."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.cli import COMMANDS
from grpo_rl.cli import main as command_line
from grpo_rl.settings.compose import FOLDER, compose_config
from grpo_rl.settings.config import main
from grpo_rl.settings.devices import check_machine
from grpo_rl.settings.help import EXAMPLES, EXAMPLES_OF_SFT
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.sections import declarations

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

DRIVER = """
import contextlib, io, json, runpy, sys
from hydra.core.global_hydra import GlobalHydra

HEAVY = {
    "torch", "transformers", "vllm", "tensordict", "torchrl", "ray", "datasets", "pandas", "matplotlib", "wandb",
    "peft", "huggingface_hub", "scipy", "rich", "optuna", "mlflow", "tensorboard", "trackio", "jaxtyping",
}
script, results = sys.argv[1], []
for line in sys.stdin:
    sys.argv = [script, *json.loads(line)]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    GlobalHydra.instance().clear()
    loaded = sorted(HEAVY & sys.modules.keys())
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "loaded": loaded})
print(json.dumps(results))
"""
"""Runs a script with each command line that it is given, in one process, and tells what each imported."""

OF_LOSSES = ("jaxtyping", "torch")
"""The libraries of the losses' functions, which declare settings."""
FILES = {
    "conf/bad.yaml": "defaults: [grpo_gsm8k, _self_]\nenv:\n  num_envs: 4\n   repeats: 8\n",
    "conf/key.yaml": "defaults: [grpo_gsm8k, _self_]\noptimizer:\n  lr: 1e-5\n  warmup: 4\n",
    "conf/empty.yaml": "defaults: [grpo_gsm8k, _self_]\ntrain:\n",
    "conf/experiment/own.yaml": "# @package _global_\noptimizer:\n  lr: fast\n",
    "empty/README.md": "",
    "lora/adapter_config.json": "{}",
    "done/model/config.json": "{}",
    "done/model/model.safetensors": "",
    "cut/checkpoints/checkpoint_000002.pt": "",
}
OWN = ["--config-dir", "conf", "--config-name"]
TABLE = [
    (["sampling.top_p=2"], "sampling.top_p is 2; it should be less than or equal to 1"),
    (["env.num_env=8"], "unknown config key env.num_env; did you mean env.num_envs?"),
    (["+experiment=quickstart_lor"], "unknown recipe 'quickstart_lor'; did you mean quickstart_lora? (all: "),
    (["experiment=quickstart"], "To append to your default list use +experiment=quickstart"),
    ([*OWN, "ky"], "unknown config 'ky'; did you mean key? (all: bad, "),
    ([*OWN, "bad"], 'mapping values are not allowed here in "'),
    ([*OWN, "key"], "conf/key.yaml, unknown config key optimizer.warmup; did you mean optimizer.warmup_steps"),
    ([*OWN, "empty"], "the config lacks train.checkpoint_frequency, "),
    (["--config-dir", "conf", "+experiment=own"], "conf/experiment/own.yaml, optimizer.lr is 'fast'; it should"),
    (["train.optim_batch_size=20"], "is not a multiple of env.repeats=8: a group would be cut; use train.optim_batch"),
    (["env.path=no_such.jsonl"], "no_such.jsonl can't be read: "),
    (["model.name=/no/such/model"], "unknown model '/no/such/model': there is no such folder, and it is no hub name"),
    (["model.name=empty"], "empty has no config.json with *.safetensors next to it (it has ['README.md']); give the"),
    (["model.name=lora"], "it holds an adapter: give what peft's merge_and_unload() or train_model.lora.export=merged"),
    (["model.name=done"], "it is a run's: give done/model"),
    (["model.name=cut"], "it is a run's that has not ended: grpo-rl export cut/checkpoints/checkpoint_*.pt FOLDER"),
    (["mode=async"], "this script is of mode=sync; run sota/grpo_async.py"),
    (["quickstart"], "quickstart: Error parsing override 'quickstart' missing EQUAL"),
    (["--help", "optimzer"], "unknown section or setting 'optimzer'; did you mean optimizer?"),
]
"""Wrong input, and what its one line says; torch is imported for none of the first nine."""
OF_COMMANDS = [
    (["batches", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
    (["batches", "--prompt-tokens", "0"], "each needs one token or more"),
    (["plan", "optimizer.lr=fast"], "optimizer.lr is 'fast'; it should be a valid number"),  # whatever the mode
    (["plan", "cluster=8xH100", "ray.nodes=2"], "ray.nodes=2 needs a cluster"),  # as in async mode
    (["plan", "cluster=8xH10"], "cluster=8xH10: known devices are A100-40GB, "),
    (["eval", "/no/such", "tasks=[gsm8k]"], "unknown model '/no/such': there is no such folder, and it is no hub name"),
    (["export", "/no/such.pt", "out"], "there is no checkpoint /no/such.pt; a run's are its checkpoints/checkpoint_*"),
    (["eval", "m", "tasks=[gsm9k]"], "unknown task 'gsm9k'; did you mean gsm8k?"),
    (["replay", "run", "1", "loss.clip_high=wide"], "loss.clip_high is 'wide'; it should be a valid number"),
    (["report", "run"], "run is not a run folder"),
    (["report", "run", "--port", "8000"], "--port is of --serve and --demo"),
    (["doctor", "--quik"], "'--quik' is neither an option nor an override"),
    (["trian"], "unknown command 'trian'; did you mean train? (all: train, batches, "),
]
"""Wrong words of the commands beside `train`, and what their one line says."""
ASKED = [
    ["--help"], ["--help", "env"], ["--help", "optimizer.lr"], ["--help", "env.reward"],
    ["--hydra-help"], ["--cfg", "job"], ["--info", "all"],
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each command line of the table, and of each that asks; by its words."""
    folder = tmp_path_factory.mktemp("first")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return told("grpo.py", [*ASKED, *(words for words, _ in TABLE)], folder)


def told(script, lines, folder):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(ROOT / "sota" / script)],
        input="".join(json.dumps(words) + "\n" for words in lines),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    )
    return {tuple(words): result for words, result in zip(lines, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize(
    ("words", "message"), TABLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_is_reported_in_one_line_and_wrong_values_before_torch_is_imported(results, words, message):
    result = results[tuple(words)]
    assert isinstance(result["code"], str), result["out"]  # what Python prints to stderr, with exit code 1
    assert result["code"].startswith("error: ") and message in result["code"] and "\n" not in result["code"]
    assert result["err"] == "" and {*result["loaded"]} <= ({*OF_LOSSES} if (words, message) in TABLE[9:] else set())


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_help_and_the_config_are_shown_before_torch_is_imported(results, words):
    result = results[tuple(words)]
    assert result["code"] in (None, 0) and result["out"] and result["loaded"] == []


def test_every_command_tells_its_help_and_wrong_words_in_the_first_seconds(tmp_path):
    helps = [[command, "--help"] for command in COMMANDS]
    found = told("../grpo_rl/cli.py", [*helps, *(words for words, _ in OF_COMMANDS)], tmp_path)
    for words in helps:
        result = found[tuple(words)]
        assert result["code"] == 0 and result["out"].startswith("usage: ") and words[0] in result["out"]
        assert result["loaded"] == [], words
    for words, message in OF_COMMANDS:
        result = found[tuple(words)]
        assert result["code"] == 2 and result["err"].startswith("error: ") and message in result["err"], result
        assert result["err"].count("\n") == 1
        assert {*result["loaded"]} <= {*OF_LOSSES}, words


def test_an_error_ends_the_process_with_one_line_and_exit_code_1(tmp_path):
    command = [sys.executable, str(ROOT / "sota" / "grpo.py"), "optimizer.lr=fast"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: optimizer.lr is 'fast'; it should be a valid number\n")
    assert not list(tmp_path.iterdir()), "the folder that Hydra made is gone"


def test_ctrl_c_in_the_first_seconds_ends_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    @main(config_name="grpo_gsm8k")
    def script(settings, folder):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra's are in the folder that goes
    monkeypatch.setattr("sys.argv", ["grpo.py", "env.path=quickstart-train", "inference_model.engine=transformers"])
    with pytest.raises(SystemExit, match="130"):
        script()
    assert capsys.readouterr().err == "stopped by Ctrl-C\n" and not list(tmp_path.iterdir())


def test_help_names_every_recipe_task_and_loss_with_its_first_comment(results):
    text = results["--help",]["out"]
    for group in ("experiment", "env", "loss"):
        for path in (FOLDER / group).glob("*.yaml"):
            name = "package.module:Class" if (group, path.stem) == ("env", "own") else path.stem
            (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
            comment = next(c for c in path.read_text().splitlines() if c.startswith("# ") and "@package" not in c)
            assert line.split()[1].rstrip(":,") == comment.split()[1].rstrip(":,")
    assert len(text.splitlines()) < 110  # two screens
    assert text.startswith("GRPO, synchronous (sample, then train).\n")


def test_help_on_a_section_has_each_of_its_settings_with_default_meaning_and_range(results):
    env = results["--help", "env"]["out"]
    assert all(f"  {key}" in env for key in declarations("gsm8k") if key.startswith("env."))
    reward = results["--help", "env.reward"]["out"]
    assert reward.startswith("env.reward: A response earns") and "  env.reward.correctness=2.0 " in reward
    assert declarations("gsm8k")["sampling.top_p"].bounds == "more than 0 and at most 1"
    one = results["--help", "optimizer.lr"]["out"]
    assert one.split() == ["optimizer.lr=1e-05", "learning", "rate", "(0", "or", "more)"]


def test_settings_of_the_examples_in_help_are_there():
    examples = [word for words in [*EXAMPLES, *EXAMPLES_OF_SFT] for word in words.split() if "=" in word]
    keys = {word.lstrip("+").partition("=")[0] for word in examples}
    assert keys <= declarations(None).keys() | {"loss", "experiment"}


def test_sft_asks_for_no_engine_and_names_what_it_does_not_read_in_the_first_seconds(tmp_path):
    wrong = [
        (["env.repeats=4"], "env.repeats=4 means nothing to mode=sft, which samples no responses; leave it out"),
        (["env.path=none.jsonl"], "none.jsonl can't be read"),
        (["mode=async"], "this script is of mode=sft; run sota/grpo_async.py, or grpo-rl train --async"),
    ]
    asked = ["--help"]
    found = told("sft.py", [asked, *(words for words, _ in wrong)], tmp_path)
    for words, message in wrong:
        result = found[tuple(words)]
        assert message in result["code"] and "\n" not in result["code"] and {*result["loaded"]} <= {*OF_LOSSES}
    text = found[tuple(asked)]["out"]
    assert "train.epochs=1" in text and "sft.py +experiment=quickstart_sft" in text and not found[("--help",)]["loaded"]
    assert "env.num_envs=" not in text and "policy.kl_coef=" not in text


def test_a_missing_extra_is_named_before_torch_is_imported_and_sft_needs_none(monkeypatch):
    def read(config, *words):
        return Settings.read(compose_config(config, ["env.path=quickstart-train", *words]))

    samples, imitates = read("grpo_gsm8k"), read("sft")
    adapters = read("grpo_gsm8k", "train_model.lora.rank=8", "inference_model.engine=transformers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_machine(imitates, "sft")
    for settings, mode, message in (
        (samples, "sync", "vLLM is not installed"),
        (samples, "async", "needs ray, which is not installed; install the extra `ray`"),
        (adapters, "sync", "needs peft, which is not installed; install the extra `lora`"),
    ):
        with pytest.raises(ValueError, match=message):
            check_machine(settings, mode)


@pytest.mark.parametrize("options", [[], ["--async"], ["--sft"]])
def test_help_of_the_installed_command_has_commands_that_it_takes(monkeypatch, capsys, options):
    command = " ".join(["grpo-rl train", *options])
    for name in ("/venv/bin/grpo-rl", "grpo_rl/cli.py"):
        monkeypatch.setattr(sys, "argv", [name, "train", "--help", *options])
        assert command_line() == 0
        text = capsys.readouterr().out
        assert f"usage: {command} [KEY=VALUE ...]" in text and f"  {command} +experiment=quickstart" in text
