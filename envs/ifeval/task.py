"""IFEval: instructions whose following can be checked, paid by how many of them a response follows."""

import difflib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import override

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, weight
from grpo_rl.envs.ifeval.instructions import INSTRUCTIONS
from grpo_rl.envs.ifeval.language import detectors, punkt
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Task, asking, opening

Instruction = Callable[[str], bool]
"""True if a text as it is follows one instruction of a row, whose arguments have been checked."""

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


def verdicts(instructions: Sequence[Instruction], response: str, *, loose: bool = False) -> list[bool]:
    """For each instruction, whether the response follows it, or if ``loose`` one of its :func:`variants`.

    A blank response follows none.

    >>> kwargs = [{}, {"num_words": 3, "relation": "less than"}]
    >>> instructions = parse(["punctuation:no_comma", "length_constraints:number_words"], kwargs, "row 0")
    >>> response = "Sure, here you are:\\nHello World"
    >>> verdicts(instructions, response), verdicts(instructions, response, loose=True)
    ([False, False], [True, True])
    """
    texts = [text for text in (variants(response) if loose else [response]) if text.strip()]
    return [any(follows(text) for text in texts) for follows in instructions]


def variants(response: str) -> list[str]:
    r"""The response, and what it is without its first line, its last line, both, and each of these without asterisks.

    So a greeting, a closing remark or bold type makes no instruction unfollowed. The response comes first.

    >>> variants("Sure:\n*Hi*")
    ['Sure:\n*Hi*', 'Sure:\nHi', '*Hi*', 'Hi', 'Sure:', '']
    """
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys(form for text in (response, *cut) for form in (text, text.replace("*", ""))))


def parse(instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]], where: str) -> list[Instruction]:
    """The instructions of a row, ready to be checked.

    Args:
        kwargs: arguments of each; None is one that is not given, while 0 and empty ones count.

    Raises:
        ValueError: an instruction is unknown, or an argument missing, unknown or of no sense, in the row ``where``.
    """
    if not instruction_ids or len(instruction_ids) != len(kwargs):
        counts = f"{len(instruction_ids)} instructions and {len(kwargs)} sets of arguments"
        raise ValueError(f"{where} has {counts}; it needs at least one, and one set for each")
    return [
        _parsed(name, arguments, f"{where}, instruction {number} ({name})")
        for number, (name, arguments) in enumerate(zip(instruction_ids, kwargs, strict=True), 1)
    ]


def _parsed(name: str, arguments: Mapping[str, Any], where: str) -> Instruction:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        near = difflib.get_close_matches(str(name), INSTRUCTIONS, 1, cutoff=0)
        raise ValueError(f"{where} is unknown; the nearest of the {len(INSTRUCTIONS)} known ones is {near[0]}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} has {arguments!r} for arguments; give an object of {list(_ARGUMENTS[name])}")
    # The hub's rows have the arguments of all instructions, and None for those that are not theirs.
    given = {argument: value for argument, value in arguments.items() if value is not None}
    if set(given) != set(_ARGUMENTS[name]):
        raise ValueError(f"{where} has the arguments {given}; it needs {list(_ARGUMENTS[name])}, and no other")
    for argument, value in given.items():
        try:
            _TYPES[argument].validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{where}: {argument} is {value!r}: {error.errors()[0]['msg']}") from None
    if "language" in given and given["language"] not in detectors().langlist:
        raise ValueError(f"{where}: language is {given['language']!r}; give one that langdetect knows, such as en")
    if "nth_paragraph" in given and given["nth_paragraph"] > given["num_paragraphs"]:
        nth, most = given["nth_paragraph"], given["num_paragraphs"]
        raise ValueError(f"{where} is about paragraph {nth} of {most}; no response could follow it")
    return partial(INSTRUCTIONS[name], **given)


_ARGUMENTS = {name: tuple(inspect.signature(check).parameters)[1:] for name, check in INSTRUCTIONS.items()}


_Count = Annotated[int, Field(ge=0)]
_Filled = Annotated[str, Field(pattern=r"\S")]
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("keywords", "forbidden_words"), list[_Filled] | tuple[_Filled, ...]),
    **dict.fromkeys(("keyword", "postscript_marker", "section_spliter", "prompt_to_repeat"), _Filled),
    **dict.fromkeys(("first_word", "end_phrase"), str),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), Literal["less than", "at least"]),
    **dict.fromkeys(("frequency", "let_frequency", "capital_frequency"), _Count),
    **dict.fromkeys((name for names in _ARGUMENTS.values() for name in names if name.startswith("num_")), _Count),
    "nth_paragraph": Annotated[int, Field(ge=1)],
    "letter": Annotated[str, Field(min_length=1, max_length=1)],
    "language": str,
}
_TYPES = {name: TypeAdapter(kind, config=ConfigDict(strict=True)) for name, kind in _KINDS.items()}
