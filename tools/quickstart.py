"""The quickstart's word problems in GSM8K's format: `python tools/quickstart.py` writes the shipped files.

Ten one-step wordings over the four operations (85 % of the problems) and three two-step ones. Questions are short, as
the prompt's length is most of what a step costs, and numbers small, so that a 135M model starts low and can learn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_rl.envs.gsm8k import SHIPPED
from grpo_rl.envs.tools.arithmetic import Numbers, solution

TRAIN, TEST = 500, 200
TWO_STEP_SHARE = 0.15

# Kim and pens are the config's worked example, which so is never a problem.
NAMES = (
    "Ana", "Ben", "Carla", "Dan", "Ella", "Finn", "Grace", "Hugo", "Iris",
    "Jack", "Lena", "Marco", "Nora", "Omar", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "balls", "books", "buttons", "cards", "coins", "cookies", "eggs",
    "flowers", "hats", "marbles", "oranges", "shells", "stamps", "toys",
)  # fmt: skip


@dataclass(frozen=True)
class Template:
    """A wording, how its numbers are drawn, and the operators that take them one after the other."""

    wording: str
    draw: Callable[[random.Random], Numbers]
    operators: str


def _add(rng: random.Random) -> Numbers:
    return rng.randint(2, 20), rng.randint(2, 20)


def _subtract(rng: random.Random) -> Numbers:
    start = rng.randint(3, 20)
    return start, rng.randint(2, start - 1)


def _multiply(rng: random.Random) -> Numbers:
    return rng.randint(2, 9), rng.randint(2, 9)


def _divide(rng: random.Random) -> Numbers:
    each, parts = _multiply(rng)
    return each * parts, parts


def _multiply_add(rng: random.Random) -> Numbers:
    return *_multiply(rng), rng.randint(2, 20)


def _multiply_subtract(rng: random.Random) -> Numbers:
    boxes, each = _multiply(rng)
    return boxes, each, rng.randint(2, boxes * each - 1)


def _add_subtract(rng: random.Random) -> Numbers:
    start, more = _add(rng)
    return start, more, rng.randint(2, start + more - 1)


ONE_STEP = (
    Template("{n} has {0} {t} and buys {1} more. How many {t} does {n} have now?", _add, "+"),
    Template("{n} has {0} {t} and finds {1} more. How many {t} does {n} have now?", _add, "+"),
    Template("{n} has {0} {t} and {m} has {1}. How many {t} do they have together?", _add, "+"),
    Template("{n} has {0} {t} and gives away {1}. How many {t} are left?", _subtract, "-"),
    Template("{n} has {0} {t} and loses {1}. How many {t} does {n} have now?", _subtract, "-"),
    Template("There are {0} {t} on a table. {n} takes {1}. How many {t} are left?", _subtract, "-"),
    Template("{n} has {0} boxes with {1} {t} in each box. How many {t} does {n} have?", _multiply, "*"),
    Template("{n} buys {0} bags with {1} {t} in each bag. How many {t} does {n} buy?", _multiply, "*"),
    Template("{n} shares {0} {t} equally among {1} friends. How many {t} does each friend get?", _divide, "/"),
    Template("{n} puts {0} {t} equally into {1} boxes. How many {t} are in each box?", _divide, "/"),
)
TWO_STEP = (
    Template("{n} has {0} boxes with {1} {t} in each box and buys {2} more. How many {t} does {n} have now?",
             _multiply_add, "*+"),
    Template("{n} has {0} boxes with {1} {t} in each box and gives away {2}. How many {t} are left?",
             _multiply_subtract, "*-"),
    Template("{n} has {0} {t}, buys {1} more and gives away {2}. How many {t} are left?", _add_subtract, "+-"),
)  # fmt: skip


def problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """``count`` problems, no question twice, in an order that mixes wordings."""
    rng = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        template = rng.choice(TWO_STEP if rng.random() < TWO_STEP_SHARE else ONE_STEP)
        numbers = template.draw(rng)
        name, other = rng.sample(NAMES, 2)
        question = template.wording.format(*numbers, n=name, m=other, t=rng.choice(THINGS))
        found.setdefault(question, {"question": question, "answer": solution(numbers, template.operators)})
    return list(found.values())


def files() -> dict[Path, str]:
    """The contents of the shipped files: path -> JSONL. The held-out problems are those after the training ones."""
    rows = problems(TRAIN + TEST)
    splits = {"quickstart-train": rows[:TRAIN], "quickstart-test": rows[TRAIN:]}
    return {SHIPPED[name]: "".join(json.dumps(row) + "\n" for row in split) for name, split in splits.items()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8", newline="\n")
        print(f"{path}: {len(content.splitlines())} problems")
