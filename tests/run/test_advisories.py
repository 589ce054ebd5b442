"""Real runs of a tiny model with a planted trouble each: the terminal's line, summary.json and the report say so."""

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
STEPS = 7
FIXED_LENGTH = "sampling.ignore_eos=true"  # a random model ends one response in 257 tokens; here that is no trouble


STAMP = len("2026-01-31 12:00:00 ")


def advisories(tiny_run, folder, capsys, *overrides, steps=STEPS):
    """Each advisory of a run's summary, and its lines in the terminal."""
    run([*tiny_run, *BATCH, f"train.total_dialog_turns={64 * steps}", *overrides], folder)
    told = [line[STAMP:] for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in told if line.startswith("Advisory. ")]
    return json.loads((folder / "summary.json").read_text())["advisories"], lines


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "since", "overrides", "setting"),
    [
        ("cut_off", {1}, [], "a higher sampling.max_new_tokens (now 8)"),
        (
            "no_variance",
            {1},
            [FIXED_LENGTH, "env.reward.correctness=0", "env.reward.reasoning_pattern='(?s).*'"],
            "env.reward",
        ),
    ],
)
def test_a_run_says_what_is_wrong_once(tiny_run, tmp_path, capsys, name, since, overrides, setting):
    (told,), lines = advisories(tiny_run, tmp_path / "run", capsys, *overrides)
    assert (told["name"], told["until"]) == (name, None) and told["since"] in since and setting in told["setting"]
    (line,) = lines
    assert line == f"Advisory. Since step {told['since']}: {told['seen']}. Try {told['setting']}. See {told['page']}"
    assert told["page"] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.nightly
def test_a_resumed_run_does_not_repeat_its_advisories(tiny_run, tmp_path, capsys):
    first, lines = advisories(tiny_run, tmp_path / "run", capsys)
    assert len(first) == len(lines) == 1
    resumed, lines = advisories(tiny_run, tmp_path / "run", capsys, f"resume={tmp_path / 'run'}", steps=STEPS + 2)
    assert resumed == first and lines == []
