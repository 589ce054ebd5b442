"""Training from Python: the page's script is the run of sota/grpo.py; hooks are called; wrong input is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import run_script

import grpo_rl
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.run.hooks import Hook

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "env": {"num_envs": 2, "repeats": 2},
    "train": {"total_dialog_turns": 12, "optim_batch_size": 4, "checkpoint_frequency": 0},
    "train_model": {"compile": False, "dtype": "float32"},
    "inference_model": {"engine": "transformers", "max_model_len": 128},
    "sampling": {"max_new_tokens": 4},
}
SAME = ("reward/mean", "loss/total", "grad_norm", "response/mean_length", "eval/reward")


@pytest.mark.slow
def test_the_pages_script_is_the_run_of_the_command_line_with_its_rows(tiny_model, tmp_path):
    page = (ROOT / "docs" / "from_python.md").read_text()
    (script,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", page, re.DOTALL)
    script = script.replace("len(text.split()) == 1 and text.lower().startswith(first)", "sum(map(ord, text)) % 7")
    words = [f"{section}={values}" for section, values in SECTIONS.items()]
    script = script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny_model))
    more = f'settings = dict(optimizer={{"lr": 1e-3}}, folder="one", {", ".join(words)})'
    script = re.sub("^settings = .*$", more, script, flags=re.MULTILINE)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "judge.py").write_text(re.search(r"def one_word.*?\n\n", script, re.DOTALL)[0])
    given = {
        "env": {"dataset": "prompt_response", "reward": "judge:one_word", "isolated": "false",
                "path": "one/data/train.jsonl", "eval_path": "one/data/held_out.jsonl"},
        "evaluate": {"rows": 13}, "optimizer": {"lr": 1e-3}, "model": {"name": tiny_model},
    }  # fmt: skip
    sections = [(name, own) for part in (SECTIONS, given) for name, own in part.items()]
    overrides = [f"{name}.{key}={value}" for name, own in sections for key, value in own.items()]
    command = [sys.executable, str(ROOT / "sota" / "grpo.py"), *overrides, "hydra.run.dir=two"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    ours, theirs = (
        [{name: row.get(name) for name in SAME} for row in read_metrics(tmp_path / run)] for run in ("one", "two")
    )
    assert ours == theirs and len(ours) >= 4 and ours[1]["grad_norm"] > 0
    gain, model = done.stdout.split()[-2:]
    assert float(gain) == json.loads((tmp_path / "two" / "summary.json").read_text())["eval_gain"]
    assert model == "one/model" and (tmp_path / model / "config.json").exists()


HOOK = """
from grpo_rl.run.hooks import Hook

seen = []


class Noting(Hook):
    def on_start(self, run):
        seen.append("start")

    def on_groups(self, run, groups):
        seen.append(("groups", len(groups)))

    def on_batch(self, run, groups):
        seen.append(("batch", all(group.advantages is not None for group in groups)))

    def on_log(self, run, metrics, groups):
        seen.append(("log", run.step, len(groups), metrics.get("mine/step"), metrics["mine/evaluated"]))

    def on_micro_batch(self, run, tokens, losses):
        seen.append(("micro-batch", "loss" in losses.keys() and len(tokens) > 0))

    def on_step(self, run, metrics, groups):
        metrics["mine/step"] = run.step

    def on_evaluate(self, run, metrics):
        metrics["mine/evaluated"] = 1.0

    def on_end(self, run, summary):
        there = [(run.folder.path / name).exists() for name in ("model", "summary.json", "report.html")]
        seen.append(("end", summary["steps"], all(there)))
"""


@pytest.mark.slow
def test_each_method_of_a_hook_is_called_and_what_it_adds_is_logged(tiny_run, tmp_path, monkeypatch):
    (tmp_path / "noting.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*tiny_run, "hooks=[noting:Noting]", "train.steps=1", "train.checkpoint_frequency=0"]
    words += ["evaluate.rows=2", "evaluate.frequency=1"]
    rows = read_metrics(run_script(ROOT / "sota" / "grpo.py", words, tmp_path / "run"))
    seen = sys.modules["noting"].seen
    assert seen[1] == "start" and seen[-1] == ("end", 1, True) and {("micro-batch", True)} < {*seen}
    assert sum(each[0] == "groups" for each in seen) == 1 and {("batch", True)} < {*seen}
    assert [each for each in seen if each[0] == "log"] == [("log", 0, 0, None, 1.0), ("log", 1, 4, 1, 1.0)]
    assert rows[0]["mine/evaluated"] == 1.0 and (rows[1]["mine/step"], rows[1]["mine/evaluated"]) == (1, 1.0)


class Margin(Hook):
    def __init__(self, margin):
        self.margin = margin

    def on_step(self, run, metrics, groups):
        metrics["mine/margin"] = self.margin


@pytest.mark.slow
def test_a_hook_is_given_as_it_is(tiny_model, tmp_path):
    rows = [{"prompt": f"Say {n}."} for n in range(4)]
    run = grpo_rl.train(
        tiny_model, rows, lambda completion: [float(len(text)) for text in completion], folder=tmp_path / "run",
        hooks=[Margin(8)], **SECTIONS,
    )  # fmt: skip
    assert {row["mine/margin"] for row in run.metrics} == {8}


def test_wrong_settings_and_functions_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "Say yes."}]
    for settings, message in (
        ({"optimizer": {"lrr": 1.0}}, "optimizer.lrr; did you mean optimizer.lr"),
        ({"loss": {"surrogate": lambda ratios: ratios}}, "asks for ratios; it can have log_ratio, advantage"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_rl.train("no/model", rows, lambda completion: [1.0], **settings)
    assert list(tmp_path.iterdir()) == []
