"""A task of the user's own: its class tells its settings, and what can't be used is refused in one line."""

import json
import re
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra

from grpo_rl.assembly.environment import eval_rows, eval_tasks, make_env
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.config import main
from grpo_rl.settings.schema import Settings
from tests.envs.scoring import scored

pytestmark = pytest.mark.slow

SOURCE = """
from dataclasses import dataclass, field
from typing import Literal
from grpo_rl.envs.base import Reward, Task

class Echo(Task):
    reward_parts = ("echo",)
    def __init__(self, rows, weight: float = 1.0, ask: Literal["word", "noun"] = "word", bad=(), *,
                 stop: str | None = None, tags: list[str] = ["a"], deep: dict | None = None, copy: bool = False):
        self.rows, self.weight, self.tags = rows, weight, tags
    def prompt(self, row):
        return [{"role": "user", "content": row["word"]}]
    def score(self, row, response):
        return Reward({"echo": self.weight * (response == row["word"])})

@dataclass
class Plain(Echo):
    rows: list
    limit: int
    def __post_init__(self):
        self.weight = 1.0

class Made(Echo):
    @staticmethod
    def load_rows(path, split):
        return [{"word": f"{split} {i}"} for i in range(3)]

class Seeded(Echo):
    def __init__(self, rows, seed=0): ...

class Taken(Echo):
    def __init__(self, rows, repeats=0): ...

def task(rows): ...
"""


@pytest.fixture(scope="module")
def folder(current_folder):
    (current_folder / "own_tasks.py").write_text(SOURCE)
    (current_folder / "rows.jsonl").write_text('{"word": "night"}\n{"word": "day"}\n')
    return current_folder


def settings(*words, task="Echo", path="rows.jsonl"):
    given = [f"env.task=own_tasks:{task}", *([f"env.path={path}"] if path else []), *words]
    return Settings.read(compose_config("grpo_gsm8k", given))


