"""The comparison of several runs, or of the runs of a sweep: what differs, what each gained, their curves together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.intervals import paired_gain
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.report import charts, headline
from grpo_rl.report.files import CONFIG, is_running, read_config, read_evaluation, read_rows, read_summary
from grpo_rl.report.page import Section, written
from grpo_rl.storage.masking import masked
from grpo_rl.storage.yaml_text import flat

UNSET = "unset"
SAME_FOR_A_PAIR = ("env.", "evaluate.")
"""Settings that decide which held-out rows there are and what they earn: rows pair up where these are the same."""
OF_TOKENS = ("model.name", "model.chat_template")
"""Settings that decide what a token is: nats a token compare where these are the same, too."""
MOST_IN_A_NAME = 4
"""A run is named by at most so many settings."""
NOT_A_DIFFERENCE = ("resume", "logger.name")
"""Settings that do not affect a run's results."""


def run_folders(given: Sequence[Path]) -> list[Path]:
    """The run folders of these: a sweep's folder stands for its runs.

    Raises:
        ValueError: a folder holds no run.
    """
    found = []
    for folder in given:
        if not (folder / "multirun.yaml").exists() and _is_run(folder):
            found.append(folder)
        elif inside := [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]:
            found += sorted(inside, key=lambda path: path.name.zfill(9) if path.name.isdigit() else path.name)
        else:
            raise ValueError(f"{folder} holds no run: neither {METRICS_FILE} nor {CONFIG}, nor folders that do")
    return found


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).exists() or (folder / CONFIG).exists()


