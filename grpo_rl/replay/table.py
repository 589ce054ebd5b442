"""A replay as a person sees it in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

Decoder = Callable[[Sequence[int]], str]
"""A function from ids to their text."""


def replay_view(result: Mapping[str, Any], title: str, other: str, decode: Decoder) -> RenderableType:
    """Both losses side by side, and the tokens that they treat most differently.

    Args:
        result: as `grpo_rl.replay.replay.replay` returns it.
        other: the name of the other loss.
    """
    columns = (Column("as trained", justify="right"), Column(Text(other), justify="right", overflow="fold"))
    numbers = Table("", *columns, box=None, pad_edge=False, header_style="bold")
    sides = result["run"], result["other"]
    for name in sides[0] | sides[1]:
        numbers.add_row(name, *(_number(side[name]) if name in side else "" for side in sides))
    cosine = "one of the gradients is zero" if result["cosine"] is None else f"cosine similarity {result['cosine']:.4f}"
    parts = [Text(title, style="bold"), Text(), numbers, Text()]
    parts += [Text(f"The gradient of {result['changed_fraction']:.1%} of the trained tokens changes; {cosine}.")]
    if not result["recorded_gap"] <= 1e-4 * max(abs(sides[0]["loss/total"]), 1e-3):
        gap = f"The run recorded a loss that differs by {result['recorded_gap']:.2g}"
        parts.append(Text(f"{gap}: its code or its settings were others.", style="yellow"))
    if any(side["not_scored_groups"] for side in sides):
        note = "Groups that were not scored in the run are missing here; they still count in the means."
        parts.append(Text(note, style="yellow"))
    if result["tokens"]:
        parts += [Text(), _tokens(result["tokens"], decode)]
    return Group(*parts)


def _number(value: float) -> str:
    """A count in full, another number to four digits.

    >>> _number(34567), _number(0.034567)
    ('34,567', '0.03457')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _tokens(tokens: Sequence[Mapping[str, Any]], decode: Decoder) -> Table:
    right, pairs = ("row", "response", "position"), ("advantage", "ratio", "gradient")
    columns = [*(Column(name, justify="right") for name in right), Column("token", overflow="fold", ratio=1)]
    columns += [Column(name, justify="right") for name in pairs]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    table.title, table.title_justify = "Tokens that differ the most", "left"
    for token in tokens:
        text = Text(decode(token["before"])[-16:], style="dim").append(decode([token["token_id"]]), "bold cyan")
        table.add_row(*(str(token[name]) for name in right), text, *(_pair(token[name]) for name in pairs))
    return table


def _pair(pair: tuple[float, float]) -> str:
    """The pair as one number, or two where they differ.

    >>> _pair((0.5, 0.5)), _pair((0.5, -1.0))
    ('0.5', '0.5 → -1')
    """
    texts = [f"{value:.3g}" for value in pair]
    return texts[0] if math.isclose(*pair, rel_tol=1e-5) else " → ".join(texts)