def test_the_parameters_of_the_class_are_settings_with_its_defaults(folder):
    own = settings("env.weight=2", "env.tags=[x,y]", "env.deep={a: 1}").env
    assert own.dataset == "own_tasks:Echo"
    given = {"weight": 2, "tags": ["x", "y"], "deep": {"a": 1}}
    assert own.task == given | {"ask": "word", "bad": [], "stop": None, "copy": False}
    assert "system_prompt" not in own and own.repeats == 8
    run = settings("env.weight=3")
    assert Settings.restored(json.loads(run.as_json())) == run


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("Echo", ["env.ask=verb"], "env.ask is 'verb'; it should be 'word' or 'noun'"),
        ("Ecko", [], "has no Ecko; did you mean Echo"),
        ("Plain", [], "env.limit must be set: own_tasks:Plain can't do without"),
        ("Seeded", [], "own_tasks:Seeded has a setting seed, a name that is taken"),
        ("Taken", [], "own_tasks:Taken has a setting env.repeats, a name that is taken"),
        ("task", [], "it must be a class that inherits from grpo_rl.envs.base.Task"),
    ],
)
def test_a_class_or_setting_that_cannot_be_used_is_refused_before_anything_starts(folder, task, words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        settings(*words, task=task)
    assert "\n" not in str(error.value)


def test_an_environment_of_the_task_scores_and_its_lists_are_lists(folder, tokenizer):
    env = make_env(settings("env.weight=0.5", "env.tags=[x]"), tokenizer)
    assert env.task.tags == ["x"] and env.task.rows == [{"word": "night"}, {"word": "day"}]
    rewards = scored(env, 0, [tokenizer(text).input_ids for text in ("night", "day")])
    assert [reward.total for reward in rewards] == [0.5, 0]
    plain = make_env(settings("env.limit=3", task="Plain"), tokenizer)  # a dataclass, whose fields are settings
    assert plain.task.limit == 3 and plain.query(1) == "day"


@pytest.mark.nightly
def test_a_task_of_the_current_folder_scores_in_a_process_of_its_own(folder, tokenizer):
    env = make_env(settings("env.isolated=true"), tokenizer)
    assert scored(env, 0, [tokenizer("night").input_ids])[0].total == 1.0


def test_a_column_that_the_prompt_reads_is_named_with_the_rows_line_and_the_nearest(folder, tokenizer):
    (folder / "others.jsonl").write_text('{"word": "night"}\n\n{"words": "day"}\n')
    message = r"prompt of others.jsonl, line 3 raised KeyError: 'word' \(.*own_tasks.py, line \d+\);.* mean words\?"
    with pytest.raises(ValueError, match=message):
        make_env(settings(path="others.jsonl"), tokenizer)
    held = settings("env.eval_path=others.jsonl", "evaluate.rows=2")
    with pytest.raises(ValueError, match=f"held out: {message}"):
        eval_rows(held, make_env(settings(), tokenizer))


def test_a_task_may_make_its_rows_and_then_has_held_out_ones(folder, tokenizer):
    made = settings("evaluate.rows=2", task="Made", path=None)
    env = make_env(made, tokenizer)
    assert [row["word"] for row in env.task.rows] == ["train 0", "train 1", "train 2"]
    assert [row["word"] for row in eval_rows(made, env)] == ["test 0", "test 1"]
    with pytest.raises(ValueError, match=r"has no data of its own; set env\.path to a JSONL, .* such as trl-lib/tldr"):
        make_env(settings(path=None), tokenizer)


def test_held_out_rows_are_a_split_of_the_same_folder(folder, tokenizer):
    (folder / "both").mkdir()
    for split in ("train", "dev"):
        (folder / "both" / f"{split}.jsonl").write_text(f'{{"noun": "{split} 1"}}\n{{"noun": "{split} 2"}}\n')
    given = settings("env.columns={word: noun}", "env.eval_split=validation", "evaluate.rows=2", path="both")
    env = make_env(given, tokenizer)
    assert env.task.rows[0] == {"word": "train 1"} and eval_rows(given, env)[1] == {"word": "dev 2"}
    with pytest.raises(ValueError, match="needs env.eval_path next to env.path=both, or env.eval_split"):
        eval_rows(settings("env.columns={word: noun}", "evaluate.rows=2", path="both"), env)


def test_a_task_of_ones_own_is_evaluated_next_to_another_under_the_name_of_its_class(folder, tokenizer):
    tasks = "evaluate.tasks=[{task: 'own_tasks:Echo', rows: 2, path: rows.jsonl}, {task: 'own_tasks:Made', rows: 3}]"
    given = settings("evaluate.rows=2", tasks)
    echo, made = eval_tasks(given, tokenizer, make_env(given, tokenizer))
    assert (echo.name, made.name) == ("Echo", "Made")
    assert [row["word"] for row in echo.rows] == ["night", "day"]
    assert [row["word"] for row in made.rows] == ["test 0", "test 1", "test 2"]
    given = settings("evaluate.rows=2", tasks.replace("}, {", ", env: {weight: 3, tags: [b]}}, {"))
    echo, _ = eval_tasks(given, tokenizer, make_env(given, tokenizer))
    assert (echo.env.task.weight, echo.env.task.tags) == (3.0, ["b"]) and given.env["weight"] == 1.0
    with pytest.raises(ValueError, match="evaluate.tasks names Echo twice"):
        settings("evaluate.rows=2", "evaluate.tasks=[{task: 'a:Echo', rows: 2}, {task: 'b:Echo', rows: 2}]")


def started(monkeypatch, *words):
    """The settings of `env` that a script with these arguments gets, one for each job."""
    got = []
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    GlobalHydra.instance().clear()
    main(config_name="grpo_gsm8k")(lambda settings, folder: got.append(settings.env))()
    return got


def test_settings_of_a_config_file_give_way_to_the_command_line_and_a_wrong_one_names_the_file(folder, monkeypatch):
    (folder / "conf").mkdir()
    echo = "defaults: [grpo, {env: own}, _self_]\nenv: {dataset: own_tasks:Echo, path: rows.jsonl, weight: 5}\n"
    (folder / "conf" / "mine.yaml").write_text(echo)
    (folder / "conf" / "wrong.yaml").write_text(echo.replace("weight", "weigth"))
    words = ["--config-dir", "conf", f"hydra.run.dir={folder / 'run'}", "--config-name"]
    assert started(monkeypatch, *words, "mine")[0].task["weight"] == 5
    (env,) = started(monkeypatch, *words, "mine", "env.weight=4", "++env.ask=noun", "env.columns.word=word")
    assert (env.task["weight"], env.task["ask"], env.columns) == (4, "noun", {"word": "word"})
    with pytest.raises(SystemExit, match=r"wrong\.yaml, unknown config key env\.weigth; did you mean env\.weig"):
        started(monkeypatch, *words, "wrong")


@pytest.mark.nightly
def test_a_sweep_over_two_tasks_takes_a_setting_of_both(folder, monkeypatch):
    words = ["env.task=own_tasks:Echo,own_tasks:Made", "env.weight=9", "env.path=rows.jsonl", "-m"]
    words.append(f"hydra.sweep.dir={folder / 'sweep'}")
    got = started(monkeypatch, *words, "+env.tags=[x]")
    assert [(env.dataset, env.task["weight"]) for env in got] == [("own_tasks:Echo", 9), ("own_tasks:Made", 9)]
