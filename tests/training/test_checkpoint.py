"""Checkpoints survive a kill, refuse another config, and restore every random number."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_rl.distributed.sharded_checkpoint import ABANDONED, SHARDS, folder_of
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report.files import BEGAN_FROM
from grpo_rl.run.claim import claim
from grpo_rl.run.lock import FolderLock
from grpo_rl.storage import checkpoint_file
from grpo_rl.training import checkpoint


def test_the_random_state_of_torch_python_and_numpy_comes_back_with_a_checkpoint(tmp_path):
    path = checkpoint.save(tmp_path, 3, {"step": 3, "rng": checkpoint.rng_state()})
    drawn = torch.rand(3), random.random(), np.random.rand()
    checkpoint.set_rng_state(checkpoint.load(path)["rng"])
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]


def test_each_rank_goes_on_with_its_own_random_state_unless_there_are_more_or_fewer():
    state = {"rng": {"torch": 0}, "rng_of_ranks": [{"torch": 0}, {"torch": 1}]}
    second_of = {size: SimpleNamespace(rank=1, size=size) for size in (2, 3)}
    assert checkpoint.with_own_rng(state, second_of[2])["rng"] == {"torch": 1}
    assert checkpoint.with_own_rng(state, second_of[3]) == checkpoint.with_own_rng(state, None) == state
    assert checkpoint.with_own_rng({"rng": 0}, second_of[2]) == {"rng": 0}  # of one process


def claimed(resume, outputs, config=None, frequency=20):
    """The checkpoint that a start with this `resume` takes; its lock is released."""
    taken = claim(outputs / "new", resume, outputs, config or {}, frequency)
    taken.lock.close()
    return taken


def saved(run, step=1, config=None):
    """The checkpoint of a run that has written its config."""
    path = checkpoint.save(run / "checkpoints", step, {"step": step, "config": json.dumps(config or {})})
    (run / "config.yaml").write_text(yaml.safe_dump(config or {}))
    return path


def test_resume_finds_a_file_a_run_and_the_newest_of_all(tmp_path):
    older = saved(tmp_path / "day" / "a", 9)
    newer = saved(tmp_path / "day" / "b", 2)
    os.utime(older, (1, 1))
    for resume, path in ((older, older), (tmp_path / "day" / "a", older), ("auto", newer)):
        taken = claimed(str(resume), tmp_path)
        assert taken.inside and taken.folder == path.parent.parent
        assert checkpoint.restore(taken.resume)[0] == path
    anew = claimed("auto", tmp_path / "nothing")
    assert anew.resume is None and anew.folder == tmp_path / "nothing" / "new"
    with pytest.raises(ValueError, match="no checkpoint there"):
        checkpoint.restore(claimed(str(tmp_path / "nowhere"), tmp_path).resume)


def test_checkpoints_are_in_the_order_of_their_steps_beyond_a_million(tmp_path):
    paths = [tmp_path / f"checkpoint_{name}.pt" for name in ("000010", "000010_copy", "999999", "1000000", "best")]
    for path in paths:
        path.touch()
    assert checkpoint.checkpoints(tmp_path) == paths
    checkpoint.set_aside_later(tmp_path, 999_999)
    assert checkpoint.checkpoints(tmp_path) == paths[:3]


def test_auto_takes_the_newest_run_of_this_config_that_is_not_live_even_if_its_checkpoint_is_torn(tmp_path):
    configs = {name: {"optimizer": {"lr": lr}} for name, lr in (("a", 1e-5), ("b", 1e-4), ("c", 1e-4))}
    for number, (name, config) in enumerate(configs.items()):
        os.utime(saved(tmp_path / name, config=config), (number, number))
    assert claimed("auto", tmp_path, configs["a"]).folder == tmp_path / "a"
    new = claimed("auto", tmp_path, {"optimizer": {"lr": 1e-3}})
    assert new.resume is None and "c is of another config" in new.notes[0] and "optimizer.lr" in new.notes[0]
    live = FolderLock(tmp_path / "c")
    taken = claimed("auto", tmp_path, configs["b"])
    assert taken.folder == tmp_path / "b" and "c is in use" in taken.notes[0]
    live.close()
    damage(checkpoint.checkpoints(tmp_path / "c" / "checkpoints")[0])
    assert claimed("auto", tmp_path, configs["c"]).folder == tmp_path / "c"
    live = FolderLock(tmp_path / "a")
    with pytest.raises(ValueError, match="no other run of this config that was cut off, and .*a is in use"):
        claimed("auto", tmp_path, configs["a"])
    live.close()


def test_a_run_whose_checkpoints_are_gone_is_never_begun_again(tmp_path):
    run = tmp_path / "run"
    log = MetricsLog(run)
    for step in range(21):
        log.log(step, {})
    again = claimed(str(run), tmp_path)  # the checkpoint of step 20 follows its metrics
    assert again.again and again.resume is None
    log.log(21, {})
    with pytest.raises(ValueError, match=r"run got to step 21, and its checkpoints are gone.*put them back"):
        claimed(str(run), tmp_path)
    (run / "summary.json").write_text('{"finished": true}')
    (run / "model").mkdir()
    over = claimed(str(run), tmp_path)
    assert over.over and not over.again and "is finished" in over.notes[0]


def test_a_checkpoint_of_elsewhere_takes_no_other_runs_folder_and_the_same_command_goes_on(tmp_path):
    backup, own = tmp_path / "backup" / "checkpoint_000002.pt", tmp_path / "new"
    checkpoint.save(backup.parent, 2, {"step": 2, "config": "{}"})
    first = claimed(str(backup), tmp_path)
    assert (first.folder, first.resume, first.inside, first.again) == (own, backup, False, False)
    MetricsLog(own).log(3, {})
    (own / BEGAN_FROM).write_text(json.dumps({"checkpoint": str(backup), "step": 2}))
    for resume in (backup, own):  # it was cut off before its first checkpoint
        again = claimed(str(resume), tmp_path)
        assert (again.folder, again.resume, again.inside, again.again) == (own, backup, False, True)
        assert f"begins again from {backup}" in again.notes[0]
    aside = backup.rename(tmp_path / "aside.pt")
    with pytest.raises(ValueError, match="checkpoint_000002.pt, which it began from, is gone; put it back"):
        claimed(str(own), tmp_path)
    aside.rename(backup)
    checkpoint.save(own / "checkpoints", 3, {"step": 3, "config": "{}"})
    for resume in (backup, own):
        on = claimed(str(resume), tmp_path)
        assert (on.folder, on.resume, on.inside) == (own, own, True)
    (own / BEGAN_FROM).unlink()
    for _ in range(2):  # and the refusal holds no lock
        with pytest.raises(ValueError, match="new already holds a run; go on with it"):
            claimed(str(backup), tmp_path)


class OneRank:
    """The only one of the processes that hold a state."""

    rank, size = 0, 1

    def gather(self, mine):
        return [mine]

    def broadcast(self, first):
        return first


@pytest.fixture
def save_sharded(tmp_path):
    """Saves a checkpoint whose tensor lies in a folder of its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))

    def save(step, number, keep=0, rows=4):
        weights = distribute_tensor(torch.full((rows,), float(number)), mesh, [Shard(0)])
        return checkpoint.save(tmp_path, step, {"step": step, "weights": weights}, keep=keep, ranks=OneRank())

    yield save
    dist.destroy_process_group()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


