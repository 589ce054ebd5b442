"""A checkpoint vouches for the logs before it: what of them is cut off, changed or gone is found out."""

from __future__ import annotations

import hashlib

import pytest

from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.training import checkpoint
from grpo_rl.training.logged import flaw


@pytest.fixture
def run(tmp_path):
    """A run of three steps with a checkpoint of each, which vouches for what was logged since the one before."""
    log = MetricsLog(tmp_path)
    (tmp_path / "lineage").mkdir()
    for step in (1, 2, 3):
        log.log(step, {"reward/mean": step / 8})
        (tmp_path / "lineage" / f"step_{step:06d}.parquet").write_bytes(bytes([step]) * 9)
        state = {"step": step, "logs": checkpoint.sync_logs(tmp_path)}
        checkpoint.save(tmp_path / "checkpoints", step, state, keep=0)
    return tmp_path


def taken(run):
    return checkpoint.restore(run, run)[1]["step"]


def test_a_checkpoint_lists_metrics_so_far_and_files_since_the_one_before(run):
    logs = checkpoint.load(run / "checkpoints" / "checkpoint_000002.pt")["logs"]
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    until = b"".join(lines[:2])
    assert logs == {
        "metrics.jsonl": [len(until), hashlib.sha256(until).hexdigest()],
        "lineage/step_000002.parquet": [9, hashlib.sha256(b"\2" * 9).hexdigest()],
    }


def test_a_changed_digit_is_found_and_the_newest_checkpoint_before_it_is_taken(run, capsys):
    assert taken(run) == 3
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0.25", b"0.35"))  # of step 2, and still a row of metrics
    assert taken(run) == 1
    said = capsys.readouterr().err
    assert said.count("passed over") == 2 and f"{path} is not as it was written (another SHA-256)" in said
    path.write_bytes(content.replace(b"0.125", b"0.625"))
    with pytest.raises(ValueError, match=r"no checkpoint can be used.*without the logs before it, give its file"):
        taken(run)
    named = run / "checkpoints" / "checkpoint_000003.pt"
    assert checkpoint.restore(named, run)[1]["step"] == 3
    assert "going on with a gap" in capsys.readouterr().err


def test_a_damaged_log_of_the_last_step_is_written_anew_from_the_checkpoint_before(run):
    path = run / "lineage" / "step_000003.parquet"
    path.write_bytes(b"\3" * 8 + b"\2")
    assert taken(run) == 2
    path.write_bytes(b"\3" * 8)
    logs = checkpoint.load(run / "checkpoints" / "checkpoint_000003.pt")["logs"]
    assert flaw(run, logs) == f"{path} has 8 bytes, and had 9 when it was written"
    path.unlink()
    assert taken(run) == 2 and flaw(run, logs) == f"{path} is gone"


def test_a_folder_of_logs_that_was_removed_is_no_damage(run):
    for path in (run / "lineage").iterdir():
        path.unlink()
    (run / "lineage").rmdir()
    assert taken(run) == 3


def test_a_checkpoint_under_anothers_name_is_refused(run):
    newest = run / "checkpoints" / "checkpoint_000003.pt"
    newest.write_bytes((run / "checkpoints" / "checkpoint_000002.pt").read_bytes())
    with pytest.raises(ValueError, match="it is the checkpoint of step 2 under another's name"):
        checkpoint.load(newest)
    assert taken(run) == 2


def test_lines_after_those_that_are_vouched_for_are_dropped_where_they_cannot_be_read(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"a": 1.0})
    vouched = log.path.stat().st_size
    whole = log.path.read_bytes()
    log.log(2, {"a": 2.0})
    log.path.write_bytes(whole + b"\0" * 20 + b"\n")
    with pytest.raises(ValueError, match=r"line 2 is not one of metrics"):
        log.truncate(1)
    assert log.truncate(1, vouched) == 1 and log.path.read_bytes() == whole
    log.path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(ValueError, match=r"line 1 is not one of metrics"):
        log.truncate(1, vouched)