def names_of(runs: Sequence[Path]) -> list[str]:
    """A short name for each run: the end of its path that is its own; for a sweep's numbered folders, the settings that
    differ, if they are few.

    >>> names_of([Path("a/run"), Path("b/run")])
    ['a/run', 'b/run']
    """
    if all(run.name.isdigit() for run in runs):
        settings = {key: _texts(key, values) for key, values in differences(runs).items()}
        last = Counter(key.rpartition(".")[2] for key in settings)
        settings = {name if last[name := key.rpartition(".")[2]] == 1 else key: of for key, of in settings.items()}
        names = [", ".join(f"{key}={' '.join(text.split()):.30}" for key, text in zip(settings, values, strict=True))
                 for values in zip(*settings.values(), strict=True)]  # fmt: skip
        if len(set(names)) == len(runs) and len(settings) <= MOST_IN_A_NAME:
            return names
    paths = [run.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {path}" for i, path in enumerate(paths)]


def differences(runs: Sequence[Path]) -> dict[str, list[Any]]:
    """The settings in which the runs differ: their value in each run, ``unset`` where it has no such setting."""
    settings = [flat(read_config(run)) for run in runs]
    keys = {key: None for setting in settings for key in setting if key not in NOT_A_DIFFERENCE}
    columns = {key: [setting.get(key, UNSET) for setting in settings] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _others(runs: Sequence[Path], beginnings: tuple[str, ...] = SAME_FOR_A_PAIR) -> str:
    """The first settings of task and evaluation that differ: numbers of such runs are not of the same thing."""
    settings = [flat(read_config(run)) for run in runs]
    keys = sorted({key for setting in settings for key in setting if key.startswith(beginnings)})
    first = settings[0]
    return ", ".join([key for key in keys if any(each.get(key) != first.get(key) for each in settings)][:3])


def compared(runs: Sequence[Path]) -> Sequence[Mapping[str, Any]]:
    """Each run's name, steps, change of reward with its interval, and the paired difference from the first run; or the
    held-out losses of SFT."""
    found = []
    for run, name in zip(runs, names_of(runs), strict=True):
        rows, summary = read_rows(run), read_summary(run)
        row: dict[str, Any] = {"name": name, "steps": int(max((line["step"] for line in rows), default=0))}
        row["ended"] = bool(summary.get("finished"))
        if change := headline.held_out_change(summary):
            row["gain"] = {**change._asdict(), "of": "held-out, paired"}
        elif unpaired := headline.unpaired_change(rows):
            row["gain"] = {**unpaired[0]._asdict(), "of": "held-out, unpaired"}
        elif len(training := headline.finite(rows, "reward/mean")) >= headline.FEWEST_STEPS:
            row["gain"] = {**headline.training_change(training)._asdict(), "of": "training"}
        if losses := headline.held_out_losses(rows, summary):
            row["loss"] = {"before": losses.before, "after": losses.after}
        elif run != runs[0]:
            row |= _difference(runs[0], run)
        found.append(row)
    return found


def _difference(first: Path, run: Path) -> dict[str, Any]:
    """The paired difference from the first run's held-out rewards, or why there is none."""
    before, after = ((read_evaluation(folder) or [[]])[0] for folder in (first, run))
    if not before or not after:
        return {"unpaired": "no held-out rewards"}
    if other := _others([first, run]):
        return {"unpaired": f"other {other}"}
    try:
        gain = paired_gain(before, after)
    except ValueError as error:
        return {"unpaired": str(error)}
    return {"difference": {"gain": gain.mean, "low": gain.low, "high": gain.high}, "rows": len(after)}


def head(runs: Sequence[Path]) -> dict[str, Any]:
    """The head of the comparison: the run that gained most, and whether its interval is apart from the others'."""
    every = list(zip(compared(runs), runs, strict=True))
    gained, imitated = [one for one in every if "gain" in one[0]], [one for one in every if "loss" in one[0]]
    goes_on = [is_running(run) for run in runs if not read_summary(run).get("finished")]
    running, rest = goes_on.count(True), len(goes_on) - goes_on.count(True)
    notes = ["Each interval is a 95 % interval by itself: of many runs, the best looks better than it is."]
    notes = notes if gained or not imitated else []
    notes += [f"Runs that go on: {running}."] if running else []
    notes += [f"Runs that have not ended, or were stopped: {rest}."] if rest else []
    return {
        "title": f"Comparison of {len(runs)} runs",
        "subject": f"Comparison of {len(runs)} runs",
        "headline": f"{len(runs)} runs; {_lowest_loss(imitated) if imitated and not gained else _ranking(gained)}.",
        "note": " ".join(notes),
        "origin": "",
        "command": "",
        "tiles": [],
        "state": "running" if running else "stopped" if rest else "ended",
        "step": 0,
        "footer": " · ".join(map(str, runs)),
    }


def _ranking(gained: Sequence[tuple[Mapping[str, Any], Path]]) -> str:
    """The run that gained most, where the gains are of the same thing."""
    if not gained:
        return "none is long enough to say what it gained"
    rows, runs = zip(*gained, strict=True)
    kinds = {row["gain"]["of"].split(",")[0] for row in rows}
    if len(kinds) > 1:
        return "some measured held-out reward and some did not, so their gains don't compare"
    if other := _others(runs):
        return f"their task or evaluation differs ({other}), so their gains don't compare"
    best = max(rows, key=lambda row: row["gain"]["gain"])
    gain = best["gain"]
    span = f"{gain['gain']:+.3f}, 95 % interval {gain['low']:+.3f} to {gain['high']:+.3f}"
    who = "alone is long enough to say what it gained" if len(rows) == 1 else f"gained most of {len(rows)}"
    others = [row["gain"]["high"] for row in rows if row is not best]
    apart = "above every other run's interval" if gain["low"] > max(others, default=0) else "others reach into it"
    return f"run {best['name']} {who} in {kinds.pop()} reward: {span}" + (f", {apart}" if others else "")


def _lowest_loss(imitated: Sequence[tuple[Mapping[str, Any], Path]]) -> str:
    """The run of SFT with the lowest held-out loss, where the losses are of the same thing."""
    rows, runs = zip(*imitated, strict=True)
    if other := _others(runs, (*SAME_FOR_A_PAIR, *OF_TOKENS)):
        return f"their model, task or evaluation differs ({other}), so their losses don't compare"
    best = min(rows, key=lambda row: row["loss"]["after"])
    loss = f"{best['loss']['after']:.3f}, {best['loss']['before']:.3f} before training"
    return f"run {best['name']} has the lowest held-out loss of {len(rows)}: {loss}"


def build(runs: Sequence[Path]) -> dict[str, Any]:
    """The table of the runs, and the settings in which they differ."""
    return {"runs": compared(runs), "settings": {key: _texts(key, values) for key, values in differences(runs).items()}}


def sweep(runs: Sequence[Path]) -> dict[str, Any] | None:
    """The runs in the order of a setting's values, for each setting that differs; None where one adds nothing."""
    gains, panels = compared(runs), []
    known = [i for i, run in enumerate(gains) if "gain" in run]
    for key, values in differences(runs).items():
        if any(values[i] != values[known[0]] for i in known):
            texts = _texts(key, values)
            ordered = sorted(known, key=lambda i, of=values: _order(of[i]))
            marks = [{"value": texts[i], "name": gains[i]["name"], **gains[i]["gain"]} for i in ordered]
            panels.append({"key": key, "runs": marks})
    return {"panels": panels} if panels else None


def _order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, in front of everything else."""
    return (False, value, "") if isinstance(value, int | float) else (True, 0.0, str(value))


def curves(runs: Sequence[Path]) -> dict[str, Any] | None:
    """The curves of all runs, one metric a chart."""
    rows = {name: lines for name, run in zip(names_of(runs), runs, strict=True) if (lines := read_rows(run))}
    return charts.curves(rows) if rows else None


def _texts(key: str, values: Sequence[Any]) -> list[str]:
    return [written(masked(value, key)) for value in values]


SUMMARY = Section("summary", "Summary", head)
SECTIONS = [
    Section(
        "comparison",
        "Runs",
        build,
        "Gain: from before training to its end. Difference: the held-out rewards at the end against those of the first "
        "run, row by row (paired, Student's t).",
    ),
    Section("sweep", "Settings against gain", sweep, "A mark is a run's gain, its line the 95 % interval."),
    Section("charts", "Curves", curves, "One metric a chart, a line a run. Point to read values, drag to zoom."),
]
