"""A checkpoint is written while the run goes on: from the weights of its step, whole before anything depends on it."""

import threading

import pytest
import torch

from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.run.folder import Room, RunFolder
from grpo_rl.run.summary import write_evaluation
from grpo_rl.settings.sections import Train
from grpo_rl.storage import checkpoint_file
from grpo_rl.training import checkpoint
from grpo_rl.training.checkpoint import Background, checkpoints, load, save
from grpo_rl.training.logged import metrics_bytes
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.waits import PROCESS
from tests.helpers import of_two_ranks

BEGUN = {"collected": 8, "seconds": 1.0, "eval_before": [], "ranks": 1, "totals": {}, "within_memory": {}}
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", None, {}, "", Room(3, 1000, 1000), Train()) as opened:
        yield opened


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait for the event that this is."""
    write, go = checkpoint_file.write, threading.Event()

    def slow(path, state):
        assert go.wait(60)
        return write(path, state)

    monkeypatch.setattr(checkpoint_file, "write", slow)
    yield go
    go.set()


def test_the_optimizer_waits_with_its_step_until_its_weights_are_written(folder, slow_disk):
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = PolicyOptimizer(model, lr=0.1)
    optimizer.before_step = folder.settle
    path = folder.save(1, lambda: {"step": 1, "optimizer": optimizer.state_dict()}, keep=2)
    assert not path.exists()
    model(torch.ones(1, 2)).sum().backward()  # goes on meanwhile
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert [wait.what for wait in PROCESS.open if wait.thread == stepping.ident] == ["a checkpoint on the disk"]
    assert stepping.is_alive() and torch.equal(model.weight, before)
    slow_disk.set()
    stepping.join(60)
    assert torch.equal(load(path)["optimizer"]["masters"]["weight"], before)
    assert not torch.equal(model.weight, before)


def test_one_is_written_at_a_time_and_the_folder_closes_after_the_last(tmp_path, slow_disk):
    opened = RunFolder(tmp_path / "run", None, {}, "", Room(3, 1000, 1000), Train())
    opened.save(1, lambda: {"step": 1}, keep=0)
    second = threading.Thread(target=lambda: opened.save(2, lambda: {"step": 2}, keep=0))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    closing = threading.Timer(0.2, slow_disk.set)
    closing.start()
    second.join(60)
    opened.close()
    assert [load(path)["step"] for path in checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2]


def test_a_failure_is_raised_once_and_at_the_next_wait():
    background, done = Background(), []
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
    background.start(lambda: done.append(1))
    background.close()
    assert done == [1]


def test_a_checkpoint_that_could_not_be_written_is_told_with_the_error_that_ends_the_run(tmp_path, monkeypatch, capsys):
    def full(path, state):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_file, "write", full)
    with pytest.raises(KeyError, match="a bug"):
        with RunFolder(tmp_path / "run", None, {}, "", Room(3, 1000, 1000), Train()) as opened:
            path = opened.save(1, lambda: {"step": 1}, keep=0)
            raise KeyError("a bug")
    said = capsys.readouterr().err
    assert "The last checkpoint could not be written" in said and f"No space left on device: '{path}'" in said


def test_a_checkpoint_lists_the_metrics_of_its_step_though_the_run_logs_on_meanwhile(folder, monkeypatch):
    log, go, sync = MetricsLog(folder.path), threading.Event(), checkpoint.sync_logs
    log.log(1, {"reward/mean": 0.5})
    size = log.path.stat().st_size
    monkeypatch.setattr(checkpoint, "sync_logs", lambda *given: go.wait(60) and sync(*given))
    path = folder.save(1, lambda: {"step": 1}, keep=2)
    log.log(2, {"reward/mean": 0.5})
    go.set()
    folder.settle()
    assert load(path)["logs"]["metrics.jsonl"] == size


@pytest.mark.parametrize("is_lost", [False, True])
def test_all_ranks_repeat_an_evaluation_whose_metrics_were_lost(tmp_path, monkeypatch, is_lost):
    run = tmp_path / "run"
    log = MetricsLog(run)
    for step in (1, 2):
        log.log(step, {"reward/mean": step / 8})
        state = {"step": step, "config": "{}", **BEGUN, "logs": checkpoint.sync_logs(run, step, metrics_bytes(run))}
        save(run / "checkpoints", step, state, keep=0)
    log.log(2, {"eval/reward": 0.5})  # after the last checkpoint
    write_evaluation(run, 2, [0.5])
    if is_lost:
        log.path.write_bytes(log.path.read_bytes()[:-3])
    monkeypatch.setattr(checkpoint, "load_shards", lambda path, state, ranks: state)
    train, synced = Train(total_dialog_turns=99, elastic=True), []
    monkeypatch.setattr("grpo_rl.run.folder.sync", synced.append)

    def opened(ranks):
        with RunFolder(run, str(run), {}, "", Room(3, 1000, 1000), train, ranks) as folder:
            folder.prepare()
            return folder.eval_after

    assert of_two_ranks(opened) == [None if is_lost else (2, [0.5])] * 2
    assert synced == [run / "checkpoints"]  # else the name that the run goes on from might not survive a power cut
    assert len(read_metrics(run)) == (2 if is_lost else 3)
