"""A plan of batches in the terminal, and what its parts say, here and in the SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_rl.planner.batches import BatchPlan, Misfit

COLUMNS = 79
"""Of the drawing: one less than the narrowest terminal that is still common."""
BAR = 38
"""Columns of the longest micro-batch."""
MARKS = 32
"""Marks of a row of answers; in a larger group each stands for several."""
ROWS = 8
"""Of more groups or micro-batches those in the middle are left out."""
COLOURS = ("blue", "green", "magenta", "cyan", "yellow")
"""Of optimizer steps, in turn."""


@dataclass(frozen=True)
class Band:
    """One part of the picture.

    Args:
        title: one word.
        says: the numbers, as a sentence.
        keys: that decide them, as they are set.
        misfit: what does not divide here.
    """

    title: str
    says: str
    keys: str
    misfit: Misfit | None = None


def bands(plan: BatchPlan) -> tuple[Band, Band, Band, Band]:
    """What is sampled, what an optimizer step takes, how it is computed, and how often."""
    collection = f"{_count(plan.prompts, 'prompt')} x {plan.group_size} answers = {plan.answers:,} answers a collection"
    changes = [(step, size) for step, size in plan.sizes if size != plan.group_size or step > 1]
    collection += "; group size changes " * bool(changes)
    collection += ", ".join(f"to {size} at step {step}" for step, size in changes)
    sampling = f"env.num_envs={plan.prompts} env.repeats={plan.group_size}"
    sampling += f" train.repeats_schedule={[list(change) for change in changes]}".replace(", ", ",") * bool(changes)
    sampling += f" train.max_refills={plan.refills}" * bool(plan.refills)
    step = f"{_count(plan.batches, 'optimizer step')} of {plan.batch_answers:,} answers"
    step += f" ({_count(plan.batch_groups, 'group')})" + (f", in each of {plan.epochs} epochs" * (plan.epochs > 1))
    about = "about" if plan.accumulation is None else "exactly"
    micro = (
        f"{about} {_count(len(plan.micro_batches), 'micro-batch', 'micro-batches')} a step; a prompt is computed once"
    )
    run = f"{_count(plan.collections, 'collection')}, {_count(plan.optimizer_steps, 'optimizer step')}"
    rounded = f"{plan.all_answers:,} answers" + f" ({plan.turns:,} rounded up)" * (plan.all_answers != plan.turns)
    # A collection that is filled up ends as soon as enough answers are sampled.
    run = f"at most {run}: {plan.turns:,} answers or a few more" if plan.refills else f"{run}, {rounded}"
    budget = f"train.micro_batch_tokens={plan.max_tokens}"
    if plan.accumulation:
        budget = f"train.gradient_accumulation_steps={plan.accumulation}"
    return (
        Band("Sample", collection, sampling),
        Band(
            "Train",
            step,
            f"train.optim_batch_size={plan.batch_answers} train.epochs={plan.epochs}",
            plan.misfit("cut", "left_over"),
        ),
        Band("Compute", micro, budget, plan.misfit("micro_batches")),
        Band("Repeat", run, f"train.total_dialog_turns={plan.turns}", plan.misfit("run")),
    )


def legend(plan: BatchPlan) -> tuple[str, str]:
    """What the two shades of a micro-batch are, and what sharing a prompt spares in an optimizer step."""
    together = plan.batch_groups * plan.group_tokens
    apart = plan.batch_groups * plan.group_size * (plan.prompt_tokens + plan.answer_tokens)
    return (
        f"a prompt of {plan.prompt_tokens:,} tokens, computed once",
        f"its {plan.group_size} answers of {plan.answer_tokens:,}: {together:,} tokens a step; with the prompt beside "
        f"each answer, {apart:,}",
    )


def assumptions(plan: BatchPlan) -> str:
    """What the picture takes for granted."""
    text = (
        "A group is a prompt and its answers; which groups meet in a step is drawn at random. "
        f"Assumed: every prompt has {plan.prompt_tokens:,} tokens and every answer {plan.answer_tokens:,} "
        "(--prompt-tokens, --answer-tokens)."
    )
    if plan.skips_equal_rewards:
        text += " Groups whose answers are all rewarded alike are counted, not computed."
    return text


def trouble(plan: BatchPlan) -> list[str]:
    """What is wrong with the micro-batches."""
    lines = []
    if plan.misfit("micro_batches"):
        missing = (plan.accumulation or 0) - len(plan.loads)
        lines.append(f"no group is left for {_count(missing, 'micro-batch', 'micro-batches')}")
    if plan.over_budget:
        tokens = plan.tokens_of(plan.largest)
        lines.append(
            f"a group is never split: {plan.largest} answers take {tokens:,} tokens, more than train.micro_batch_tokens"
        )
    return lines


def cycle(plan: BatchPlan) -> list[str]:
    """What happens in one collection, in order.

    A run of optimizer steps is told by its first and last:

    >>> from types import SimpleNamespace as Plan
    >>> cycle(Plan(answers=32, refills=0, has_reference=False, annotates=True, epochs=2, batches=4))
    ['sample 32', 'score policy', 'steps 1 to 4', 'steps 5 to 8', 'push weights']
    """
    stages = [f"sample {plan.answers:,}" + " or more" * bool(plan.refills)]
    stages += ["score reference"] * plan.has_reference + ["score policy"] * plan.annotates
    for epoch in range(min(plan.epochs, ROWS)):
        first, last = epoch * plan.batches + 1, (epoch + 1) * plan.batches
        stages.append(f"step {first}" if first == last else f"steps {first} to {last}")
    return [*stages, *["…"] * (plan.epochs > ROWS), "push weights"]


def roles(plan: BatchPlan) -> dict[str, str]:
    """What each device does."""
    named = {"trains": plan.devices.train, "scores the reference": plan.devices.ref, "samples": plan.devices.inference}
    devices = dict.fromkeys(str(device) for group in named.values() for device in group)
    does = {device: [role for role, group in named.items() if device in map(str, group)] for device in devices}
    return {device: ", ".join(roles) + ", in turns" * (len(roles) > 1) for device, roles in does.items()}


def owners(plan: BatchPlan, group: int, marks: int = MARKS) -> list[int | None]:
    """The optimizer step of a group's answers, from 0, or None where they are left over; at most ``marks`` of them."""
    marks = min(marks, plan.group_size)
    return [plan.batch_of(group, mark * plan.group_size // marks) for mark in range(marks)]


def mark_size(plan: BatchPlan) -> str:
    """What a mark is, where a row has too many answers for one each."""
    return f"a mark stands for {plan.group_size / MARKS:.3g} answers"


def owner_names(plan: BatchPlan, group: int) -> tuple[str, bool]:
    """The optimizer step that takes a group, or all those that cut it; and whether it is taken whole."""
    steps = list(dict.fromkeys(owners(plan, group)))
    names = " | ".join("left over" if step is None else f"step {step + 1}" for step in steps)
    return names + ": the group is cut" * (len(steps) > 1), len(steps) == 1 and steps[0] is not None


def shown_groups(plan: BatchPlan) -> list[int | None]:
    """The groups of a collection that are drawn, None where some are left out; where the first step ends is drawn."""
    first = set(owners(plan, 0))
    return shown(plan.prompts, next((g for g in range(plan.prompts) if set(owners(plan, g)) != first), 0))


def shown(count: int, around: int = 0) -> list[int | None]:
    """The rows that are drawn of so many, None for what is left out.

    >>> shown(3), shown(20), shown(20, around=9)
    ([0, 1, 2], [0, 1, 2, None, 19], [0, 1, 2, None, 8, 9, 10, None, 19])
    """
    if count <= ROWS:
        return list(range(count))
    near = {around - 1, around, min(around + 1, count - 1)} if around else set()
    rows = sorted({0, 1, 2, count - 1} | near)
    out: list[int | None] = []
    for row in rows:
        out += [None] * (bool(out) and row - (out[-1] or 0) > 1) + [row]
    return out


def terminal(plan: BatchPlan, title: str) -> RenderableType:
    """The plan as text of at most :data:`COLUMNS` columns."""
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(width=COLUMNS - 11)
    pictures = (_answers(plan), Text(), _micro_batches(plan), Text(" → ".join(cycle(plan))))
    for number, (band, picture) in enumerate(zip(bands(plan), pictures, strict=True), start=1):
        says = Text(band.says)
        if band.misfit:
            says = Text(f"{band.misfit.what}. Use {band.misfit.remedy}.", style="bold red")
        body.add_row(f"{number} {band.title}", Group(says, Text(band.keys, style="dim"), *[picture] * bool(picture)))
        body.add_row()
    body.add_row("5 Devices", Text("\n".join(f"{device} {does}" for device, does in roles(plan).items())))
    notes = Text(assumptions(plan), style="dim")
    return Group(_within(Text(title, style="bold")), Text(), body, Text(), _within(notes))


def _within(text: Text) -> Table:
    grid = Table.grid()
    grid.add_column(width=COLUMNS)
    grid.add_row(text)
    return grid


def _answers(plan: BatchPlan) -> Text:
    """A row a group, a mark an answer, in the colour of its optimizer step."""
    picture = Text()
    gap = " " if 2 * plan.group_size <= MARKS else ""
    for group in shown_groups(plan):
        picture.append("\n" if picture else "")
        if group is None:
            picture.append("…")
            continue
        picture.append(f"prompt {group + 1:<{len(str(plan.prompts))}}  ")
        before = None
        for mark, owner in enumerate(owners(plan, group)):
            cut = mark and owner != before
            picture.append("|" if cut else gap if mark else "", "bold red")
            style = "red" if owner is None else COLOURS[owner % len(COLOURS)]
            picture.append("□" if owner is None else "■", style)
            before = owner
        names, whole = owner_names(plan, group)
        picture.append(f"  {names}", "dim" if whole else "bold red")
    if plan.group_size > MARKS:
        picture.append(f"\n{mark_size(plan)}", "dim")
    return picture


def _micro_batches(plan: BatchPlan) -> Text:
    """A row a micro-batch: its groups, each a prompt and its answers, to scale."""
    picture = Text()
    budget = None if plan.accumulation else plan.max_tokens
    scale = BAR / max([*plan.loads, budget or 1])
    for row in shown(len(plan.loads)):
        picture.append("\n" if picture else "")
        if row is None:
            picture.append("…")
            continue
        bar = "".join(_group_bars(plan, plan.micro_batches[row], scale))
        end = round(budget * scale) if budget else BAR
        picture.append(bar[:end].ljust(end)).append("|" if budget else "", "dim").append(bar[end + 1 :])
        over = budget is not None and plan.loads[row] > budget
        label = f" {_count(plan.micro_batches[row], 'group')}, {plan.loads[row]:,} tokens"
        picture.append(label, "bold red" if over else "")
    for line in trouble(plan):
        picture.append(f"\n{line}", "bold red")
    prompt, answers = legend(plan)
    return picture.append(f"\n█ {prompt}, ░ and {answers}", "dim")


def _group_bars(plan: BatchPlan, groups: int, scale: float) -> Iterable[str]:
    """The columns of each group; too small ones are drawn without their prompts."""
    edges = [round(group * plan.group_tokens * scale) for group in range(groups + 1)]
    prompt = max(1, round(plan.prompt_tokens * scale))
    for start, end in itertools.pairwise(edges):
        columns = end - start
        yield "░" * columns if columns < 2 else ("█" * min(prompt, columns - 1)).ljust(columns, "░")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
