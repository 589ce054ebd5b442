"""Reward functions and tasks of the user's own are tried before a model is loaded, and what fails is one line."""

import functools
import re
from pathlib import Path

import pytest
from tiny_runs import run_script
from transformers import AutoModelForCausalLM

from grpo_rl.assembly.environment import make_env
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]
run = functools.partial(run_script, Path(__file__).parents[2] / "sota" / "grpo.py")

SOURCE = """def column(completions, **columns):
    return [float(gold == text) for gold, text in zip(columns["solution"], completions)]

def one(completions, **columns):
    return 1.0

class Judge:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)

def long(completions, **columns):
    return [1.0 if not text else text[1000] for text in completions]

def odd(completions, prompts, **columns):
    return [float(len(text)) if "1" in prompt else None for text, prompt in zip(completions, prompts)]

def even(completions, prompts, **columns):
    return [float(len(text)) if "1" not in prompt else None for text, prompt in zip(completions, prompts)]
"""


@pytest.fixture(scope="module")
def folder(current_folder):
    (current_folder / "user_code.py").write_text(SOURCE)
    (current_folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}?"}}\n' for i in range(6)))
    return current_folder


WRONG = [
    ("column", "rows.jsonl, line 1: RewardFunctionError: user_code:column raised KeyError: 'solution' ({}, line 2);"),
    ("Judge", "env.reward=user_code:Judge is <class 'user_code.Judge'>; it must be a function, or an instance"),
]


@pytest.mark.parametrize(
    ("function", "message", "isolated"), [*((*wrong, "false") for wrong in WRONG), (*WRONG[0], "null")]
)
def test_a_reward_that_can_never_work_is_named_with_its_line(folder, tokenizer, capfd, function, message, isolated):
    words = ["env=prompt_response", "env.path=rows.jsonl", f"env.reward=user_code:{function}"]
    given = Settings.read(compose_config("grpo_gsm8k", [*words, f"env.isolated={isolated}"]))
    with pytest.raises(ValueError, match=re.escape(message.format(folder / "user_code.py"))) as error:
        make_env(given, tokenizer)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


def script_words(tiny_run, *words):
    own = ("env.path", "env.eval_path", "env.reward")
    tiny = [word for word in tiny_run if not word.startswith(own)]
    return [*tiny, "env=prompt_response", "env.path=rows.jsonl", "env.isolated=false", *words]


def test_a_script_ends_in_one_line_before_a_model_is_loaded(folder, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    message = "error: prompt_response can't score an empty response: .*user_code:one returned 1.0; .*, line 4"
    with pytest.raises(SystemExit, match=message) as stopped:
        run(script_words(tiny_run, "env.reward=user_code:one"), tmp_path / "run")
    assert "\n" not in str(stopped.value)


def test_a_reward_that_fails_in_the_run_ends_it_in_one_line_with_its_file_and_line(folder, tiny_run, tmp_path):
    message = r"^Stopped after step 0: .*IndexError: .*user_code\.py, line 12\).* Go on with: resume="
    with pytest.raises(SystemExit, match=message) as stopped:
        run(script_words(tiny_run, "env.reward=user_code:long"), tmp_path / "run")
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("advantage", ["zscore", "multi_reward"])
def test_functions_that_judge_their_own_rows_alone_train_on_all_rows(folder, tiny_run, tmp_path, advantage):
    words = ["env.reward=[user_code:odd,user_code:even]", f"loss.advantage={advantage}", "train.total_dialog_turns=32"]
    rows = read_metrics(run(script_words(tiny_run, *words), tmp_path / "run"))
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # of six rows one is odd's: each step has rows of the other function's
        assert row["reward/even"] > 0 and row["reward/mean"] > 0
        assert not any(name.startswith("failed") for name in row)