def write_sharded(folder, step, ranks=3):
    """A checkpoint that several ranks hold, whose tensor is the step's number in every row."""
    path = folder / checkpoint.PATTERN.format(step=step)
    folder_of(path).mkdir(parents=True)
    files = []
    for rank, rows in enumerate(torch.full((7, 2), float(step)).chunk(ranks)):
        name = f"save_0_rank_{rank}.pt"
        files.append([name, checkpoint_file.write(folder_of(path) / name, {"weights": rows})])
    index = {"files": files, "tensors": [{"place": ["weights"], "size": [7, 2]}]}
    checkpoint_file.write(path, {"step": step, "weights": None, SHARDS: index})
    return path


def write_whole(folder, step):
    """The same by one process."""
    return checkpoint.save(folder, step, {"step": step, "weights": torch.full((7, 2), float(step))}, keep=0)


def files_of(path):
    return [path, *folder_of(path).glob("*")]


FUZZED = 200


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_whole, write_sharded])
def test_no_damaged_checkpoint_is_loaded_and_the_one_before_is_taken(tmp_path, write, capsys):
    template = tmp_path / "template"
    write(template, 1), write(template, 2)
    draw = random.Random(0)
    for i in range(FUZZED):
        folder = shutil.copytree(template, tmp_path / str(i))
        newest = folder / "checkpoint_000002.pt"
        file = draw.choice(files_of(newest))
        before = file.read_bytes()
        at = draw.randrange(len(before))
        end = min(len(before), at + draw.choice([1, 16, 512, 4096]))
        kind, damaged = draw.choice([
            ("torn", before[:at]),
            ("zeroed", before[:at] + bytes(end - at) + before[end:]),
            ("bit", before[:at] + bytes([before[at] ^ 1 << draw.randrange(8)]) + before[at + 1 :]),
            ("byte", before[:at] + draw.randbytes(1) + before[at + 1 :]),
            # As a file system leaves a file whose last blocks were lost.
            ("zeros at the end", before[:at] + bytes(len(before) - at)),
            ("longer", before + draw.randbytes(draw.randrange(1, 100))),
        ])  # fmt: skip
        file.write_bytes(damaged if damaged != before else before[:at] + bytes([before[at] ^ 255]) + before[at + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint_000002.pt can't be .*good one next to it is .*_000001.pt"):
            checkpoint.load(newest)
        path, state = checkpoint.restore(folder)
        assert path.name == "checkpoint_000001.pt" and state["weights"].eq(1.0).all(), (i, kind, at)
        assert "passed over" in capsys.readouterr().err
        shutil.rmtree(folder)


def test_the_digest_is_that_of_what_torch_wrote_and_other_readers_see_a_plain_archive(tmp_path):
    state, plain = {"weights": torch.arange(5.0)}, io.BytesIO()
    torch.save(state, plain)
    path = tmp_path / "ours.pt"
    digest = checkpoint_file.write(path, state)
    assert digest == hashlib.sha256(plain.getvalue()).hexdigest() == checkpoint_file.check(path)
    assert len(path.read_bytes()) == len(plain.getvalue()) + len("sha256:") + 64
    with zipfile.ZipFile(path) as archive:
        assert archive.comment == b"sha256:" + digest.encode() and archive.testzip() is None
    assert torch.load(path)["weights"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_part_of_another_checkpoint_is_found_out(tmp_path):
    paths = [write_sharded(tmp_path, step) for step in (1, 2)]
    shutil.copy(*(folder_of(path) / "save_0_rank_1.pt" for path in paths))
    with pytest.raises(ValueError, match="save_0_rank_1.pt is of another checkpoint"):
        checkpoint.load(paths[1])
    (folder_of(paths[0]) / "save_0_rank_2.pt").unlink()
    with pytest.raises(ValueError, match="no sharded tensors next to it in checkpoint_000001.shards/save_0_rank_2.pt"):
        checkpoint.load(paths[0])


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("form", ["pickle", "archive", "archive with a digest"])
def test_no_file_of_a_sharded_checkpoint_runs_code(tmp_path, form):
    mark, payload = tmp_path / "ran", Payload(tmp_path / "ran")
    pickle.loads(pickle.dumps(payload))
    mark.unlink()  # a pickle that is read as one does leave it
    path = write_sharded(tmp_path / "checkpoints", 1)
    files = [*files_of(path), folder_of(path) / ".metadata", folder_of(path) / "__0_0.distcp"]
    before = {file: file.read_bytes() for file in files if file.exists()}
    for file in files:
        digest = None
        if form == "pickle":
            file.write_bytes(pickle.dumps(payload))
        elif form == "archive":
            with file.open("wb") as opened:
                torch.save({"weights": payload}, opened)
        else:
            digest = checkpoint_file.write(file, {"weights": payload})
        if digest and file in before and file != path:  # whoever writes a part can write the digest into the list
            state = torch.load(path)
            state[SHARDS]["files"] = [[n, digest if n == file.name else d] for n, d in state[SHARDS]["files"]]
            checkpoint_file.write(path, state)
        if file in before:
            with pytest.raises(ValueError, match="can't be read as a checkpoint"):
                checkpoint.load(path)
        else:
            checkpoint.load(path)
        with pytest.raises(ValueError) if file in before else contextlib.nullcontext():
            checkpoint.restore(path)
        assert not mark.exists(), file
        file.unlink()
        for file, contents in before.items():
            file.write_bytes(contents)
    assert checkpoint.load(path)["weights"].eq(1.0).all()


def damage(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_a_torn_newest_checkpoint_is_passed_over_aloud_and_named_it_is_refused(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    log = MetricsLog(tmp_path / "run")
    for step in (1, 2):
        log.log(step, {"loss": 0.0})
        write_whole(folder, step)
    older, newest = checkpoint.checkpoints(folder)
    damage(newest)
    path, state = checkpoint.restore(tmp_path / "run", tmp_path / "run")
    assert path == older and state["weights"].eq(1.0).all()
    said = capsys.readouterr().err
    assert f"passed over: {newest} can't be read as a checkpoint" in said and f"going on with {path}" in said
    damage(older)
    with pytest.raises(ValueError, match=r"_000001.pt can't be read .* there is no good one next to it"):
        checkpoint.restore(older)
    with pytest.raises(ValueError, match=r"no checkpoint can be used; to start anew(.|\n)*_000002(.|\n)*_000001"):
        checkpoint.restore(tmp_path / "run")


def test_a_checkpoint_that_was_written_without_metrics_is_passed_over(tmp_path, capsys):
    """A run whose folder is moved while it writes leaves one beside another run's metrics."""
    run = tmp_path / "run"
    for step in (0, 2):
        checkpoint.save(run / "checkpoints", step, {"step": step, "logs": {}})
    MetricsLog(run).log(2, {})
    path, _ = checkpoint.restore(run, run)
    assert path.name == "checkpoint_000000.pt"
    assert "it was written without metrics.jsonl" in capsys.readouterr().err


class Killed(BaseException):
    """The process is no more."""


def kill_at(monkeypatch, number):
    """Cuts off the disk: from the given file operation on, counted from 0, nothing more reaches it."""
    count = iter(range(1_000_000))
    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync"):
        real = getattr(os, name)

        def operation(*args, real=real, **settings):
            if next(count) >= number:
                raise Killed
            return real(*args, **settings)

        monkeypatch.setattr(os, name, operation)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["next step", "same step again", "same step alone", "set aside"])
def test_a_kill_at_any_file_operation_leaves_a_good_checkpoint(tmp_path, save_sharded, monkeypatch, what):
    works = {
        "next step": lambda: save_sharded(3, 30, keep=1),
        "same step again": lambda: save_sharded(2, 22, keep=1),
        "same step alone": lambda: checkpoint.save(tmp_path, 2, {"step": 2, "weights": torch.full((4,), 22.0)}, keep=1),
        "set aside": lambda: checkpoint.set_aside_later(tmp_path, 1),
    }
    expected = {"next step": {20, 30}, "same step again": {20, 22}, "same step alone": {20, 22}, "set aside": {10, 20}}
    found = []
    for number in range(1000):
        shutil.rmtree(tmp_path)
        save_sharded(1, 10)
        save_sharded(2, 20)
        if what == "set aside":
            save_sharded(3, 20)
        with monkeypatch.context() as patched:
            kill_at(patched, number)
            try:
                works[what]()
                done = True
            except Killed:
                done = False
        state = checkpoint.restore(tmp_path)[1]
        found.append(state["weights"][0].item())
        assert state["weights"].tolist() == [found[-1]] * 4
        # Whoever goes on there finds nothing in the way, and nothing is left of the cut.
        checkpoint.set_aside_later(tmp_path, state["step"])
        save_sharded(4, 40, keep=1)
        assert checkpoint.restore(tmp_path)[1]["weights"].tolist() == [40.0] * 4
        kept = [name for name in names(tmp_path) if ABANDONED not in name]
        assert kept == ["checkpoint_000004.pt", "checkpoint_000004.shards"]
        if done:
            break
    assert done and number >= 4 and set(found) == expected[what]
    assert found == sorted(found, reverse=what == "set aside")


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path, save_sharded):
    """The system itself refuses what makes a file larger than 20 kB: torch makes an error of its own of that."""
    for step in (1, 2):
        save_sharded(step, step)
    before = {file: file.read_bytes() for path in checkpoint.checkpoints(tmp_path) for file in files_of(path)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large") as whole:
                checkpoint.save(tmp_path, step, {"step": step, "weights": torch.ones(10_000)})
            with pytest.raises(OSError, match="File too large") as sharded:
                save_sharded(step, 0, rows=10_000)
            assert whole.value.filename == str(tmp_path / f"checkpoint_00000{step}.pt")
            assert sharded.value.filename.startswith(str(tmp_path / f"checkpoint_00000{step}.shards"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before
    assert names(tmp_path) == [f"checkpoint_00000{step}.{end}" for step in (1, 2) for end in ("pt", "shards")]
