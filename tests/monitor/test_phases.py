"""Phases of a run's start: a line when one begins, and one with its seconds."""

from __future__ import annotations

import re
import sys

import pytest

from grpo_rl.monitor.phases import start_phase


def test_a_file_gets_a_line_when_a_phase_begins_and_one_with_its_seconds(capsys):
    with start_phase("loading the model"):
        assert capsys.readouterr().out == "loading the model …\n"
    assert re.fullmatch(r"loading the model … \d+\.\d s\n", capsys.readouterr().out)


def test_in_a_terminal_the_second_line_is_written_over_the_first(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with start_phase("loading the model"):
        pass
    assert re.fullmatch(r"loading the model …\rloading the model … \d+\.\d s\n", capsys.readouterr().out)


def test_a_phase_that_fails_claims_no_end(capsys):
    with pytest.raises(ValueError, match="no model"), start_phase("loading the model"):
        raise ValueError("no model")
    assert capsys.readouterr().out == "loading the model …\n"


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_of_several_processes_rank_zero_alone_speaks(rank, lines, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with start_phase("loading the model"):
        pass
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_beside_a_live_view_only_the_end_is_told_and_in_its_way(capsys):
    told = []
    with start_phase("evaluating 4 held-out rows", told.append, live=True):
        pass
    assert capsys.readouterr().out == "" and told == ["evaluating 4 held-out rows … 0.0 s"]
