"""A replay as a person sees it in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from grpo_rl.replay.replay import Replay, Token
from grpo_rl.storage.printable import printable

Decoder = Callable[[Sequence[int]], str]
"""A function from ids to their text."""
LABELS = {
    "loss/total": "loss",
    "loss/objective": "  objective",
    "loss/kl": "  KL",
    "loss/entropy": "  entropy",
    "clip/low_fraction": "clipped low",
    "clip/high_fraction": "clipped high",
    "clip/dual_fraction": "clipped (dual)",
    "ess": "effective sample size",
    "correction/mean": "correction weight",
    "correction/bounded_fraction": "  at a bound",
    "correction/ess": "  effective sample size",
}


def replay_view(result: Replay, title: str, other: str, decode: Decoder | None) -> RenderableType:
    """Both losses side by side, and the tokens that they treat most differently.

    Args:
        other: the name of the other loss.
        decode: None: ids are shown.
    """
    gradients = [outcome.columns["gradient"] for outcome in (result.run, result.other)]
    trained = [outcome.columns["trained"].bool() for outcome in (result.run, result.other)]
    columns = (Column("as trained", justify="right"), Column(Text(other), justify="right", overflow="fold"))
    numbers = Table("", *columns, box=None, pad_edge=False, header_style="bold")
    for name, label in LABELS.items():
        values = [outcome.metrics.get(name) for outcome in (result.run, result.other)]
        if any(values) or name in ("loss/total", "loss/objective"):
            numbers.add_row(label, *map(_share if name.endswith(("fraction", "ess")) else _number, values))
    numbers.add_row("trained tokens", *(f"{int(which.sum()):,}" for which in trained))
    still = [(g[which] == 0).double().mean().item() for g, which in zip(gradients, trained, strict=True)]
    numbers.add_row("  without a gradient", *map(_share, still))
    numbers.add_row("norm of the gradient", *(_number(g.double().norm().item()) for g in gradients))
    cosine = "one of the gradients is zero" if result.cosine is None else f"cosine similarity {result.cosine:.4f}"
    change = f"The gradient of {result.changed_fraction:.1%} of the trained tokens changes; {cosine}."
    notes = [Text(note, style="yellow") for note in _notes(result)]
    parts = [Text(title, style="bold"), Text(), numbers, Text(), Text(change), *notes]
    if result.tokens:
        parts += [Text(), _tokens(result.tokens, decode)]
    return Group(*parts)


def _notes(result: Replay) -> list[str]:
    """The limits of the comparison."""
    notes = []
    scale = max([abs(loss) for loss in result.run.losses] + [1e-3])
    if not result.recorded_gap <= 1e-4 * scale:
        notes.append(
            f"The run recorded a loss that differs by {result.recorded_gap:.2g}: its code or its settings were others."
        )
    for outcome in (result.run, result.other):
        if outcome.not_scored:
            groups = "1 group was" if outcome.not_scored == 1 else f"{outcome.not_scored} groups were"
            notes.append(f"{groups} not scored in the run, and missing here; they still count in the means.")
    return notes


def _tokens(tokens: Sequence[Token], decode: Decoder | None) -> Table:
    columns = [Column(name, justify="right") for name in ("row", "response", "position")]
    columns += [Column("token", overflow="fold", ratio=1)]
    columns += [Column(name, justify="right") for name in ("advantage", "ratio", "gradient")]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    table.title, table.title_justify = "Tokens that differ the most", "left"
    for token in tokens:
        text = Text(_shown(decode, token.before)[-16:], style="dim")
        text.append(_shown(decode, [token.token_id]), "bold cyan")
        pairs = (_pair(pair) for pair in (token.advantage, token.ratio, token.gradient))
        table.add_row(*map(str, (token.row, token.response, token.position)), text, *pairs)
    return table


def _shown(decode: Decoder | None, ids: Sequence[int]) -> str:
    if decode is None:
        return "".join(f"{i} " for i in ids)
    return printable(decode(ids)).replace("\n", "⏎")


def _pair(pair: tuple[float, float]) -> str:
    """The pair as one number, or two where they differ.

    >>> _pair((0.5, 0.5)), _pair((0.5, -1.0))
    ('0.5', '0.5 → -1')
    """
    same = math.isclose(*pair, rel_tol=1e-5) or pair[0] == pair[1]
    return _number(pair[0]) if same else f"{_number(pair[0])} → {_number(pair[1])}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
