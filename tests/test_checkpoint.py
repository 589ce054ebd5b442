"""Checkpoints survive a kill, refuse another config, and restore every random number."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_rl import checkpoint


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    state = {"step": 3, "weights": {"a": torch.arange(3.0)}, "text": "é", "rng": checkpoint.rng_state()}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 3, state))
    assert loaded["step"] == 3 and loaded["text"] == "é" and torch.equal(loaded["weights"]["a"], torch.arange(3.0))


def test_random_state_is_restored_for_torch_python_and_numpy():
    state = checkpoint.rng_state()
    drawn = torch.rand(3), random.random(), np.random.rand()
    checkpoint.set_rng_state(state)
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]


def test_a_kill_in_the_middle_of_a_write_leaves_the_last_good_one(tmp_path):
    """A child process is killed with SIGKILL while it writes; this one loads what is left."""
    checkpoint.save(tmp_path, 1, {"step": 1, "data": torch.ones(10)})
    script = textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        from grpo_rl import checkpoint
        print("ready", flush=True)
        checkpoint.save(Path(sys.argv[1]), 2, {"step": 2, "data": torch.ones(200_000_000)})
    """)
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    partial = tmp_path / "checkpoint_000002.partial"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 1_000_000):
        assert time.monotonic() < deadline and child.poll() is None, "the write ended before it could be cut"
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert partial.stat().st_size < 800_000_000, "the write was not cut"
    found = checkpoint.find(str(tmp_path), tmp_path)
    assert found.name == "checkpoint_000001.pt" and checkpoint.load(found)["step"] == 1


def test_a_full_disk_leaves_the_last_good_one_and_no_rubbish(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_000001.pt"]


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"step": step}, keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint_000004.pt", "checkpoint_000005.pt"]


def test_resume_finds_a_file_a_run_and_the_newest_of_all(tmp_path):
    older = checkpoint.save(tmp_path / "day" / "a" / "checkpoints", 9, {})
    newer = checkpoint.save(tmp_path / "day" / "b" / "checkpoints", 2, {})
    os.utime(older, (1, 1))
    assert checkpoint.find(str(older), tmp_path) == older
    assert checkpoint.find(str(tmp_path / "day" / "a"), tmp_path) == older
    assert checkpoint.find("auto", tmp_path) == newer
    assert checkpoint.find("auto", tmp_path / "nothing") is None
    with pytest.raises(ValueError, match="no checkpoint there"):
        checkpoint.find(str(tmp_path / "nowhere"), tmp_path)


def test_a_file_that_is_no_checkpoint_or_carries_code_is_refused(tmp_path):
    broken = tmp_path / "checkpoint_000001.pt"
    broken.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="can't be read as a checkpoint"):
        checkpoint.load(broken)

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"step": Evil()}, broken)
    with pytest.raises(ValueError, match="can't be read as a checkpoint"):
        checkpoint.load(broken)


def test_another_config_is_refused_with_the_keys_that_differ():
    saved = {"optimizer": {"lr": 1e-5}, "logger": {"mode": "online"}, "resume": None}
    current = {"optimizer": {"lr": 1e-4}, "logger": {"mode": "offline"}, "resume": "auto"}
    with pytest.raises(ValueError, match=r"optimizer\.lr: 1e-05 in the checkpoint, 0\.0001 here") as error:
        checkpoint.check_config(json.dumps(saved), json.dumps(current))
    assert "logger" not in str(error.value)
    checkpoint.check_config(json.dumps(saved), json.dumps(saved | {"resume": "auto"}))


def test_a_run_that_a_mismatch_stopped_can_go_on_without_the_bound():
    saved = {"optimizer": {"lr": 1e-5}, "mismatch": {"bound": 0.2, "first_tokens": 256}}
    checkpoint.check_config(json.dumps(saved), json.dumps(saved | {"mismatch": {"bound": None, "first_tokens": 256}}))


def test_later_checkpoints_of_another_future_are_set_aside(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"step": step}, keep=0)
    (tmp_path / "checkpoint_000004.partial").write_bytes(b"half")
    checkpoint.set_aside_later(tmp_path, 1)
    names = ["checkpoint_000001.pt", "checkpoint_000002.abandoned", "checkpoint_000003.abandoned"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert checkpoint.find(str(tmp_path), tmp_path).name == "checkpoint_000001.pt"


class OneRank:
    """Of processes that hold a state together, the only one."""

    rank = 0

    def wait(self):
        """Nobody else is there."""


@pytest.fixture
def save_sharded(tmp_path):
    """Saves a checkpoint whose tensor lies in a folder of its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))

    def save(step, number, keep=0):
        weights = distribute_tensor(torch.full((4,), float(number)), mesh, [Shard(0)])
        return checkpoint.save(tmp_path, step, {"step": step, "weights": weights}, keep=keep, ranks=OneRank())

    yield save
    dist.destroy_process_group()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_while_a_step_is_saved_again_leaves_no_checkpoint_without_tensors(tmp_path, save_sharded, monkeypatch):
    save_sharded(1, 10)
    save_sharded(2, 20)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(dcp, "save", killed)
        save_sharded(2, 20)
    found = checkpoint.find(str(tmp_path), tmp_path)
    assert found.name == "checkpoint_000001.pt" and checkpoint.load(found)["weights"].tolist() == [10.0] * 4
    assert checkpoint.load(save_sharded(2, 20))["weights"].tolist() == [20.0] * 4


def test_tensors_go_along_with_the_checkpoint_that_is_set_aside_and_orphans_go(tmp_path, save_sharded):
    for step in (1, 2, 3):
        save_sharded(step, step)
    (tmp_path / "checkpoint_000003.pt").unlink()  # as a killed write leaves it
    checkpoint.set_aside_later(tmp_path, 1)
    aside = ["checkpoint_000002.abandoned", "checkpoint_000002.abandoned.shards"]
    assert names(tmp_path) == ["checkpoint_000001.pt", "checkpoint_000001.shards", *aside]
    save_sharded(2, 200)  # on the other way
    assert checkpoint.load(tmp_path / aside[0])["weights"].tolist() == [2.0] * 4
    checkpoint.set_aside_later(tmp_path, 1)  # and once more
    assert checkpoint.load(tmp_path / aside[0])["weights"].tolist() == [200.0] * 4
    assert names(tmp_path) == ["checkpoint_000001.pt", "checkpoint_000001.shards", *aside]


def test_old_checkpoints_go_with_their_tensors(tmp_path, save_sharded):
    for step in (1, 2, 3):
        save_sharded(step, step, keep=1)
    assert names(tmp_path) == ["checkpoint_000003.pt", "checkpoint_000003.shards"]
