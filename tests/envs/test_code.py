"""Code: programs are judged by tests that they can't reach, in the forms that data sets have."""

import json

import pytest

from grpo_rl.envs.code import OF_NUMBERS, OF_WORDS, Code, generated_rows, load_rows
from grpo_rl.envs.grading.program_tests import equal_outputs, program_of, read_tests
from grpo_rl.envs.sandbox.jails import jails
from grpo_rl.envs.task import Unjudgeable

SANDBOX = "bubblewrap" if jails() else "i_accept_no_sandbox"
ECHO = {"question": "Print what you read.", "tests": [{"input": "a b", "output": "a b"}, {"input": "c", "output": "c"}]}
FORMS = {
    "APPS": {"question": "q", "input_output": json.dumps({"inputs": ["1\n2", ["3", "4"]], "outputs": ["3", ["7"]]})},
    "MBPP": {"text": "q", "test_list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"], "test_setup_code": ""},
    "HumanEval": {
        "prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n", "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n",
    },
    "TACO": {
        "question": "q",
        "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}),
    },
    "one text": {"question": "q", "tests": "assert add(1, 2) == 3"},
}  # fmt: skip


def fenced(program):
    return f"Here:\n```python\n{program}\n```\nDone."


def rows_of(folder, row):
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return load_rows(folder / "rows.jsonl")


