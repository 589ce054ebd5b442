from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from grpo_rl.monitor.progress import Progress
from grpo_rl.storage.printable import printable

ROOT = Path(__file__).parents[2]

METRICS = {
    "reward/mean": 1.25,
    "reward/std": 0.5,
    "reward/zero_std_fraction": 0.0,
    "reward/correctness": 1.0,
    "reward/answer_format": 0.25,
    "entropy": 0.5,
    "kl/ref": 0.01,
    "grad_norm": 2.0,
    "response/mean_length": 83.25,
    "response/truncated_fraction": 0.125,
    "throughput/sample_tokens_per_s": 612.0,
    "throughput/train_tokens_per_s": 1930.0,
    "limit_fraction": 0.482,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def console(width: int = 80, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=terminal, color_system=None)


def shown(screen: Console) -> str:
    return printable(screen.file.getvalue())


def test_a_log_file_gets_one_line_a_step_however_long():
    screen, clock = console(width=40, terminal=False), Clock()
    with Progress(10, screen, clock=clock) as progress:
        progress.phase("sampling")
        clock.now += 30
        progress.update(1, METRICS)
        clock.now += 10
        progress.update(2, METRICS)
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 2
    stamps, lines = zip(*((line[:20], line[20:]) for line in lines), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", stamp) for stamp in stamps)
    assert lines[0].startswith("step 1/10 · reward 1.250 · correctness 1.000 · answer_format 0.250 · entropy 0.5")
    # The first step is no measure of the eight to come once there is another.
    assert lines[0].endswith("30.0 s/step, ETA 4:30") and lines[1].endswith("10.0 s/step, ETA 1:20")


def test_a_first_step_that_compiles_says_so_and_leaves_the_eta_to_those_after_it():
    screen, clock = console(terminal=False), Clock()
    with Progress(10, screen, clock=clock) as progress:
        progress.compiles = True
        for step, seconds in ((1, 300), (2, 10), (3, 20)):
            clock.now += seconds
            progress.update(step, METRICS)
    ends = [line.rpartition(" · ")[2] for line in screen.file.getvalue().splitlines()]
    # 9 x 300 s at most; then 8 x 10 s, and 7 x 15 s.
    assert ends == ["300.0 s, compilation included, ETA below 45:00", "10.0 s/step, ETA 1:20", "20.0 s/step, ETA 1:45"]


def test_the_eta_counts_from_where_a_run_was_resumed():
    clock = Clock()
    progress = Progress(10, console(terminal=False), first_step=6, clock=clock)
    assert progress.eta_s is None
    clock.now += 5
    progress.update(7, METRICS)
    assert progress.eta_s == 15.0


def test_evaluation_alone_is_no_step():
    clock = Clock()
    progress = Progress(10, console(terminal=False), clock=clock)
    clock.now += 5
    progress.update(0, {"eval/reward": 0.5})
    assert progress.eta_s is None
    assert progress.console.file.getvalue()[20:] == "step 0/10 · held-out reward 0.500\n"


def test_a_terminal_has_a_line_for_each_step_and_a_bar_that_ends_with_the_run():
    screen = console(width=120)
    with pytest.raises(RuntimeError), Progress(5, screen) as progress:
        progress.update(1, METRICS)
        progress.phase("training")
        progress.note("[bold]kept[/bold] \x1b[5A")
        raise RuntimeError
    raw, text = screen.file.getvalue(), shown(screen)
    assert "step 1/5 · reward 1.250" in text and "[bold]kept[/bold]" in text and "\x1b[5A" not in raw
    assert "GRPO · training" in text and text.rstrip().rpartition("GRPO · ")[2].startswith("stopped")
    assert raw.count("\x1b[?25h") == 1  # the cursor is back


def test_no_note_shows_a_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-endpoint")
    screen, recorded = console(width=200, terminal=False), []
    Progress(1, screen, record=recorded.append).note("the agent failed: password=abc, bad sk-planted-endpoint")
    assert recorded == ["the agent failed: password=***, bad ***"] and recorded[0] in screen.file.getvalue()


@pytest.mark.nightly
def test_a_notebook_gets_plain_lines_with_the_time_and_no_markup(tmp_path):
    """A cell of a notebook, run by its kernel: rich would answer with a block of HTML for each line."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from grpo_rl.monitor.progress import Progress
with Progress(2) as progress:
    progress.phase("sample")
    progress.note("Resumed")
    progress.update(1, {{"reward/mean": 0.5}})
    progress.update(2, {{"reward/mean": 0.75}})
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert {output["output_type"] for output in outputs} == {"stream"}
    lines = "".join(output["text"] for output in outputs if output["name"] == "stdout").splitlines()
    assert [line[20:34] for line in lines] == ["Resumed", "step 1/2 · rew", "step 2/2 · rew"]
