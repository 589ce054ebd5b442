"""Texts made to break a judge of mathematics."""

from __future__ import annotations

import time

import pytest

from grpo_rl.envs.base import Reward
from grpo_rl.envs.math import Math

BOMBS = (
    "9^{9^{9^{9}}}", "9^{9^{9^{9^{9}}}}", "2^{10^{10}}", "10^{10^{100}}", "(10^{9})!", "((100!)!)!", "99999999!!",
    "\\sum_{i=1}^{10^{9}} i^{i}", "\\sum_{i=1}^{\\infty} \\frac{1}{i^{i}}", "\\prod_{n=1}^{10^{8}} n",
    "\\binom{10^{9}}{10^{5}}", "\\int_0^1 x^{x^{x^{x}}} dx", "\\int e^{e^{x^2}} \\sin(x^x) dx",
    "\\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin x))}{x^{x^x}}", "(x+1)^{10000}", "(a+b+c+d)^{60}(e+f+g+h)^{60}",
    "\\sqrt{\\sqrt{\\sqrt{2+\\sqrt{3+\\sqrt{5+\\sqrt{7+\\sqrt{11}}}}}}}", "0." + "3" * 900, "1" * 900, "1/" * 300 + "1",
    "1e999999999", "10^{-10^{10}}", "x^{x^{x^{x^{x^{x}}}}}", "\\frac{1}{0}", "\\frac{0}{0}", "\\infty - \\infty",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}^{100000}", "\\sin^{1000}(x) + \\cos^{1000}(x)", "\\log_{1}{2}",
    "2^{2^{30}} - 2^{2^{30}} + 1", "(1+\\sqrt{2})^{1000} + (1-\\sqrt{2})^{1000}", "10^{10} \\mod 7^{7^{7}}", "1000000!",
    "\\gcd(10^{50}, 10^{49}+1)", "\\tan(10^{30})", "[" + "0," * 300 + "0]", "\\{" + "x," * 300 + "y\\}",
)  # fmt: skip
BRACKETS = (
    ("{", "}"), ("(", ")"), ("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("\\left(", "\\right)"), ("2^{", "}"), ("-", ""),
    ("\\boxed{", "}"), ("\\sin(", ")"), ("[", "]"), ("|", "|"), ("\\text{", "}"), ("\\{", "\\}"), ("1+(", ")"),
)  # fmt: skip
PIECES = ("1", "a ", "\\boxed{1} ", "\\boxed{", "{", "}", "$", "\\", "\\frac", "答", "\\fbox ", "9^", "\n")
GOLDS = ("\\frac{\\sqrt{3}}{4}", "42", "(-\\infty, 2) \\cup (3, \\infty)", "x^2+2x+1", "\\{1,2\\}", "\\text{even}")


@pytest.mark.slow
def test_no_hostile_text_hangs_or_crashes_the_judge():
    inside = ["\ud800\U0010ffff\u202e\x001/2"]
    for bomb in BOMBS:
        inside += [bomb, f"{bomb}+7", f"\\frac{{1}}{{{bomb}}}", bomb * 2]
    for opened, closed in BRACKETS:
        for depth in (3, 30, 1000, 100_000):
            inside += [f"{opened * depth}1{closed * left}" for left in (depth, depth - 1, depth // 2, 0)]
    megabytes = [piece * (1_000_000 // len(piece)) for piece in PIECES]
    texts = [f"So it is $\\boxed{{{text}}}$." for text in inside + megabytes]
    for text in megabytes:
        texts += [text, text + "\\boxed{1}", "\\boxed{1}" + text]
    rows = [{"problem": "?", "answer": GOLDS[at % len(GOLDS)]} for at in range(len(texts))]
    start = time.monotonic()
    results = Math([]).score_many(rows, texts)
    assert time.monotonic() - start < 60
    assert [text[:200] for text, result in zip(texts, results, strict=True) if not isinstance(result, Reward)] == []
