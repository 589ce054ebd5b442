"""A plan of batches as an SVG picture, drawn with matplotlib."""

from __future__ import annotations

import io
import itertools
import textwrap

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from grpo_rl.planner.batches import BatchPlan
from grpo_rl.planner.drawing import (
    MARKS,
    Band,
    assumptions,
    bands,
    cycle,
    legend,
    mark_size,
    owner_names,
    owners,
    roles,
    shown,
    shown_groups,
    trouble,
)

STEPS = ("#4477aa", "#228833", "#aa3377", "#66ccee", "#ccbb44")
"""Colours of optimizer steps, in turn; told apart by those who see few colours (Paul Tol's bright set)."""
BAD, INK, FAINT, PROMPT, ANSWER = "#cc3311", "#222222", "#6b6b6b", "#444444", "#b9cde0"
WIDTH, LEFT, RIGHT = 100.0, 15.0, 76.0
"""Of the picture in its own units: all of it, and where the drawings begin and end."""
LINE = 2.6
"""Height of a line of text."""
INCH = 11.0
"""Units of an inch."""


def svg(plan: BatchPlan, title: str) -> str:
    """The picture of a plan as an SVG document; the same plan gives the same bytes."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo_rl", "font.size": 9}):
        pen = _Pen()
        pen.lines(2, title, 100, size=10, family="monospace")
        pen.y += 0.6 * LINE
        drawings = (_answers, lambda *_: None, _micro_batches, _cycle)
        for number, (band, draw) in enumerate(zip(bands(plan), drawings, strict=True), start=1):
            _heading(pen, number, band)
            draw(pen, plan)
            pen.y += 0.9 * LINE
        _devices(pen, plan)
        pen.lines(2, assumptions(plan), 120, FAINT, size=8)
        return pen.document()


class _Pen:
    """Draws from the top down; ``y`` is where the next thing goes."""

    def __init__(self) -> None:
        self.figure = Figure()
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.y = LINE

    def write(self, x: float, text: str, colour: str = INK, dy: float = 0.0, **style: object) -> None:
        """Text, its middle on the line."""
        self.axes.text(x, self.y + dy, text, color=colour, va="center", parse_math=False, **style)

    def lines(self, x: float, text: str, columns: int, colour: str = INK, **style: object) -> None:
        """Text of as many lines as it needs."""
        for line in textwrap.wrap(text, columns):
            self.write(x, line, colour, **style)
            self.y += LINE

    def box(self, x: float, width: float, height: float, colour: str, edge: str = "white", **style: object) -> None:
        """A rectangle whose middle is on the line."""
        corner = (x, self.y - height / 2)
        self.axes.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor=edge, linewidth=0.8, **style))

    def chip(self, x: float, text: str, colour: str) -> float:
        """Text in a rounded box; where it ends."""
        width = 0.98 * len(text) + 2.2
        corner = (x + 0.4, self.y - 1.1)
        style = "round,pad=0.4,rounding_size=0.9"
        self.axes.add_patch(
            FancyBboxPatch(corner, width - 0.8, 2.2, boxstyle=style, facecolor="white", edgecolor=colour)
        )
        self.axes.text(x + width / 2, self.y, text, color=colour, ha="center", va="center", parse_math=False)
        return x + width

    def document(self) -> str:
        """The SVG of all that was drawn."""
        height = self.y + 0.4 * LINE
        self.figure.set_size_inches(WIDTH / INCH, height / INCH)
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        buffer = io.StringIO()
        # White, as a page in dark mode would swallow the text.
        self.figure.savefig(buffer, format="svg", facecolor="white", metadata=dict.fromkeys(("Date", "Creator")))
        return buffer.getvalue()


def _heading(pen: _Pen, number: int, band: Band) -> None:
    pen.write(2, f"{number}  {band.title}", weight="bold", size=11)
    if band.misfit:
        pen.lines(LEFT, f"{band.misfit.what}. Use {band.misfit.remedy}.", 88, BAD, weight="bold")
    else:
        pen.lines(LEFT, band.says, 84, size=11)
    pen.lines(LEFT, band.keys, 100, FAINT, family="monospace", size=8)


def _answers(pen: _Pen, plan: BatchPlan) -> None:
    """A row a group: its prompt, and a square an answer in the colour of its optimizer step."""
    row, start = 2.6, LEFT + 12
    pen.y += 0.2 * LINE
    rows = shown_groups(plan)
    side = min(2.2, (RIGHT - start) / min(plan.group_size, MARKS) - 0.3)
    for owner, run in itertools.groupby(rows, key=lambda group: None if group is None else owner_names(plan, group)):
        top = pen.y
        for group in run:
            if group is None:
                pen.write(LEFT, "…")
            else:
                pen.box(LEFT, 10.5, 2.1, PROMPT)
                pen.write(LEFT + 5.25, f"prompt {group + 1}", "white", ha="center", size=8)
                _row(pen, plan, group, start, side)
            pen.y += row
        if owner is None:
            continue
        names, whole = owner
        end = start + min(plan.group_size, MARKS) * (side + 0.3) + 1
        colour = STEPS[(owners(plan, group)[0] or 0) % len(STEPS)] if whole else BAD
        pen.axes.plot([end, end], [top - 1, pen.y - row + 1], color=colour, linewidth=2)
        middle = (top - pen.y - row) / 2
        pen.write(end + 1.2, f"optimizer {names}" if whole else names, INK if whole else BAD, middle)
    if plan.group_size > MARKS:
        pen.lines(start, mark_size(plan), 80, FAINT, size=8)


def _row(pen: _Pen, plan: BatchPlan, group: int, x: float, side: float) -> None:
    steps = owners(plan, group)
    for mark, step in enumerate(steps):
        left = x + mark * (side + 0.3)
        if step is None:
            pen.box(left, side, side, "white", BAD, hatch="////")
        else:
            pen.box(left, side, side, STEPS[step % len(STEPS)])
        if mark and step != steps[mark - 1]:
            pen.axes.plot([left - 0.15] * 2, [pen.y - 1.7, pen.y + 1.7], color=BAD, linewidth=2)


def _micro_batches(pen: _Pen, plan: BatchPlan) -> None:
    """A bar a micro-batch: prompts dark and once, their answers light, to scale, and where the budget ends."""
    budget = None if plan.accumulation else plan.max_tokens
    scale = (RIGHT - LEFT) / max([*plan.loads, budget or 1])
    top = pen.y
    for row in shown(len(plan.loads)):
        if row is None:
            pen.write(LEFT, "…")
        else:
            for group in range(plan.micro_batches[row]):
                _group_bar(pen, plan, LEFT + group * plan.group_tokens * scale, scale)
            over = budget is not None and plan.loads[row] > budget
            pen.write(RIGHT + 1.2, f"{plan.loads[row]:,} tokens", BAD if over else INK, size=8)
        pen.y += 2.9
    if budget:
        x = LEFT + budget * scale
        pen.axes.plot([x, x], [top - 1.7, pen.y - 1.2], color=FAINT, linewidth=1.2, linestyle=(0, (3, 2)))
        pen.write(x, f"at most {budget:,}", FAINT, -0.2, ha="center", size=8)
        pen.y += LINE * bool(trouble(plan))
    for line in trouble(plan):
        pen.write(LEFT, line, BAD, weight="bold")
        pen.y += LINE
    for colour, line in zip((PROMPT, ANSWER), legend(plan), strict=True):
        pen.box(LEFT, 2, 1.4, colour)
        pen.write(LEFT + 3, line, size=8)
        pen.y += 0.9 * LINE


def _group_bar(pen: _Pen, plan: BatchPlan, x: float, scale: float) -> None:
    prompt, answer = plan.prompt_tokens * scale, plan.answer_tokens * scale
    pen.box(x, prompt, 2.3, PROMPT)
    if answer < 0.4:  # lines between them would be all there is to see
        pen.box(x + prompt, plan.group_size * answer, 2.3, ANSWER)
        return
    for g in range(plan.group_size):
        pen.box(x + prompt + g * answer, answer, 2.3, ANSWER)


def _cycle(pen: _Pen, plan: BatchPlan) -> None:
    """What happens in a collection, and how many there are."""
    x = LEFT
    pen.y += 0.2 * LINE
    for stage in cycle(plan):
        if x > LEFT:
            pen.write(x + 1, "→", FAINT)
            x += 3.6
        if x + len(stage) > WIDTH - 12:
            x, pen.y = LEFT, pen.y + 1.4 * LINE
        x = pen.chip(x, stage, STEPS[0] if stage.startswith("step") else INK)
    pen.write(x + 1.5, f"x {plan.collections:,}", weight="bold", size=11)
    pen.y += LINE


def _devices(pen: _Pen, plan: BatchPlan) -> None:
    pen.write(2, "5  Devices", weight="bold", size=11)
    for device, does in roles(plan).items():
        pen.chip(LEFT, f"{device} {does}", INK)
        pen.y += 1.3 * LINE
    pen.y += 0.6 * LINE
