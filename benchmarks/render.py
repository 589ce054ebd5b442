"""Writes README.md and its plots from the benchmarks' JSON files: `python benchmarks/render.py [FOLDER]`.

The same figures of the same code give the same bytes; figures that are older than the code that they depend on are
marked. What of a result is shown, see `harness.py`; a result without a table or a plot is shown by the medians of its
arms and by its ratios.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HEAD = """# Benchmarks

Written by `make bench` from the JSON files next to it, each from one call of a script. A figure is a ratio of
measurements that took turns on one machine, as absolute times say little, on shared CPUs least of all; only that of
scoring is a time, over the time it may take. A figure is marked where the code that it depends on has changed since.
"""


def render(results: Sequence[Mapping]) -> dict[str, str]:
    """README.md and the plots of these results, by file name."""
    results = sorted(results, key=lambda result: result["name"])
    files = {}
    sections = []
    for result in results:
        names = list(result.get("pictures", []))  # drawn by the benchmark itself
        for i, plot in enumerate(plots(result)):
            names.append(f"{result['name']}{f'_{i + 1}' if i else ''}.svg")
            files[names[-1]] = draw(plot)
        sections.append(section(result, names))
    summary = [
        {
            "benchmark": f"[{result['name']}](#{result['name']})",
            "figure": result["figure"],
            "bars": in_short(result),
            "code since": "" if is_of_this_code(result) else "changed",
        }
        for result in results
    ]
    return {"README.md": "\n".join([HEAD, table(summary), *sections])} | files


def section(result: Mapping, plot_files: Sequence[str]) -> str:
    """One benchmark in Markdown."""
    lines = [f"## {result['name']}", "", *([result["shows"], ""] if "shows" in result else [])]
    lines.append(f"- figure: **{number(result['figure'])}**")
    if "peer" in result:
        lines.append(f"- peer: {cell(result['peer'])}")
    for bar in result.get("bars", []):
        met = "reached" if bar["met"] else "**missed**"
        lines.append(f"- {met}: {number(bar['figure'])} {cell(bar['what'])} ({limit(bar)})")
    for name, reason in result.get("failed", {}).items():
        lines.append(f"- left out: {cell(name)}: {cell(reason)}")
    if tried := result.get("tried_alone_s"):
        times = [f"{name} {f'{x:.1f} s' if isinstance(x, float) else x}" for name, x in tried.items()]
        lines.append(f"- tried alone: {cell('; '.join(times))}")
    lines += [f"- machine: {machine(result)}", f"- code: {code(result)}", ""]
    lines += [f"![{result['name']}]({name})" for name in plot_files] + [""] * bool(plot_files)
    return "\n".join([*lines, table(rows(result))])


def limit(bar: Mapping) -> str:
    """The limit of a figure, in words.

    >>> limit({"at_most": 0.25})
    'at most 0.25'
    """
    return f"at least {bar['at_least']:g}" if "at_least" in bar else f"at most {bar['at_most']:g}"


def in_short(result: Mapping) -> str:
    """The number of bars that were reached, in words.

    >>> in_short({"bars": [{"met": True}, {"met": False}]})
    '1 of 2 reached'
    """
    bars = result.get("bars", [])
    return f"{sum(bar['met'] for bar in bars)} of {len(bars)} reached" if bars else ""


def machine(result: Mapping) -> str:
    """The machine in a line, and whether it was quiet."""
    facts = result.get("machine", {})
    parts = [facts.get("cpu", "unknown")]
    if "cores" in facts:
        parts.append(f"{facts['cores']} cores, {facts['memory_gib']} GiB")
    if facts.get("accelerator"):
        parts.append(facts["accelerator"])
    if "dtype" in facts:
        parts.append(f"dtype {facts['dtype']}")
    parts += [f"{name} {version}" for name, version in facts.get("packages", {}).items() if name == "torch"]
    if "load_average" in result:
        busy = ", **measured although it was busy**" if result.get("forced") else ""
        parts.append(f"load {result['load_average']:.2f} at the start{busy}")
    if "measured" in result:
        parts.append(result["measured"])
    return "; ".join(map(cell, parts))


def code(result: Mapping) -> str:
    """The commit that was measured, and whether what the figure depends on has changed since.

    >>> code({})
    'commit unknown, **older than the code**'
    """
    facts = result.get("code", {})
    commit = f"commit {facts.get('commit') or 'unknown'}"
    parts = f" ({', '.join(facts['files'])})" if facts else ""
    return commit if is_of_this_code(result) else f"{commit}, **older than the code**{parts}"


def is_of_this_code(result: Mapping) -> bool:
    """True if what the figure depends on is as it was measured."""
    facts = result.get("code")
    return facts is not None and harness.digest(facts["files"]) == facts["digest"]


def rows(result: Mapping) -> list[dict]:
    """The table's rows: the result's own, or the medians of its arms and how many times slower than ours each is."""
    if result.get("table"):
        return list(result["table"])
    ratios = result.get("ratios", {})
    return [
        {"arm": name, **arm.get("median", {}), **({"times ours": ratios.get(name, 1.0)} if ratios else {})}
        for name, arm in result.get("arms", {}).items()
    ]


def plots(result: Mapping) -> list[Mapping]:
    """The plots to draw: the result's own, or its ratios."""
    if "plots" in result:
        return list(result["plots"])
    if result.get("ratios"):
        return [{"title": "times ours", "y": "ratio", "bars": dict(result["ratios"])}]
    return []


def table(rows: Sequence[Mapping]) -> str:
    """Rows as Markdown; a column that a row lacks is left empty there.

    >>> print(table([{"arm": "a", "s": 1.5}, {"arm": "b|c", "s": 1234.5, "note": True}]))
    | arm | s | note |
    | --- | --- | --- |
    | a | 1.5 |  |
    | b/c | 1234 | yes |
    <BLANKLINE>
    """
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(column, "")) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: object) -> str:
    """A value in one cell of a table, whatever it holds."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    return " ".join(str(value).replace("|", "/").split())


def number(value: float) -> str:
    """Three digits at least, no exponent.

    >>> number(0.012345), number(2.568), number(1234.5), number(151936)
    ('0.0123', '2.57', '1234', '151936')
    """
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def draw(plot: Mapping) -> str:
    """The plot as SVG."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo_rl"}):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        if "bars" in plot:
            names = list(plot["bars"])
            axes.barh(range(len(names)), list(plot["bars"].values()), color="C0")
            axes.set(yticks=range(len(names)), yticklabels=names, xlabel=plot["y"])
            axes.invert_yaxis()
        else:
            for name, points in plot["series"].items():
                axes.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
            axes.set(xlabel=plot["x"], ylabel=plot["y"], xlim=(0, None), ylim=(0, None))
            axes.legend(frameon=False)
        axes.set_title(plot["title"])
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        plt.close(figure)
    return "".join(line.rstrip() + "\n" for line in svg.getvalue().splitlines())


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for name, content in render(results).items():
        (folder / name).write_text(content)
        print(folder / name)


if __name__ == "__main__":
    main()
