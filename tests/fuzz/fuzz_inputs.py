"""Inputs made to break readers of text and files: hostile fragments, and mutations of a corpus from a seed."""

import json
from pathlib import Path
from random import Random
from typing import TypeVar

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))
"""Texts that each target takes, and those that once broke it, by the target's name."""
CANARY = "GRPO_RL_FUZZ_CANARY"
"""The environment variable and the file that no text may read, write or name the value of."""
MAX_CHARS = 8192
LONG_EVERY = 5000
"""One of so many mutated texts has a line of a megabyte."""

_REPEATED = CORPUS.pop("repeated fragments")
FRAGMENTS = (*CORPUS.pop("fragments"), *(piece * times + "".join(end) for piece, times, *end in _REPEATED))
"""Pieces that break readers: code, numbers, brackets, tags and signs; and long ones, slow to read."""

Data = TypeVar("Data", str, bytes)


def mutated(rng: Random, seeds: list[Data]) -> Data:
    """A seed after one to six changes: fragments put in, parts taken out, repeated, or changed for another seed's."""
    data = rng.choice(seeds)
    for _ in range(rng.randint(1, 6)):
        data = _changed(rng, data, seeds)[:MAX_CHARS] if isinstance(data, str) else _changed(rng, data, seeds)
    if isinstance(data, str) and rng.randrange(LONG_EVERY) == 0:
        piece = rng.choice(FRAGMENTS)
        at = rng.randint(0, len(data))
        data = data[:at] + piece * (2**20 // len(piece)) + data[at:]
    return data


def _changed(rng: Random, data: Data, seeds: list[Data]) -> Data:
    at = rng.randint(0, len(data))
    to = min(len(data), at + rng.choice((1, 2, 4, 16, 64)))
    kind = rng.randrange(6)
    if kind <= 1:
        return data[:at] + _piece(rng, data) + data[at:]
    if kind == 2:
        return data[:at] + _piece(rng, data) + data[to:]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:
        return data[:to] + data[at:to] * rng.choice((1, 2, 8)) + data[to:]
    other = rng.choice(seeds)
    return data[:at] + other[rng.randint(0, len(other)) :]


def _piece(rng: Random, like: Data) -> Data:
    if isinstance(like, bytes):
        if rng.randrange(2):
            return rng.randbytes(rng.choice((1, 1, 2, 4, 8)))
        return as_bytes(rng.choice(FRAGMENTS))
    if rng.randrange(4):
        return rng.choice(FRAGMENTS)
    return chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))


def as_bytes(text: str) -> bytes:
    """The text as UTF-8; a lone surrogate becomes bytes that are none."""
    return text.encode("utf-8", "surrogatepass")
