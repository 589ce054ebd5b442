"""`grpo-rl eval`: scores of an endpoint and of a model, what is written, how it goes on, and comparisons."""

import json

import pandas as pd
import pytest

from grpo_rl.cli import main
from grpo_rl.engines.base import OutOfMemoryError
from grpo_rl.envs.base import Reward, Task
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.evaluation.models import model_folder
from grpo_rl.evaluation.results import TaskResult, comparison_table, read_eval_file, write_responses
from grpo_rl.evaluation.sources import ServedSource
from grpo_rl.testing import save_tiny_model
from grpo_rl.training.evaluate import Evaluation


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(6)))
    return path


def knows_up_to_three(body):
    """A model that is right about 0 to 3, greedily; sampled, it is right with even seeds."""
    number = int(body["messages"][-1]["content"][0])
    if body["temperature"]:
        return f"<answer>{number if body['seed'] % 2 == 0 else 99}</answer>"
    return f"<answer>{number if number < 4 else 99}</answer>"


@pytest.mark.slow
def test_an_endpoint_is_scored_with_pass_at_k_and_majority(server, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.respond = knows_up_to_three
    out = tmp_path / "out"
    words = ["eval", server.url, "tasks=[gsm8k]", f"path.gsm8k={data}", "samples=4", f"out={out}"]
    assert main(words) == 0
    stored = json.loads((out / "eval.json").read_text())
    scores = stored["tasks"]["gsm8k"]["scores"]
    assert scores["accuracy"]["mean"] == pytest.approx(4 / 6)
    assert scores["accuracy"]["ci95"] == pytest.approx([0.3000, 0.9032], abs=1e-4)  # Wilson, 4 of 6
    # Two of four right: of the 6 pairs 5 have a right one; 2 votes against 2 tie.
    assert scores["pass@1"]["mean"] == 0.5 and scores["pass@2"]["mean"] == pytest.approx(5 / 6)
    assert scores["pass@4"]["mean"] == 1 and scores["maj@4"]["mean"] == 0.5 and scores["tied"]["mean"] == 1
    assert scores["reward"]["mean"] == pytest.approx(2.5 * 4 / 6 + 0.5 * 2 / 6)  # right 2, format 0.5
    responses = pd.read_parquet(out / "responses")
    assert len(responses) == 6 + 24 and sum(responses["correct"]) == 4 + 12
    assert responses.iloc[5][["kind", "query", "gold", "answer"]].tolist() == ["greedy", "5?", "5", "99"]
    written = "".join(p.read_bytes().decode(errors="replace") for p in out.rglob("*") if p.is_file())
    assert "sk-secret" not in written + "".join(capsys.readouterr())
    assert set(server.keys) == {"Bearer sk-secret"}


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_goes_on_with_the_tasks_that_lack(server, data, tmp_path, capsys):
    out, server.respond = tmp_path / "out", knows_up_to_three
    words = ["eval", server.url, "tasks=[gsm8k,countdown]", f"path.gsm8k={data}", "rows=4", f"out={out}"]
    words += ["concurrency=1"]
    real = server.respond
    server.respond = lambda body: real(body) if "?" in body["messages"][-1]["content"][:2] else server.fail()
    server.fail = lambda: server.replies.extend([(500, {})] * 99) or "late"
    assert main([*words, "retries=0"]) == 1  # the first puzzle is answered, the others fail
    told = capsys.readouterr()
    assert "countdown: failed" in told.err and f"go on with out={out}" in told.err and "accuracy" in told.out
    server.replies.clear()
    server.bodies.clear()
    server.respond = lambda body: "no idea"
    assert main(words) == 0
    assert len(server.bodies) == 4  # the puzzles alone
    assert list(json.loads((out / "eval.json").read_text())["tasks"]) == ["gsm8k", "countdown"]
    assert main([*words, "seed=1"]) == 2
    assert "another model or with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_that_cannot_be_judged_fails_alone(server, data, tmp_path, capsys, monkeypatch):
    server.respond = lambda body: "<answer>1</answer>\ud800"
    real = ServedSource.evaluate

    def evaluate(self, name, *rest):
        if name == "countdown":
            raise OutOfMemoryError("none of the 4 held-out responses could be judged")
        return real(self, name, *rest)

    monkeypatch.setattr(ServedSource, "evaluate", evaluate)
    words = ["eval", server.url, "tasks=[countdown,gsm8k]", f"path.gsm8k={data}", "rows=4", f"out={tmp_path / 'out'}"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "countdown: failed: none of the 4" in told and "Not evaluated: countdown; go on with" in told
    assert list(json.loads((tmp_path / "out" / "eval.json").read_text())["tasks"]) == ["gsm8k"]


def test_texts_that_utf_8_cannot_hold_are_written(tmp_path):
    task = GSM8K([{"question": "a\ud800", "answer": "#### 1"}])
    evaluation = Evaluation([1.0], {}, {}, ["p"], ["b\udfff"], [1], [False], correct=[True], answers=["c\ud800"])
    write_responses(tmp_path, "gsm8k", task, task.rows, {"greedy": evaluation})
    row = pd.read_parquet(tmp_path / "responses").iloc[0]
    assert row[["query", "completion", "answer"]].tolist() == ["a?", "b?", "c?"]


def test_a_comparison_is_by_rows_with_a_verdict_in_words():
    ids, nothing = list("abcdefgh"), [0.0] * 8
    a = {"gsm8k": TaskResult(ids, {"accuracy": nothing, "reward": nothing})}
    b = {"gsm8k": TaskResult(ids, {"accuracy": [1.0] * 7 + [0.0], "reward": [1.0, 0.0] * 4})}
    table = comparison_table(("A", "B"), a, b)
    cells = {row[1]: row for row in zip(*(column.cells for column in table.columns), strict=True)}
    # Seven of eight gain 1: mean 0.875, standard error 0.3536 / sqrt(8) = 0.125, t(7) = 2.365
    assert cells["accuracy"][2:] == ("0.000", "0.875", "+0.875", "+0.579 to +1.171", "better")
    assert cells["reward"][4] == "+0.500" and cells["reward"][6] == "better"
    worse = comparison_table(("B", "A"), b, a)
    assert "worse" in [*worse.columns[6].cells]


def test_an_endpoint_that_is_not_there_is_reported_in_one_line(capsys):
    assert main(["eval", "http://127.0.0.1:9/v1", "tasks=[gsm8k]", "retries=0"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "127.0.0.1:9" in error and "\n" not in error


class Echo(Task):
    reward_parts = ("echo",)

    def __init__(self, rows, weight: float = 1.0, api_key: str = ""):
        self.rows, self.weight = rows, weight

    def prompt(self, row):
        return [{"role": "user", "content": row["word"]}]

    def score(self, row, response):
        return Reward({"echo": self.weight * (response == row["word"])})


@pytest.mark.slow
def test_a_task_of_ones_own_has_its_settings_which_a_comparison_names_and_no_secret_is_stored(server, tmp_path, capsys):
    (tmp_path / "words.jsonl").write_text('{"word": "night"}\n{"word": "day"}\n')
    server.respond = lambda body: "day"
    words = [f"tasks=[{__name__}:Echo]", f"path.Echo={tmp_path / 'words.jsonl'}"]
    for name, own in (("a", "env.weight=3"), ("b", "env.api_key=hidden")):
        assert main(["eval", server.url, *words, own, f"out={tmp_path / name}"]) == 0
    stored = json.loads((tmp_path / "a" / "eval.json").read_text())
    assert stored["tasks"][f"{__name__}:Echo"]["scores"]["reward"]["mean"] == 1.5
    assert "hidden" not in (tmp_path / "b" / "eval.json").read_text()
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "Note: the evaluations differ in env.api_key, env.weight" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_two_models_are_evaluated_on_one_engine_each_and_compared(data, tmp_path, capsys):
    models = [str(save_tiny_model(tmp_path / f"model{seed}", seed=seed)) for seed in (0, 1)]
    words = ["tasks=[gsm8k,calculator]", f"path.gsm8k={data}", "path.calculator=arithmetic", "rows=4", "samples=2"]
    words += ["max_new_tokens=4", "max_model_len=512", "engine=transformers", "env.system_prompt=null"]
    words += ["env.examples=[]", f"out={tmp_path / 'out'}"]
    assert main(["eval", *models, *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "B - A" in out and out.count("Written to") == 2
    _, tasks = read_eval_file(tmp_path / "out" / "b")
    assert list(tasks) == ["gsm8k", "calculator"]
    sampled = {"sampled_reward", "pass@1", "pass@2", "maj@2", "tied"}
    assert set(tasks["calculator"].scores) == {"reward", "accuracy"} | sampled
    assert len(pd.read_parquet(tmp_path / "out" / "a" / "responses")) == 2 * 4 * 3


def test_a_run_and_its_checkpoint_are_models(tmp_path, monkeypatch):
    exported = []
    monkeypatch.setattr("grpo_rl.evaluation.models.export_checkpoint", lambda *paths: exported.append(paths))
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (2, 10):
        (checkpoints / f"checkpoint_{step:06d}.pt").touch()
    for name, expected in ((tmp_path / "run", 10), (checkpoints / "checkpoint_000002.pt", 2)):
        with model_folder(str(name)) as folder:
            assert folder.parent.is_dir()
        assert exported.pop() == (checkpoints / f"checkpoint_{expected:06d}.pt", folder) and not folder.parent.exists()
    save_tiny_model(tmp_path / "run" / "model")  # as a finished run has it
    with model_folder(str(tmp_path / "run")) as folder:
        assert folder == tmp_path / "run" / "model" and not exported