POLY = {
    "prompt": "def poly(x):\n    return x - 4\n\ndef zero():\n    'Find it.'\n", "entry_point": "zero",
    "canonical_solution": "    return 4\n", "test": "def check(candidate):\n    assert poly(candidate()) == 0",
}  # fmt: skip
NAMED = {
    "a builtin's name": (
        {"question": "q", "tests": {"fn_name": "sorted", "inputs": [[[3, 1]]], "outputs": [[1, 3]]}},
        "def sorted(x): return x[::-1]", ["pass", "class Solution:\n    def sorted(self, x): return 99"],
    ),
    "a builtin's name in a reference": (
        {"question": "q", "tests": ["assert max([1, 5]) == 5"], "code": "def max(x): return 5"},
        "def max(x): return x[1]", ["pass"],
    ),
    "a module that is not imported": (
        {"question": "q", "tests": ["assert math.isclose(f(2), 3.14159)"]},
        "def f(x): return 3.14159", ["class math: isclose = lambda *a: True\ndef f(x): return 0"],
    ),
    "what the reference imports": (
        {
            "question": "q", "tests": ["assert isclose(f(2), 3.14159)"],
            "code": "from math import isclose\ndef f(x): return 3.14159",
        },
        "def f(x): return 3.14159", ["isclose = lambda *a: True\ndef f(x): return 0"],
    ),
    "a helper in the prompt": (POLY, "def zero(): return 4", ["def poly(x): return 0\ndef zero(): return 7"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_name_of_a_test_is_not_the_programs_to_give(name, tmp_path):
    row, right, wrong = NAMED[name]
    (row,) = rows_of(tmp_path, row)
    rewards = Code([], sandbox=SANDBOX).score_many([row] * (1 + len(wrong)), [fenced(p) for p in (right, *wrong)])
    assert [reward.parts["all_passed"] for reward in rewards] == [1.0, *[0.0] * len(wrong)]


@pytest.mark.parametrize(
    ("test", "setup", "why"),
    [
        ("import numpy\nassert f(2) == 3", "", "numpy"),
        ("assert f(2) == 3", "import numpy", "numpy"),
        ("assert other(f(2)) == 3", "", "NameError"),  # the program is not asked for what its reference has not
    ],
)
def test_tests_that_fail_for_any_program_are_said_to_be_unjudgeable(test, setup, why, tmp_path):
    solution = "def f(x): return 3"
    (row,) = rows_of(tmp_path, {"question": "q", "tests": [test], "test_setup_code": setup, "solution": solution})
    with pytest.raises(Unjudgeable, match=why):
        Code([], sandbox=SANDBOX).score(row, fenced(solution))


def test_functions_under_a_main_guard_or_with_infinite_results_are_tested():
    guarded = "def f(x): return float('inf')\nif __name__ == '__main__': print(f(int(input())))"
    dataclass = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
    row = {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [Infinity]}'}
    assert Code([], sandbox=SANDBOX).score(row, fenced(dataclass + guarded)).parts["all_passed"] == 1.0


@pytest.mark.slow
def test_a_function_that_computes_too_long_is_measured():
    reward = Code([], sandbox=SANDBOX, time_s=1).score(FORMS["MBPP"], fenced("def add(a, b):\n    while True: pass"))
    assert reward.parts["tests"] == 0 and reward.measures == {"timed_out": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_published_forms_of_tests_pay_right_programs_in_full_and_wrong_ones_by_their_share(form, tmp_path):
    (row,) = rows_of(tmp_path, FORMS[form])
    task = Code([row], sandbox=SANDBOX)
    script = form == "APPS"
    right = "print(int(input()) + int(input()))" if script else "def add(a, b): return a + b"
    half = "print(3)" if script else "def add(a, b): return 3"
    assert task.score(row, fenced(right)).parts == {"tests": 0.5, "all_passed": 1.0, "answer_format": 0.1}
    earned = task.score(row, fenced(half)).parts
    assert earned["tests"] == {"HumanEval": 0.0, "one text": 0.5}.get(form, 0.25)
    assert earned["all_passed"] == (form == "one text")


def test_what_should_come_out_is_not_in_the_prompt(tmp_path):
    task = Code([], sandbox=SANDBOX)
    said = {
        form: task.prompt({"question": "q", **row})[-1]["content"] for form, row in FORMS.items() if form != "HumanEval"
    }
    assert said["APPS"] == "q"
    assert all(said[form].endswith("by calls such as add(1, 2).") for form in ("MBPP", "TACO", "one text"))
    comparing = [["assert isclose(f(2), 3.14159)"], ["assert compare(f(2), 3.14159) == True"]]
    for tests in comparing:
        for setup in ("", "from math import isclose\nfrom operator import eq as compare"):
            content = task.prompt({"question": "q", "tests": tests, "test_setup_code": setup})[-1]["content"]
            assert "3.14159" not in content
    helper = {"question": "q", "tests": ["def expect(a, b):\n    assert a == b\nexpect(add(1, 2), 3)"]}
    assert task.prompt(helper)[-1]["content"] == "q"


@pytest.mark.slow
def test_a_group_is_judged_at_once_and_a_program_out_of_time_is_measured():
    task = Code([ECHO], sandbox=SANDBOX, time_s=1)
    responses = [
        response
        for too_long in ("while True: pass", "import time; time.sleep(100)")
        for response in (fenced("print(input())"), fenced(too_long), "no program", fenced("print('a b')"))
    ]
    rewards = task.score_many([ECHO] * 8, responses)
    assert [reward.parts["tests"] for reward in rewards] == [0.5, 0.0, 0.0, 0.25] * 2
    assert [reward.measures.get("timed_out") for reward in rewards] == [0.0, 1.0, None, 0.0] * 2
    assert [task.is_right(reward) for reward in rewards[:4]] == [True, False, False, False]
    assert rewards[2].total == 0 and rewards[3].parts["answer_format"] == 0.1


def test_a_group_that_runs_out_of_time_has_no_reward_instead_of_a_wrong_one():
    task = Code([ECHO], sandbox=SANDBOX)
    task.ready(0.5)
    (reward,) = task.score_many([ECHO], [fenced("import time; time.sleep(100)")])
    assert isinstance(reward, TimeoutError) and "env.score_timeout_s" in str(reward)


@pytest.mark.slow
def test_generated_tasks_are_solved_by_their_solutions_and_none_is_in_both_splits():
    train, test = generated_rows("train"), generated_rows("test")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    kinds = len(OF_NUMBERS) + len(OF_WORDS)
    first = {row["solution"].split("\n", 1)[1].translate(str.maketrans("", "", "0123456789")): row for row in test}
    assert len(first) == kinds
    task = Code(test, sandbox=SANDBOX, max_tests=2)
    for row in first.values():
        assert task.score(row, task.demonstration(row)).parts["all_passed"] == 1.0, row["question"]


def test_at_most_so_many_tests_are_run_at_equal_distances():
    row = {"tests": [{"input": str(i), "output": ""} for i in range(10)]}
    assert [given for given, _ in read_tests(row, 4).pairs] == ["0", "2", "5", "7"]
    assert len(read_tests(row)) == 10


def test_a_row_that_can_t_be_judged_is_named_before_the_run(tmp_path):
    with pytest.raises(ValueError, match="rows.jsonl, line 1.*it must have as many inputs as outputs"):
        rows_of(tmp_path, {"question": "q", "tests": {"inputs": ["1"], "outputs": []}})


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\n```py\nb\n", "a"),  # the last is not closed
        ("print(1)", None),
        ("```python\n\n```", None),
        ("1. It is:\n   ```python\n   if x:\n     a\n\n   ```", "if x:\n  a\n"),  # in a list
        ("```b``` is\n```\na\n```", "a"),
        ("<think>\n```python\nb\n</think>\n```python\na\n``` Done", "a"),
        ("``` " * 20_000, None),
        ("```\n" * 40_001, None),
    ],
)
def test_the_program_is_the_last_block_that_is_closed(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("output", "wanted", "equal"),
    [
        ("1 2 \n\n", "1\n2", True),
        ("1 2", "1 2 3", False),
        ("0.1000000001", "0.1", True),
        ("0", "1e-9", False),
        ("1e-9", "0.0", True),
        ("1.0", "1", False),  # whole numbers are compared as they are written
        ("1000000001", "1000000000", False),
        ("nan", "0.5", False),
        ("1e400", "1.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(output, wanted, equal):
    assert equal_outputs(output, wanted) is equal
