import json
import re
from decimal import Decimal

import pytest

from grpo_rl.envs.base import Unjudgeable
from grpo_rl.envs.calculator import Calculator, load_rows
from grpo_rl.envs.grading.numbers import extract_answer
from grpo_rl.envs.tools.arithmetic import calculate, problems
from tests.envs.conftest import said

ROW = {"question": "What is 6 times 7, and 8 more?", "answer": "6 * 7 = 42\n42 + 8 = 50\n#### 50"}
CALL = "Calculator: 6*7+8"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # correctness, tool_use, answer_format
        ([CALL, "<answer>50</answer>"], (2.0, 0.5, 0.5)),
        ([CALL, "So it is 50."], (2.0, 0.5, 0.0)),
        (["Calculator: 6*7", "Calculator: 42+8", "<answer>50</answer>"], (2.0, 0.5, 0.5)),
        (["Calculator: 6*7", "<answer>50</answer>"], (2.0, 0.0, 0.5)),  # its 42 appears nowhere
        ([CALL, "<answer>5</answer>"], (0.0, 0.0, 0.5)),
        ([CALL, "50, or rather <answer>51</answer>"], (0.0, 0.5, 0.5)),
        ([CALL, "<answer>150</answer>"], (0.0, 0.0, 0.5)),  # 50 is no number of it
        (["<answer>50</answer>"], (2.0, 0.0, 0.5)),
        # no use of a calculator: nothing calculated, nothing waited for, nothing understood
        (["Calculator: 50", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
        ([CALL + "\n50 <answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["<calculator>6*7+8", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["Calculator: 1/0", "<answer>0</answer>"], (0.0, 0.0, 0.5)),
        # cut off at a call: the numbers in it are no answer
        (["Calculator: 42+50"], (0.0, 0.0, 0.0)),
        ([CALL, "Calculator: 50"], (0.0, 0.5, 0.0)),
        (["", ""], (0.0, 0.0, 0.0)),
        # the chat template's form
        (['<tool_call>{"name": "calculator", "arguments": {"expression": "6*7+8"}}</tool_call>', "<answer>50</answer>"],
         (2.0, 0.5, 0.5)),
        (['<tool_call>{"name": "calculator", "arguments": "6*7+8"}</tool_call>', "<answer>50</answer>"],
         (2.0, 0.0, 0.5)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_conversation_earns_its_parts(texts, expected, role):
    messages = said(Calculator([ROW], tool_role=role), ROW, *texts)
    assert tuple(Calculator([ROW]).score_dialog(ROW, messages).parts.values()) == expected


def test_a_result_counts_as_used_however_it_is_written():
    task, row = Calculator([]), {"question": "?", "answer": "#### -1234.5"}
    for later in ("-1,234.50", "$1234.5", "so 1234.500 less"):
        messages = said(task, row, "Calculator: -1000 - 234.5", later)
        assert task.score_dialog(row, messages).parts["tool_use"] == 0.5, later


def test_the_examples_in_the_prompt_earn_nothing():
    task = Calculator([{"question": "?", "answer": "#### 17"}])
    for end in ([], [{"role": "assistant", "content": ""}]):
        assert task.score_dialog(task.rows[0], task.prompt(ROW) + end).total == 0


def test_a_row_without_a_gold_number_is_no_right_answer():
    with pytest.raises(ValueError, match="answer of row 1 has no number: 'none'"):
        Calculator([ROW, {"question": "?", "answer": "none"}])
    with pytest.raises(Unjudgeable, match="no number"):
        Calculator([]).score({"question": "?", "answer": "none"}, "none")
    assert Calculator([]).gold(ROW) == "50" and Calculator([]).gold({"answer": "none"}) is None


def test_generated_problems_are_solved_by_their_steps():
    rows = problems(500)
    assert len({row["question"] for row in rows}) == 500
    assert problems(20) == rows[:20] and rows[0] not in problems(500, seed=1)
    for row in rows:
        start, *steps = re.findall(r"\d+", row["question"])
        words = re.findall(r"add|subtract|multiply|divide", row["question"])
        expression = start
        for word, number in zip(words, steps, strict=True):
            expression = f"({expression}){dict(add='+', subtract='-', multiply='*', divide='/')[word]}{number}"
        value = extract_answer(row["answer"])
        assert calculate(expression) == str(value) and value == int(value) > 0, row
    assert {len(re.findall(" = ", row["answer"])) for row in rows} == {2, 3, 4}
    assert all(any(word in row["question"] for row in rows) for word in ("add", "subtract", "multiply", "divide"))


def test_no_held_out_problem_is_trained_on():
    train, test = load_rows("arithmetic", "train"), load_rows("arithmetic", "test")
    assert (len(train), len(test)) == (2000, 200)
    assert not {row["question"] for row in train} & {row["question"] for row in test}


@pytest.mark.slow
@pytest.mark.parametrize(("split", "rows", "calculations"), [("train", 7473, 23716), ("test", 1319, 4281)])
def test_gsm8ks_calculations_have_their_values_and_its_solutions_are_right(real_data, split, rows, calculations):
    found = load_rows(real_data / "gsm8k" / f"{split}.jsonl")
    assert len(found) == rows
    # <<48/2=24>>; one of the test split's has no number on its right side, <<3/4=3/4>>.
    pairs = [pair for row in found for pair in re.findall(r"<<([^=<>]+)=([-\d.]+)>>", row["answer"])]
    assert len(pairs) == calculations
    assert [pair for pair in pairs if Decimal(calculate(pair[0])) != Decimal(pair[1])] == []
    task = Calculator(found)
    for row in found:
        assert task.score(row, row["answer"]).parts == {"correctness": 2.0, "tool_use": 0.0, "answer_format": 0.0}


def function_call(expression):
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "function": function}]}


CLIPS = {"question": "She sold 48 clips, and then half as many. How many?", "answer": "#### 72"}


def test_in_the_form_of_functions_calls_are_run_and_pay_as_those_in_text_do():
    task = Calculator([CLIPS], form="function")
    assert [tool["function"]["name"] for tool in task.tools] == ["calculator"]
    messages = [*task.prompt(CLIPS), function_call("48+48/2")]
    reply = task.reply(CLIPS, messages)
    assert reply == [{"role": "tool", "tool_call_id": "call00000", "name": "calculator", "content": "72"}]
    assert task.score_dialog(CLIPS, messages).total == 0  # cut off at the call
    messages += [*reply, {"role": "assistant", "content": "<answer>72</answer>"}]
    assert task.reply(CLIPS, messages) is None
    assert task.score_dialog(CLIPS, messages).parts == {"correctness": 2.0, "tool_use": 0.5, "answer_format": 0.5}
    # A call that stands in the text was not run, and earns nothing for the use of a tool.
    written = {"role": "assistant", "content": "Calculator: 48+48/2"}
    assert task.score_dialog(CLIPS, [*task.prompt(CLIPS), written, *messages[-2:]]).parts["tool_use"] == 0
    assert task.reply(CLIPS, [*task.prompt(CLIPS), written]) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculator", "{"),
        ("calculator", '{"other": "1+1"}'),
        ("calculator", '{"expression": "__import__"}'),
        ("nothing", '{"expression": "48+48/2"}'),
    ],
)
def test_a_wrong_call_of_a_function_gets_its_fault_as_reply_and_is_no_use_of_a_tool(name, arguments):
    task, message = Calculator([CLIPS], form="function"), function_call("")
    message["tool_calls"][0]["function"] = {"name": name, "arguments": arguments}
    messages = [*task.prompt(CLIPS), message]
    (result,) = task.reply(CLIPS, messages)
    assert result["content"].startswith("Error: ")
    messages += [result, {"role": "assistant", "content": "<answer>72</answer>"}]
    assert task.score_dialog(CLIPS, messages).parts == {"correctness": 2.0, "tool_use": 0.0, "answer_format": 0.5}
