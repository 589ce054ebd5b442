import io
import re
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from grpo_rl.monitor.progress import Progress
from grpo_rl.storage.masking import printable

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


def console(width: int = 80, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=terminal, color_system=None)


def shown(screen: Console) -> str:
    return printable(screen.file.getvalue())


def last_frame(screen: Console) -> list[str]:
    lines = shown(screen).splitlines()
    return lines[max(i for i, line in enumerate(lines) if line.startswith("╭")) :]


def test_a_log_file_gets_one_line_a_step_however_long():
    screen, clock = console(width=40, terminal=False), SimpleNamespace(now=100.0)
    with Progress(10, screen, clock=lambda: clock.now) as progress:
        progress.phase("sampling")
        clock.now += 30
        progress.update(1, METRICS, sample="four\nlines\nof\ntext")
        clock.now += 10
        progress.update(2, METRICS)
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 2
    stamps, lines = zip(*((line[:20], line[20:]) for line in lines), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", stamp) for stamp in stamps)
    assert lines[0].startswith("step 1/10 · reward 1.250 · correctness 1.000 · answer_format 0.250 · entropy 0.5")
    # The first step is no measure of the eight to come once there is another.
    assert lines[0].endswith("30.0 s/step, ETA 4:30") and lines[1].endswith("10.0 s/step, ETA 1:20")


def test_the_live_view_shows_what_a_person_watches_for():
    screen = console()
    with Progress(2, screen) as progress:
        progress.update(0, {"eval/reward": 0.5})
        progress.update(1, METRICS | {"reward/mean": 0.0})
        progress.update(2, METRICS, sample="She has 7 apples.")
        progress.update(2, {"eval/reward": 1.5})
    frame = "\n".join(last_frame(screen))
    texts = [
        "step 2/2", "finished", "1.250  ▁█", "correctness 1.000", "0.500 → 1.500", "entropy 0.5", "kl 0.01",
        "grad norm 2", "length 83.2", "cut off 12%", "612 tokens/s", "1,930 tokens/s", "roofline 48%",
        "She has 7 apples.",
    ]  # fmt: skip
    assert [text for text in texts if text not in frame] == []


def test_a_step_has_its_turns_and_errors_and_in_async_mode_alone_its_staleness():
    def line_of(**more):
        screen = console()
        with Progress(2, screen) as progress:
            progress.update(1, {"staleness/mean": 0.5} | more)
        return "\n".join(last_frame(screen))

    assert "staleness" not in line_of()
    assert "turns 2.5   replies 1.5   errors 0.25" in line_of(
        **{"measure/turns": 2.5, "measure/replies": 1.5, "measure/error_replies": 0.25}
    )
    assert "waiting 3.0 s   staleness 0.50" in line_of(**{"time/wait_s": 3.0})


def test_a_hostile_sample_moves_nothing_in_the_terminal():
    screen = console()
    with Progress(1, screen) as progress:
        progress.update(1, METRICS, sample="\x1b[2J\x1b]0;owned\x07[red]plain[/red] [/nonsense]")
        progress.note("[bold]kept[/bold] \x1b[5A")
    raw = screen.file.getvalue()
    assert "owned" not in raw and "\x1b[5A" not in raw and "\x1b[2J" not in raw
    assert "[red]plain[/red] [/nonsense]" in shown(screen) and "[bold]kept[/bold]" in shown(screen)


def test_a_notebook_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    progress = Progress(2)
    assert progress._live is None and not progress.console.is_jupyter


def test_no_note_shows_a_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-endpoint")
    screen, recorded = console(width=200, terminal=False), []
    Progress(1, screen, record=recorded.append).note("the agent failed: password=abc, bad sk-planted-endpoint")
    assert recorded == ["the agent failed: password=***, bad ***"] and recorded[0] in screen.file.getvalue()


def test_the_view_is_left_as_it_was_when_the_run_fails():
    screen = console()
    with pytest.raises(RuntimeError), Progress(5, screen) as progress:
        progress.update(1, METRICS)
        progress.phase("training")
        raise RuntimeError
    frame = "\n".join(last_frame(screen))
    assert "stopped" in frame and "training 1,930" in frame and screen.file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_of_the_live_view_is_torn_or_cut(width):
    """Each frame is a box of its own width, and a long sample, part names and numbers are all there, if folded."""
    screen = console(width)
    with Progress(1000, screen, first_step=9) as progress:
        progress.phase("sample")
        progress.update(10, METRICS, sample="word " * 100)
    box = [line for line in last_frame(screen) if line and line[0] in "╭│╰"]
    assert len({cell_len(line) for line in box}) == 1 and cell_len(box[0]) < width
    text = " ".join(" ".join(line.strip("│ ") for line in box).split())
    assert all(part in text for part in ("step 10/1000", "answer_format 0.250", "1,930 tokens/s", "48%"))
