"""benchmarks/README.md is made of the JSON files, and says which are older than the code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

MARK = re.compile(r"(?<=\| )changed(?= \|)|, \*\*older than the code\*\*.*")

WHOLE = {
    "name": "speed",
    "figure": 2.345,
    "shows": "How fast it is.",
    "peer": "Peer 1.2",
    "bars": [
        {"what": "times faster", "figure": 2.345, "at_least": 2.0, "met": True},
        {"what": "share of memory", "figure": 0.3, "at_most": 0.25, "met": False},
    ],
    "table": [{"arm": "ours", "s": 1.0}, {"arm": "a|b", "s": 2.345}],
    "plots": [{"title": "t", "x": "tokens", "y": "s", "series": {"ours": [[1, 2.0], [2, 3.0]], "none": []}}],
    "failed": {"peer_fp32": "killed"},
    "machine": {"cpu": "CPU 9", "cores": 2, "memory_gib": 23.5, "packages": {"torch": "2.13.0"}},
    "load_average": 3.0,
    "forced": True,
}
ARMS_ONLY = {
    "name": "buffer",
    "figure": 12.0,
    "peer": "torchrl_list, torchrl 0.14.1",
    "ratios": {"torchrl_list": 12.0},
    "arms": {
        "grpo_rl": {"median": {"step_s": 1.0, "pass_us": 10.0}, "steps_s": [1.0]},
        "torchrl_list": {"median": {"step_s": 12.0, "pass_us": 120.0}, "steps_s": [12.0]},
    },
    "machine": {"cpu": "CPU 9"},
}


def test_a_section_shows_figure_bars_peer_machine_and_table(script):
    files = script("render").render([WHOLE])
    page = files["README.md"]
    assert set(files) == {"README.md", "speed.svg"}
    for line in (
        "| [speed](#speed) | 2.35 | 1 of 2 reached | changed |",
        "How fast it is.",
        "- figure: **2.35**",
        "- peer: Peer 1.2",
        "- reached: 2.35 times faster (at least 2)",
        "- **missed**: 0.3 share of memory (at most 0.25)",
        "- left out: peer_fp32: killed",
        "- machine: CPU 9; 2 cores, 23.5 GiB; torch 2.13.0; load 3.00 at the start, **measured although it was busy**",
        "- code: commit unknown, **older than the code**",
        "![speed](speed.svg)",
        "| a/b | 2.35 |",
    ):
        assert line in page.splitlines(), line


def test_a_result_of_arms_alone_is_shown_too(script):
    files = script("render").render([ARMS_ONLY])
    assert "| torchrl_list | 12 | 120 | 12 |" in files["README.md"].splitlines()
    assert "torchrl_list" in files["buffer.svg"]


def test_sections_are_in_order_and_the_same_figures_give_the_same_bytes(script):
    render = script("render").render
    once, again = render([WHOLE, ARMS_ONLY]), render([ARMS_ONLY, WHOLE])
    assert once == again
    assert once["README.md"].index("## buffer") < once["README.md"].index("## speed")


def test_figures_that_are_older_than_the_code_that_they_depend_on_are_marked(script, tmp_path, monkeypatch):
    harness, render = script("harness"), script("render").render
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "buffer.py").write_text("1")
    result = WHOLE | {"code": {**harness.code("data"), "commit": "abc1234"}}
    assert "- code: commit abc1234\n" in (page := render([result])["README.md"])
    assert "| [speed](#speed) | 2.35 | 1 of 2 reached |  |" in page.splitlines()
    (tmp_path / "other.py").write_text("1")
    assert render([result])["README.md"] == page
    (tmp_path / "data" / "buffer.py").write_text("2")
    page = render([result])["README.md"]
    assert "- code: commit abc1234, **older than the code** (data)\n" in page
    assert "| [speed](#speed) | 2.35 | 1 of 2 reached | changed |" in page.splitlines()


def test_a_result_names_the_commit_and_whether_its_files_have_changed_since(script, tmp_path, monkeypatch):
    code = script("harness").code
    monkeypatch.setattr(script("harness"), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("1")
    assert code("a.py")["commit"] == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "b.py").write_text("2")
    assert (code("a.py")["commit"], code("b.py")["commit"]) == (head, f"{head}+")


def test_a_plot_draws_its_points(script):
    draw = script("render").draw
    plot = WHOLE["plots"][0]
    assert draw(plot) == draw(plot)
    moved = plot | {"series": {"ours": [[1, 2.0], [2, 9.0]], "none": []}}
    assert draw(plot) != draw(moved)


def test_the_committed_page_is_what_the_committed_files_say(script):
    results = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    files = script("render").render(results)
    # Marks of figures that are older than the code come and go with every change; `make bench` renews them.
    pages = [MARK.sub("", page) for page in ((FOLDER / "README.md").read_text(), files["README.md"])]
    assert pages[0] == pages[1]
    # A plot's bytes depend on matplotlib's version, so only its presence is asked for.
    assert {path.name for path in FOLDER.glob("*.svg")} == files.keys() - {"README.md"}
