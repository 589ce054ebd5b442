"""Texts made to break a judge of mathematics: from a seed, so that a failure can be seen again."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest

from grpo_rl.envs.base import Reward
from grpo_rl.envs.math import Math

COMMANDS = (
    "\\frac", "\\dfrac", "\\sqrt", "\\boxed", "\\fbox", "\\text", "\\left", "\\right", "\\cdot", "\\times", "\\pm",
    "\\pi",
    "\\infty", "\\sin", "\\log", "\\int", "\\sum", "\\prod", "\\lim", "\\binom", "\\begin{pmatrix}", "\\end{pmatrix}",
    "\\begin{cases}", "\\\\", "&", "\\cup", "\\in", "\\le", "\\ne", "\\to", "\\{", "\\}", "{", "}", "(", ")", "[",
    "]", "^",
    "_", "+", "-", "*", "/", "=", "<", ">", ",", ";", "!", "|", "%", "\\%", "$", "\\$", "x", "y", "n", "i", "e", "0",
    "1",
    "7", "42", "3.14", "1,000", " ", "\n", "and", "or", "\\circ", "\\hspace", "\\overline", "\\mathbb{R}",
    "'", '"', "~", "#",
)  # fmt: skip

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


def hostile_texts(count: int, seed: int = 0) -> list[str]:
    """``count`` answers to a problem; most have a box with the hostile part in it."""
    rng = Random(seed)
    return [rng.choice(_KINDS)(rng) for _ in range(count)]


def _boxed(rng: Random, inside: str) -> str:
    box = rng.choice(("\\boxed", "\\fbox"))
    return f"So it is ${box}{{{inside}}}$."


def _nesting(rng: Random) -> str:
    depth = rng.choice((3, 10, 30, 100, 1000, 100_000))
    opened, closed = rng.choice(
        (("{", "}"), ("(", ")"), ("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("\\left(", "\\right)"), ("2^{", "}"),
         ("-", ""),
         ("\\boxed{", "}"), ("\\sin(", ")"), ("[", "]"), ("|", "|"), ("\\text{", "}"), ("\\{", "\\}"), ("1+(", ")"))
    )  # fmt: skip
    left_open = rng.choice((0, 0, 1, depth // 2, depth))
    return _boxed(rng, opened * depth + "1" + closed * (depth - left_open))


def _megabytes(rng: Random) -> str:
    piece = rng.choice(
        ("1", "a ", "\\boxed{1} ", "\\boxed{", "{", "}", "$", "\\", "\\frac", "答", "\\fbox ", "9^", "\n")
    )
    text = piece * (rng.randint(100_000, 2_000_000) // len(piece))
    return rng.choice((text, text + "\\boxed{1}", _boxed(rng, text), "\\boxed{1}" + text))


def _unicode(rng: Random) -> str:
    # Lone surrogates too: a decoder that ignores errors may give them.
    text = "".join(
        chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000)))) for _ in range(40)
    )
    return rng.choice((text, _boxed(rng, text), _boxed(rng, text[:5] + "1/2" + text[5:10])))


def _bomb(rng: Random) -> str:
    bomb = rng.choice(BOMBS)
    return _boxed(rng, rng.choice((bomb, bomb + "+" + str(rng.randrange(100)), f"\\frac{{1}}{{{bomb}}}", bomb * 2)))


def _soup(rng: Random) -> str:
    return _boxed(rng, "".join(rng.choice(COMMANDS) for _ in range(rng.choice((2, 5, 10, 20, 40, 80)))))


def _mutation(rng: Random) -> str:
    text = list(
        rng.choice(("\\frac{\\sqrt{3}}{4}", "(-\\infty, 2) \\cup (3, \\infty)", "x^2+2x+1", "1,000", "\\{1,2\\}"))
    )
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 2)] = rng.choice(COMMANDS)
    return _boxed(rng, "".join(text))


_KINDS: tuple[Callable[[Random], str], ...] = (_nesting, _megabytes, _unicode, _bomb, _soup, _mutation)


GOLDS = ("\\frac{\\sqrt{3}}{4}", "42", "(-\\infty, 2) \\cup (3, \\infty)", "x^2+2x+1", "\\{1,2\\}", "\\text{even}")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(600, 0), pytest.param(10_000, 1, marks=pytest.mark.alone)])
def test_no_hostile_text_hangs_or_crashes_the_judge(count, seed):
    texts = hostile_texts(count, seed)
    rows = [{"problem": "?", "answer": GOLDS[at % len(GOLDS)]} for at in range(count)]
    start = time.monotonic()
    results = Math([]).score_many(rows, texts)
    assert time.monotonic() - start < 60
    assert [text[:200] for text, result in zip(texts, results, strict=True) if not isinstance(result, Reward)] == []
