"""A checkpoint lists the lengths of the logs before it: what of them is cut off or gone is found out."""

import pytest

from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.training import checkpoint
from grpo_rl.training.logged import damaged, metrics_bytes


@pytest.fixture
def run(tmp_path):
    """A run of three steps with a checkpoint of each, which lists what was logged since the one before."""
    log = MetricsLog(tmp_path)
    (tmp_path / "tokens.parquet").mkdir()
    for step in (1, 2, 3):
        log.log(step, {"reward/mean": step / 8})
        (tmp_path / "tokens.parquet" / f"part-{step:08d}.parquet").write_bytes(bytes([step]) * 9)
        logs = checkpoint.sync_logs(tmp_path, step, metrics_bytes(tmp_path))
        checkpoint.save(tmp_path / "checkpoints", step, {"step": step, "logs": logs}, keep=0)
    return tmp_path


def taken(run):
    return checkpoint.restore(run, run)[1]["step"]


def test_a_checkpoint_lists_metrics_so_far_and_files_since_the_one_before(run):
    logs = checkpoint.load(run / "checkpoints" / "checkpoint_000002.pt")["logs"]
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert logs == {"metrics.jsonl": len(b"".join(lines[:2])), "tokens.parquet/part-00000002.parquet": 9}


def test_lost_metrics_are_found_and_the_newest_checkpoint_before_them_is_taken(run, capsys):
    assert taken(run) == 3
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b"\0" * len(lines[2]))  # as a power cut leaves it
    assert taken(run) == 2
    assert f"passed over: {run}/checkpoints/checkpoint_000003.pt: {path} ends at step 2" in capsys.readouterr().err
    path.write_bytes(lines[0] + lines[1][:5])
    assert taken(run) == 1
    assert f"{path} ends after {len(lines[0]) + 5} of " in capsys.readouterr().err
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint can be used.*without the logs before it, give its file"):
        taken(run)
    assert checkpoint.restore(run / "checkpoints" / "checkpoint_000003.pt", run)[1]["step"] == 3
    assert "going on with a gap" in capsys.readouterr().err


def test_a_damaged_log_of_the_last_step_is_written_anew_from_the_checkpoint_before(run):
    path = run / "tokens.parquet" / "part-00000003.parquet"
    path.write_bytes(b"\3" * 8)
    logs = checkpoint.load(run / "checkpoints" / "checkpoint_000003.pt")["logs"]
    assert taken(run) == 2 and damaged(run, logs, 3) == f"{path} has 8 bytes, and had 9 when it was written"
    path.unlink()
    assert taken(run) == 2 and damaged(run, logs, 3) == f"{path} is gone"


def test_lines_that_cannot_be_read_are_dropped_only_after_what_a_checkpoint_lists(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.log(step, {"a": float(step)})
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b"\0" * 20 + b"\n")
    with pytest.raises(ValueError, match=r"line 4 is not one of metrics"):
        log.truncate(2)
    assert log.truncate(2, len(whole)) == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    log.path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(ValueError, match=r"line 1 is not one of metrics"):
        log.truncate(2, len(whole))
    assert log.truncate(2, 0) == 1, "a gap is allowed"
    assert [row["step"] for row in read_metrics(tmp_path)] == [2]
