"""A real run of a tiny model with a planted trouble: the terminal's line, summary.json and the report say so."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from grpo_rl.testing import run_script

run = functools.partial(run_script, Path(__file__).parents[2] / "sota" / "grpo.py")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

BATCH = [
    "env.num_envs=8",
    "env.repeats=8",
    "train.optim_batch_size=64",
    "train.micro_batch_tokens=4096",
    "train.checkpoint_frequency=0",
]


STAMP = len("2026-01-31 12:00:00 ")


def advisories(tiny_run, folder, capsys, *overrides, steps):
    """Each advisory of a run's summary, and its lines in the terminal."""
    run([*tiny_run, *BATCH, f"train.total_dialog_turns={64 * steps}", *overrides], folder)
    told = [line[STAMP:] for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in told if line.startswith("Advisory. ")]
    return json.loads((folder / "summary.json").read_text())["advisories"], lines


def test_a_run_says_what_is_wrong_once_also_over_a_resume(tiny_run, tmp_path, capsys):
    folder = tmp_path / "run"
    (told,), lines = advisories(tiny_run, folder, capsys, steps=7)
    assert (told["name"], told["since"], told["until"]) == ("cut_off", 1, None)
    assert lines == [f"Advisory. Cut off, since step 1: {told['seen']}. Try {told['setting']}. See {told['page']}"]
    assert "a higher sampling.max_new_tokens (now 8)" in told["setting"]
    assert told["page"] in (folder / "report.html").read_text()
    assert advisories(tiny_run, folder, capsys, f"resume={folder}", steps=9) == ([told], [])
