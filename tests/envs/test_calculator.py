from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.data import keys
from grpo_rl.envs.base import Unjudgeable
from grpo_rl.envs.calculator import Calculator, CalculatorEnv, load_rows
from grpo_rl.envs.generated.chains import problems
from grpo_rl.envs.grading.numbers import extract_answer
from grpo_rl.envs.tools.arithmetic import calculate, has_operation
from grpo_rl.envs.tools.calls import MAX_ARGUMENT_CHARS

ROW = {"question": "What is 6 times 7, and 8 more?", "answer": "6 * 7 = 42\n42 + 8 = 50\n#### 50"}
TOO_LARGE = "Error: the numbers get too large"
BY_ZERO = "Error: division by zero"


def unreadable(reason: str) -> str:
    return f"Error: {reason}; use numbers, + - * / ** and brackets, such as 3*(4+5)"


NO_EXPRESSION = unreadable("that is no arithmetic expression")

VALUES = [
    # each operation, and what comes first
    ("3*(4+5)", "27"), ("48/2", "24"), ("7-10", "-3"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("2**10", "1024"),
    ("7//2", "3"), ("-7//2", "-4"), ("-3", "-3"), ("+3", "3"), ("--3", "3"), ("2**3**2", "512"), ("-2**2", "-4"),
    ("0", "0"), ("0*5", "0"), ("-0", "0"), ("5-5", "0"), ("2**-1", "0.5"), ("9**0.5", "3"), ("0**0", "1"),
    ("1e3", "1000"), ("1.5E+2", "150"), ("2e-1", "0.2"), (".5+.5", "1"), ("5.", "5"),
    # exact, where floats are not
    ("0.1+0.2", "0.3"), ("1.1*1.1", "1.21"), ("0.7*100", "70"), ("1/3*3", "1"), ("12345678.9*10", "123456789"),
    ("10**20+1-10**20", "1"),
    # ten decimals
    ("1/3", "0.3333333333"), ("2/3", "0.6666666667"), ("-1/3", "-0.3333333333"), ("1/8", "0.125"),
    ("100/7", "14.2857142857"),
    ("2**0.5", "1.4142135624"), ("1-1/10**11", "1"), ("10**25/3", "3333333333333333333333333.3333333333"),
    ("1/10**9", "1e-09"), ("-1/3/10**6", "-3.333333333e-07"), ("1/10**6", "0.000001"),
    # spellings
    ("3 × 4", "12"), ("8 ÷ 2", "4"), ("5 − 7", "-2"), ("2^3", "8"), ("3 x 4", "12"), ("3x4", "12"), ("(3)X(4)", "12"),
    ("1,234 + 1", "1235"), ("1,234,567*1", "1234567"), ("$48/2", "24"), ("$1,000.50 * 2", "2001"), ("48/2 =", "24"),
    ("48/2=25", "24"), ("7*4 = 28. So", "28"),
    ("[2+3]*4", "20"), ("  3\n+ 4 ", "7"), ("007+1", "8"), ("10.05+0", "10.05"), ("100+1", "101"),
    # thirty digits
    ("10**29*9", "9" + "0" * 29), ("-10**29*9", "-9" + "0" * 29), ("10**30", TOO_LARGE), ("-10**30", TOO_LARGE),
    ("9" * 30, "9" * 30), ("9" * 31, TOO_LARGE), ("10**30-1", "9" * 30),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), VALUES)
