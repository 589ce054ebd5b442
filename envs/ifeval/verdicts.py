"""Judges which of its instructions a response follows, strictly and loosely."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from grpo_rl.envs.ifeval.instructions import INSTRUCTIONS
from grpo_rl.envs.ifeval.language import detectors

Instruction = Callable[[str], bool]
"""True if a text as it is follows one instruction of a row, whose arguments have been checked."""


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
