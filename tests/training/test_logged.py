"""A checkpoint vouches for the logs before it: what of them is cut off, changed or gone is found out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from grpo_rl.monitor.metrics import MetricsLog, line_digest, read_metrics
from grpo_rl.training import checkpoint
from grpo_rl.training.logged import GrowingDigest, damaged, metrics_bytes


@pytest.fixture
def run(tmp_path):
    """A run of three steps with a checkpoint of each, which vouches for what was logged since the one before."""
    log = MetricsLog(tmp_path)
    (tmp_path / "tokens.parquet").mkdir()
    for step in (1, 2, 3):
        log.log(step, {"reward/mean": step / 8})
        (tmp_path / "tokens.parquet" / f"part-{step:08d}.parquet").write_bytes(bytes([step]) * 9)
        logs = checkpoint.sync_logs(tmp_path, step, metrics_bytes(tmp_path))
        state = {"step": step, "logs": logs}
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
        "tokens.parquet/part-00000002.parquet": [9, hashlib.sha256(b"\2" * 9).hexdigest()],
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
    path = run / "tokens.parquet" / "part-00000003.parquet"
    path.write_bytes(b"\3" * 8 + b"\2")
    assert taken(run) == 2
    path.write_bytes(b"\3" * 8)
    logs = checkpoint.load(run / "checkpoints" / "checkpoint_000003.pt")["logs"]
    assert damaged(run, logs) == f"{path} has 8 bytes, and had 9 when it was written"
    path.unlink()
    assert taken(run) == 2 and damaged(run, logs) == f"{path} is gone"


def test_a_log_that_cannot_be_read_is_passed_over_as_a_damaged_one(run, monkeypatch, capsys):
    read, bad = Path.read_bytes, run / "tokens.parquet" / "part-00000003.parquet"

    def fail(path):
        if path == bad:
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert taken(run) == 2
    assert f"{bad} can't be read (Input/output error)" in capsys.readouterr().err


def test_the_one_before_is_taken_where_neither_the_newest_nor_the_metrics_after_it_can_be_read(run, capsys):
    (run / "checkpoints" / "checkpoint_000003.pt").write_bytes(b"torn")
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b"\0" * 20 + b"\n")
    assert taken(run) == 2
    assert f"passed over: {run}/checkpoints/checkpoint_000003.pt: {path}, line 3 is not" in capsys.readouterr().err


def test_what_is_logged_while_a_checkpoint_is_written_is_left_to_the_next_one(run):
    size = metrics_bytes(run)
    MetricsLog(run).log(4, {"reward/mean": 0.5})
    (run / "tokens.parquet" / "part-00000004.parquet").write_bytes(b"half")
    (run / "checkpoints" / "checkpoint_000003.pt").unlink()
    logs = checkpoint.sync_logs(run, 3, size)
    assert logs.keys() == {"metrics.jsonl", "tokens.parquet/part-00000003.parquet"} and logs["metrics.jsonl"][0] == size


def test_the_digest_of_a_growing_file_reads_only_what_is_new(tmp_path):
    path, digest = tmp_path / "metrics.jsonl", GrowingDigest()
    path.write_bytes(b"one two")
    assert digest.until(path, 3) == [3, hashlib.sha256(b"one").hexdigest()]
    path.write_bytes(b"??? two three")  # the disk has changed what was hashed before
    assert digest.until(path, 7) == digest.until(path, 7) == [7, hashlib.sha256(b"one two").hexdigest()]


def test_a_folder_of_logs_that_was_removed_is_no_damage(run):
    for path in (run / "tokens.parquet").iterdir():
        path.unlink()
    (run / "tokens.parquet").rmdir()
    assert taken(run) == 3


def test_a_checkpoint_under_anothers_name_is_refused(run):
    newest = run / "checkpoints" / "checkpoint_000003.pt"
    newest.write_bytes((run / "checkpoints" / "checkpoint_000002.pt").read_bytes())
    with pytest.raises(ValueError, match="it is the checkpoint of step 2 under another's name"):
        checkpoint.load(newest)
    assert taken(run) == 2


def test_of_what_follows_the_vouched_lines_only_the_last_evaluations_stays(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"a": 1.0})
    vouched = log.path.stat().st_size
    whole = log.path.read_bytes()
    log.log(1, {"eval/reward": 0.5})
    evaluation = log.path.read_bytes()[vouched:]
    digest = line_digest(evaluation.rstrip())
    changed = evaluation.replace(b"0.5", b"0.7")
    log.path.write_bytes(whole + changed + evaluation * 2 + whole + b"\0" * 20 + b"\n")
    content = log.path.read_bytes()
    with pytest.raises(ValueError, match=r"line 6 is not one of metrics"):
        log.truncate(1)
    assert log.truncate(1, vouched, digest) == 1 and log.path.read_bytes() == whole + evaluation
    assert log.has_line(digest)
    log.path.write_bytes(content)
    assert log.truncate(1, vouched) == 1 and log.path.read_bytes() == whole and not log.has_line(digest)


def test_lines_before_a_gap_that_cannot_be_read_are_dropped_only_where_a_gap_is_allowed(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.log(step, {"a": float(step)})
    whole = log.path.read_bytes()
    log.path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(ValueError, match=r"line 1 is not one of metrics"):
        log.truncate(2, len(whole))
    assert log.truncate(2, gap=True) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [2]