def test_expressions_have_their_value(expression, expected):
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1/0", BY_ZERO), ("1//0", BY_ZERO), ("0**-1", BY_ZERO), ("0**-0.5", BY_ZERO), ("1/(2-2)", BY_ZERO),
        ("9**3999999", TOO_LARGE), ("9**9**9", TOO_LARGE), ("10**10**10**10", TOO_LARGE), ("1e999", TOO_LARGE),
        ("2**(10**29)", TOO_LARGE), ("10**-1000", TOO_LARGE), ("1e308*1e308", TOO_LARGE),
        ("(10**30)**0.5*0+10**30", TOO_LARGE),
        ("9" * 200, TOO_LARGE), ("1e300**1.5", TOO_LARGE), ("*".join(["99999999"] * 22), TOO_LARGE),
        ("", unreadable("the expression is empty")), (" = ", unreadable("the expression is empty")),
        ("1" + "+1" * 100, unreadable("the expression has 201 characters, at most 200")),
        ("20% * 50", unreadable("there is no %, write 20/100 for 20%")),
        ("sqrt(16)", unreadable("can't read 's'")), ("x=7", unreadable("can't read 'x'")),
        ("=7", unreadable("the expression is empty")),
        ("'a'*9", unreadable("can't read \"'\"")), ("__import__('os')", unreadable("can't read '_'")),
        ("x", unreadable("can't read 'x'")), ("3;4", unreadable("can't read ';'")),
        ("4²", unreadable("can't read '²'")),
        ("５+1", unreadable("can't read '５'")), ("1, 2", unreadable("can't read ','")),
        ("1\x00", unreadable("can't read '\\x00'")),
        ("(-8)**(1/3)", unreadable("a negative number has no such power")),
        ("3+", NO_EXPRESSION), ("(3", NO_EXPRESSION), ("3 4", NO_EXPRESSION), ("3(4)", NO_EXPRESSION),
        ("()", NO_EXPRESSION),
        ("e", NO_EXPRESSION), ("E.e", NO_EXPRESSION), ("e(1)", NO_EXPRESSION), ("...", NO_EXPRESSION),
        ("1..e", NO_EXPRESSION),
        ("*(1)", NO_EXPRESSION), ("1e", NO_EXPRESSION), ("1.2.3", NO_EXPRESSION),
        ("(" * 100 + ")" * 100, NO_EXPRESSION),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_words(expression, expected):
    assert calculate(expression) == expected


