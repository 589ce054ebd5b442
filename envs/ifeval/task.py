"""IFEval: instructions whose following can be checked, paid by how many of them a response follows."""

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from typing_extensions import override

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, weight
from grpo_rl.envs.ifeval.language import punkt
from grpo_rl.envs.ifeval.verdicts import Instruction, parse, verdicts
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Task, asking, opening

COLUMNS = {"key": int | str, "prompt": str | list, "instruction_id_list": list, "kwargs": list}
SPLITS = ("train", "test")
HUB_NAME = "google/IFEval"
TEST_SHARE = 0.2
SPLIT_SEED = 7
"""The seed of the split, by which 105 of 541 rows are held out, two or more of each of the 25 types of instructions."""
COUNT_SENTENCES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
"""Instructions that need NLTK's sentence data."""


class IFEval(Task):
    """Instructions whose following can be checked; a response earns ``strict``, ``all`` and ``loose``.

    "I am planning a trip to Japan, and I would like thee to write an itinerary for my journey in a Shakespearean style.
    You are not allowed to use any commas in your response." A response without commas earns 2, one with them nothing:

    >>> row = {"key": 1001, "prompt": "I am planning a trip to Japan, [...] not allowed to use any commas [...]",
    ...     "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> task = IFEval([row])
    >>> task.score(row, "On the first day thou shalt behold fair Kyoto.").parts
    {'strict': 1.0, 'all': 1.0}

    Rows have ``key``, ``prompt``, a text or chat messages, ``instruction_id_list`` and ``kwargs``. Only parts with a
    weight other than 0 are judged and named in :attr:`reward_parts`.

    Raises:
        ValueError: all weights are 0, or rows count sentences, and NLTK's data for it can't be had.
    """

    reward_parts = ("strict", "all", "loose")
    correct_part = "all"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        strict: Annotated[float, weight("the share of instructions that are followed")] = 1.0,
        all: Annotated[float, weight("all of them are followed")] = 1.0,
        loose: Annotated[float, weight("that share, with a greeting, a closing line or bold type forgiven")] = 0.0,
        system_prompt: SystemPrompt = None,
    ) -> None:
        weights = {"strict": strict, "all": all, "loose": loose}
        self._weights = {name: float(weight) for name, weight in weights.items() if weight}
        if not self._weights:
            raise ValueError(f"the weights env.reward={weights} pay for nothing; give one another value than 0")
        self.reward_parts = tuple(self._weights)
        self._before = opening(system_prompt)
        self.rows = rows
        if any(COUNT_SENTENCES.intersection(row["instruction_id_list"]) for row in rows):
            punkt()

    def prompt(self, row: dict) -> Messages:
        """System prompt, if any, and the row's prompt."""
        return asking(self._before, row["prompt"])

    @override
    def score(self, row: dict, response: str) -> Reward:
        instructions = _instructions(row, "a row")
        followed = verdicts(instructions, response)
        earned = {"strict": fmean(followed), "all": float(all(followed))}
        if "loose" in self._weights:
            earned["loose"] = fmean(verdicts(instructions, response, loose=True))
        return Reward({name: weight * earned[name] for name, weight in self._weights.items()})


def load_rows(path: AnySource = None, split: str = "train") -> Sequence[dict]:
    """Prompts with their instructions, of :func:`grpo_rl.envs.tables.load_rows`; the hub's are parted by
    :func:`split_of`.
    """
    if split not in SPLITS:
        raise ValueError(f"IFEval has no split {split!r}; it has {' and '.join(SPLITS)}")
    source = Source.of(path)
    # The hub has one split, which is parted here.
    rows = tables.load_rows(source, split if source.path else "train", COLUMNS, chat=("prompt", None), hub=HUB_NAME)
    rows = [tables.checked_row(row, COLUMNS, row.where) for row in rows]
    for index, row in enumerate(rows):
        _instructions(row, tables.place_of(rows, index))
    return [row for row in rows if source.path or split_of(row["key"]) == split]


def split_of(key: int | str) -> str:
    """``test`` for a fifth of all keys, ``train`` for the others; always the same ones, whatever the other rows are.

    IFEval was published as one split, and what was trained on can't be what is measured.

    >>> [key for key in range(1000, 1020) if split_of(key) == "test"]
    [1000, 1005, 1012]
    """
    return "test" if random.Random(f"{SPLIT_SEED}/{key}").random() < TEST_SHARE else "train"


def _instructions(row: dict, where: str) -> list[Instruction]:
    return parse(row["instruction_id_list"], row["kwargs"], f"{where} (key {row['key']})")


IFEvalEnv = TaskSpec(IFEval, load_rows, hub=HUB_NAME)
"""IFEval as a TorchRL environment."""