def hostile_expressions() -> list[str]:
    """500 that are large, deep, long, or want to be more than arithmetic."""
    rng = random.Random(0)
    powers = ["**".join(["9"] * n) for n in range(2, 67)]
    towers = [f"({'(' * n}9{'**9)' * n})" for n in range(1, 33)]
    roots = ["2" + "**0.5" * n for n in range(1, 40)]
    products = ["*".join(["9" * digits] * (200 // (digits + 1))) for digits in range(1, 100)]
    factorials = ["*".join(str(i) for i in range(2, n))[:200] for n in range(10, 70)]
    quotients = ["/".join(str(rng.randint(10**8, 10**9)) for _ in range(20)) for _ in range(40)]
    sums = ["+".join(f"1/{rng.randint(10**5, 10**6)}" for _ in range(20)) for _ in range(40)]
    deep = ["(" * n + "1" + ")" * n for n in range(60, 100)] + ["-" * n + "1" for n in range(170, 200)]
    code = [
        "__import__('os').system('true')", "().__class__.__bases__[0].__subclasses__()",
        "open('/etc/passwd').read()", "[x for x in range(10**9)]", "(lambda: 1)()", "'a' * 10**9", "f'{1:>999999999}'",
        "eval('1')", "exit()",
        "print(1)", "1 if 1 else 2", "1 and 2", "1 < 2 < 3", "{1: 2}", "a = 1", "import os", "while 1: pass",
        "0x" + "f" * 99, "1_000", "1j**1j", "True + True", "None", "~1", "1 << 10**9", "5 % 3", "5 @ 3", "1; 2", "1\n2",
        "# 1", "\\", "\ud800",
    ]  # fmt: skip
    rest = ["".join(rng.choice("0123456789.eE+-*/() ") for _ in range(rng.randint(1, 200))) for _ in range(60)]
    return (powers + towers + roots + products + factorials + quotients + sums + deep + code + rest)[:500]


def test_500_hostile_expressions_are_refused_or_calculated_in_two_seconds():
    expressions = hostile_expressions()
    assert len(expressions) == 500
    start = time.process_time()
    results = [calculate(expression) for expression in expressions]
    assert time.process_time() - start < 2
    for expression, result in zip(expressions, results, strict=True):
        assert result.startswith("Error: ") or Decimal(result).is_finite(), (expression, result)
        assert len(result) < 150


@given(st.text() | st.text(alphabet="0123456789.eE+-*/() x^,$=", max_size=60))
def test_no_text_makes_it_fail(text):
    result = calculate(text)
    assert result.startswith("Error: ") or Decimal(result).is_finite()
    has_operation(text)


def written(parts: tuple) -> tuple[str, Fraction | None]:
    """An operation as text, and its value; None where zero divides."""
    (left, a), sign, (right, b) = parts
    if a is None or b is None or (sign == "/" and b == 0):
        return f"({left}{sign}{right})", None
    return f"({left}{sign}{right})", {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


@given(
    st.recursive(
        (st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)).map(lambda text: (text, Fraction(text))),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(written),
        max_leaves=8,
    )
)
def test_values_are_those_of_fractions(expression):
    text, value = expression
    if value is None:
        assert calculate(text) == BY_ZERO
    else:
        assert abs(Fraction(calculate(text)) - value) <= Fraction(1, 2 * 10**10)


def test_deep_recursion_of_the_caller_is_no_problem():
    def at_depth(depth: int) -> str:
        return calculate("-" * 150 + "1") if depth == 0 else at_depth(depth - 1)

    # Near the limit of Python's stack the expression is too much, and that is told, not raised.
    assert {at_depth(depth) for depth in (0, 400, 800)} <= {"1", NO_EXPRESSION}
    assert at_depth(0) == "1"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("6*12", True), ("6 x 12", True), ("(6)-1", True), ("$6+1", True), ("2^3", True), ("72", False), ("-72", False),
     ("--72", False), ("(72)", False), ("1e-5", False), ("six", False), ("", False), ("$72 =", False)],
)  # fmt: skip
def test_a_number_alone_is_nothing_to_calculate(expression, expected):
    assert has_operation(expression) is expected


# ---- the task ----


def dialog(*said: str, role: str = "tool") -> list[dict[str, str]]:
    """The policy's messages with the task's replies between them, as a collector plays them."""
    task = Calculator([ROW], tool_role=role)
    messages = task.prompt(ROW)
    for text in said:
        messages.append({"role": "assistant", "content": text})
        messages += task.reply(ROW, messages) or []
    return messages


CALL = "Calculator: 6*7+8"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # correctness, tool_use, answer_format
        ([CALL, "<answer>50</answer>"], (2.0, 0.5, 0.5)),
        ([CALL, "So it is 50."], (2.0, 0.5, 0.0)),
        (["Calculator: 6*7", "Calculator: 42+8", "<answer>50</answer>"], (2.0, 0.5, 0.5)),
        (["Calculator: 6*7", "<answer>50</answer>"], (2.0, 0.0, 0.5)),  # its 42 appears nowhere
        ([CALL, "<answer>5</answer>"], (0.0, 0.0, 0.5)),
        ([CALL, "50, or rather <answer>51</answer>"], (0.0, 0.5, 0.5)),
        ([CALL, "<answer>$50.00</answer>"], (2.0, 0.5, 0.5)),
        ([CALL, "<answer>150</answer>"], (0.0, 0.0, 0.5)),  # 50 is no number of it
        (["<answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["50"], (2.0, 0.0, 0.0)),
        # no use of a calculator: nothing calculated, nothing waited for, nothing understood
        (["Calculator: 50", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
        ([CALL + "\n50 <answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["<calculator>6*7+8", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["Calculator:", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
        (["Calculator: 1/0", "<answer>0</answer>"], (0.0, 0.0, 0.5)),
        (["Calculator: six*seven", "<answer>50</answer>"], (2.0, 0.0, 0.5)),
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
def test_a_conversation_earns_its_parts(said, expected, role):
    assert tuple(Calculator([ROW]).score_dialog(ROW, dialog(*said, role=role)).parts.values()) == expected


def test_a_result_counts_as_used_however_it_is_written():
    task, row = Calculator([]), {"question": "?", "answer": "#### -1234.5"}
    call = {"role": "assistant", "content": "Calculator: -1000 - 234.5"}
    for later in ("-1,234.50", "$1234.5", "so 1234.500 less"):
        after = [call, {"role": "tool", "content": "-1234.5"}, {"role": "assistant", "content": later}]
        assert task.score_dialog(row, task.prompt(row) + after).parts["tool_use"] == 0.5, later


def test_one_answer_is_a_conversation_of_one_message():
    parts = {"correctness": 2.0, "tool_use": 0.0, "answer_format": 0.5}
    assert Calculator([]).score(ROW, "<answer>50</answer>").parts == parts


def test_weights_come_from_the_config():
    task = Calculator([ROW], correctness=1, tool_use=3, answer_format=-1)
    assert task.score_dialog(ROW, dialog(CALL, "<answer>50</answer>")).parts == {
        "correctness": 1.0, "tool_use": 3.0, "answer_format": -1.0,
    }  # fmt: skip


def test_each_call_is_answered_until_the_policy_answers():
    task = Calculator([ROW])

    def reply(text: str):
        return task.reply(ROW, [*task.prompt(ROW), {"role": "assistant", "content": text}])

    assert reply("Calculator: 6*7\nCalculator: 1/0") == [
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "Error: division by zero"},
    ]
    [message] = reply("calculator(6*7)") or []
    assert message["content"] == "Error: that is no call. Write one as a line of its own, such as Calculator: 4*12*3"
    assert (
        reply("<answer>50</answer>") is None and reply("50") is None and reply(CALL + "\n<answer>50</answer>") is None
    )


@pytest.mark.parametrize("form", ["line", "json"])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_the_prompt_shows_calls_and_what_the_calculator_says_to_them(form, role):
    task = Calculator([ROW], form=form, tool_role=role)
    system, *examples, question = task.prompt(ROW)
    assert question == {"role": "user", "content": ROW["question"]}
    assert task.tools[0].written(form) in system["content"] and "{call}" not in system["content"]
    for asked, call, result, answer in zip(*(examples[i::4] for i in range(4)), strict=True):
        assert asked["role"] == "user"
        assert task.reply(ROW, [call]) == [result] and result["role"] == role
        assert answer == {"role": "assistant", "content": f"<answer>{result['content']}</answer>"}
    assert len(examples) == 8
    assert Calculator([ROW], system_prompt=None, examples=()).prompt(ROW) == [question]


def test_the_examples_in_the_prompt_earn_nothing():
    task = Calculator([{"question": "?", "answer": "#### 17"}])
    for end in ([], [{"role": "assistant", "content": ""}]):
        assert task.score_dialog(task.rows[0], task.prompt(ROW) + end).total == 0
    with pytest.raises(ValueError, match=r"env\.examples\[0\] has no text call"):
        Calculator([ROW], examples=[{"question": "?", "answer": "1"}])


def test_a_row_without_a_gold_number_is_no_right_answer():
    with pytest.raises(ValueError, match="answer of row 1 has no number: 'none'"):
        Calculator([ROW, {"question": "?", "answer": "none"}])
    with pytest.raises(Unjudgeable, match="no number"):
        Calculator([]).score({"question": "?", "answer": "none"}, "none")
    assert Calculator([]).gold(ROW) == "50" and Calculator([]).gold({"answer": "none"}) is None


def test_threads_get_their_own_results():
    task = Calculator([ROW])

    def play(number: int) -> str:
        call = f"Calculator: {number}*{number} + 1/(7+{number})"
        [message] = task.reply(ROW, [{"role": "assistant", "content": call}]) or []
        return message["content"]

    numbers = list(range(300)) * 3
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(play, numbers)) == [calculate(f"{n}*{n} + 1/(7+{n})") for n in numbers]


@pytest.mark.parametrize("piece", ["Calculator: 1+1\n", "Calculator: ", "<tool_call>", "1,1", "9", "<answer>1"])
def test_a_megabyte_of_anything_is_judged_in_time_linear_in_it(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    Calculator([]).score_dialog(ROW, dialog(CALL, text, text + "5"))
    assert time.process_time() - start < 5  # a quadratic scan takes hours


def test_an_expression_longer_than_the_calculator_takes_is_told_by_it():
    assert MAX_ARGUMENT_CHARS > 200  # its own message says how long an expression may be
    [reply] = dialog(f"Calculator: {'1+' * 150}1")[-1:]
    assert reply["content"] == unreadable("the expression has 301 characters, at most 200")


# ---- the environment and its data ----


def test_the_environment_plays_several_turns(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    env = CalculatorEnv(1, 2, tokenizer, path=path, system_prompt=None, reward={"tool_use": 1.0}, max_turns=3)
    turns = iter([[CALL, "50"], ["<answer>50</answer>", ""]])

    def policy(tensordict):
        for row, text in zip(tensordict.unbind(0), next(turns), strict=True):
            row[keys.TOKENS_RESPONSE] = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        return tensordict

    rollout = env.rollout(max_steps=2, policy=policy, break_when_any_done=False, break_when_all_done=True)
    assert rollout[keys.REWARD][:, -1].flatten().tolist() == [3.5, 2.0]


def test_generated_problems_are_solved_by_their_steps():
    rows = problems(500)
    assert len({row["question"] for row in rows}) == 500
    for row in rows:
        start, *steps = re.findall(r"\d+", row["question"])
        words = re.findall(r"add|subtract|multiply|divide", row["question"])
        expression = start
        for word, number in zip(words, steps, strict=True):
            expression = f"({expression}){dict(add='+', subtract='-', multiply='*', divide='/')[word]}{number}"
        value = extract_answer(row["answer"])
        assert calculate(expression) == str(value) and value == int(value) > 0, row
        assert 2 <= len(words) <= 4
    assert {len(re.findall(" = ", row["answer"])) for row in rows} == {2, 3, 4}
    assert all(any(word in row["question"] for row in rows) for word in ("add", "subtract", "multiply", "divide"))


def test_a_seed_gives_the_same_problems_again_and_another_gives_others():
    assert problems(50, seed=3) == problems(50, seed=3) and problems(20, seed=3) == problems(50, seed=3)[:20]
    assert not {row["question"] for row in problems(200, 0)} & {row["question"] for row in problems(200, 1)}


def test_no_held_out_problem_is_trained_on():
    train, test = load_rows("arithmetic", "train"), load_rows("arithmetic", "test")
    assert (len(train), len(test)) == (2000, 200)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    with pytest.raises(ValueError, match="arithmetic has no split 'dev'; it has train and test"):
        load_rows("arithmetic", "dev")


@pytest.mark.parametrize(("split", "rows", "calculations"), [("train", 7473, 23716), ("test", 1319, 4281)])
def test_the_calculations_in_gsm8k_have_the_values_that_are_written_there(real_data, split, rows, calculations):
    found = load_rows(real_data / "gsm8k" / f"{split}.jsonl")
    assert len(found) == rows
    # <<48/2=24>>; one of the test split's has no number on its right side, <<3/4=3/4>>.
    pairs = [pair for row in found for pair in re.findall(r"<<([^=<>]+)=([-\d.]+)>>", row["answer"])]
    assert len(pairs) == calculations
    assert [pair for pair in pairs if Decimal(calculate(pair[0])) != Decimal(pair[1])] == []


def test_the_solutions_of_gsm8k_are_right_answers(real_data):
    rows = load_rows(real_data / "gsm8k" / "test.jsonl")
    task = Calculator(rows)
    for row in rows:
        assert task.score(row, row["answer"]).parts == {"correctness": 2.0, "tool_use": 0.0, "answer_format": 0.0}
