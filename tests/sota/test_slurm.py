"""grpo.sbatch runs for real: srun and scontrol are played, on this machine, as two nodes; Ray and torchrun are real."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]

# Starts commands in sessions of their own, as another machine would, and passes on signals as srun does: not SIGINT.
SRUN = """#!{python}
import os, signal, subprocess, sys
options, words = {{}}, sys.argv[1:]
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
node = options.get("--nodelist")
if node and node == os.environ.get("FAKE_DOWN"):
    sys.exit(f"srun: error: node {{node}} does not respond")
count = 1 if node else int(options["--nodes"])
children = [
    subprocess.Popen(words, env=os.environ | {{"SLURM_PROCID": str(i)}}, start_new_session=True) for i in range(count)
]
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: [child.send_signal(number) for child in children])
sys.exit(max((child.wait() for child in children), key=abs))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<<"$3"; else echo "$@" >>"$FAKE_SCONTROL_LOG"; fi
"""
# In the place of a training script: writes down what it was given, and ends as it is told to.
TRAIN = """
import json, os, pathlib, signal, sys, time
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
run, rank = pathlib.Path(words["hydra.run.dir"]), int(os.environ.get("RANK", 0))
seen = {"words": words, "world": os.environ.get("WORLD_SIZE")}
if "ray.address" in words:
    import ray
    seen["token_mode"] = oct(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode)[-3:]
    ray.init(words["ray.address"], log_to_driver=False)
    seen["nodes"] = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])

def stop(*_):
    time.sleep(2)  # as long as a checkpoint takes
    if "ray.address" in words:
        assert sum(node["Alive"] for node in ray.nodes()) == 2
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "checkpoint_000001.pt").touch()
    (run / "summary.json").write_text('{\\n  "finished": false\\n}')
    sys.exit(int("TORCHELASTIC_RUN_ID" not in os.environ))  # as `Stopped` does

if os.environ["FAKE_TRAINING"] == "hangs":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
else:
    signal.signal(signal.SIGINT, stop)
(run / "metrics.jsonl").touch()
(run / f"ready.{rank}").touch()
if rank == 0:
    (run / "seen.partial").write_text(json.dumps(seen))
    (run / "seen.partial").rename(run / "seen.json")
if os.environ["FAKE_TRAINING"] in ("waits", "hangs"):
    time.sleep(300)
sys.exit(int(os.environ["FAKE_TRAINING"]))
"""


class Job:
    """A job on the nodes a and b, whose processes can be found by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.run, self.mark = folder / "run", uuid.uuid4().hex
        stubs = folder / "bin"
        stubs.mkdir()
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        (folder / "train.py").write_text(TRAIN)
        self.scontrol_log = folder / "scontrol.log"
        self.env = os.environ | {
            "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": self.mark[:8],
            "SLURM_JOB_NODELIST": "node-a,node-b",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_CPUS_ON_NODE": "1",
            "FAKE_SCONTROL_LOG": str(self.scontrol_log),
            "GRPO_RL_RUN": str(self.run),
            "GRPO_RL_HEAD": "127.0.0.1",
            "GRPO_RL_RANKS_PER_NODE": "1",
            "GRPO_RL_RAY_OPTIONS": "--object-store-memory=100000000",
            "GRPO_RL_COMMAND": f"python {folder / 'train.py'}",
            "GRPO_RL_MARK": self.mark,
        }

    def start(self, *overrides: str, training: str = "0", **env: str) -> None:
        for path in (self.run / "seen.json", *self.run.glob("ready.*")):
            path.unlink(missing_ok=True)
        command, env = ["bash", "sota/slurm/grpo.sbatch", *overrides], self.env | {"FAKE_TRAINING": training} | env
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **output)

    def cancel(self) -> None:
        """Sends SIGTERM to all steps and the batch script, once it trains, as scancel does."""
        self.await_training()
        steps = [pid for pid in self.processes() if command_line(pid).startswith("/bin/bash sota/slurm/node.sh")]
        assert len(steps) == 2
        for pid in steps:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        self.process.send_signal(signal.SIGTERM)

    def await_training(self) -> None:
        """Waits until each rank takes signals: one that gets it as it starts would die, and torchrun start it again."""
        end, seen = time.monotonic() + 400, self.run / "seen.json"
        while not seen.exists() or len([*self.run.glob("ready.*")]) < int(self.seen()["world"] or 1):
            if time.monotonic() > end or self.process.poll() is not None:
                self.process.terminate()
                out, _ = self.process.communicate(timeout=200)
                logs = [path.read_text() for path in sorted((self.run / "nodes").glob("*.log"))]
                pytest.fail(f"training has not begun\n{out}\n{logs}")
            time.sleep(0.2)

    def wait(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=900)
        return self.process.returncode, out

    def seen(self) -> dict:
        return json.loads((self.run / "seen.json").read_text())

    def processes(self) -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if process.name.isdigit() and self.mark in (process / "environ").read_text(errors="replace"):
                    found.append(int(process.name))
        return found

    def left(self) -> list[str]:
        """Command lines of its processes that still run, and files that it should have removed."""
        files = [*self.run.glob(".ray_token"), *Path("/tmp").glob(f"grpo-ray-{self.mark[:8]}*")]
        return [*map(str, files), *(command_line(pid) for pid in self.processes())]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or str(pid)
    except OSError:
        return str(pid)


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    for pid in made.processes():  # of a test that failed
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_ray_starts_with_a_token_on_every_node_and_nothing_is_left_but_the_trainings_exit_code(job):
    (job.run / "checkpoints").mkdir(parents=True)
    (job.run / "checkpoints" / "checkpoint_000001.pt").touch()
    job.start("env.repeats=4", training="3")
    code, out = job.wait()
    assert code == 3, out
    seen = job.seen()
    assert seen["nodes"] == ["node-a", "node-b"] and seen["token_mode"] == "600"
    assert seen["words"]["ray.nodes"] == "2" and seen["words"]["env.repeats"] == "4"
    assert seen["words"]["resume"] == seen["words"]["hydra.run.dir"] == str(job.run)
    assert "All 2 nodes answer" in out and not seen["words"]["ray.address"].endswith(":6379")
    assert job.left() == [] and not job.scontrol_log.exists()


@pytest.mark.nightly
def test_at_the_time_limit_ranks_write_a_checkpoint_and_the_job_that_is_queued_again_goes_on(job):
    job.start("mode=sync", training="waits")
    job.await_training()
    job.process.send_signal(signal.SIGUSR1)
    code, out = job.wait()
    assert code == 0 and job.left() == [], out
    assert job.seen()["world"] == "2" and not {"ray.address", "resume"} & job.seen()["words"].keys()
    assert job.scontrol_log.read_text() == f"requeue {job.mark[:8]}\n", out
    job.start("mode=sync")
    code, out = job.wait()
    assert code == 0, out
    assert job.seen()["words"]["resume"] == job.seen()["words"]["hydra.run.dir"] == str(job.run)


def test_a_folder_of_someone_elses_is_not_taken_for_rays(tmp_path):
    theirs, temp = tmp_path / "theirs", tmp_path / "ray"
    theirs.mkdir()
    temp.symlink_to(theirs)
    words = ["bash", str(ROOT / "sota" / "slurm" / "node.sh"), "touch", str(temp / "file")]
    done = subprocess.run(words, env=os.environ | {"GRPO_RL_RAY_TEMP": str(temp)}, capture_output=True, text=True)
    assert done.returncode == 1 and f"{temp} can't be made, or is someone else's" in done.stderr
    assert theirs.exists() and not list(theirs.iterdir())


@pytest.mark.alone
@pytest.mark.parametrize("training", ["waits", "hangs"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_cancelled_gets_a_checkpoint_and_is_ended_before_slurm_does_even_if_it_hangs(job, mode, training):
    job.start(f"mode={mode}", training=training, GRPO_RL_GRACE_S="20" if training == "waits" else "1")
    job.cancel()
    begin = time.monotonic()
    code, out = job.wait()
    assert code == 143 and job.left() == [] and not job.scontrol_log.exists(), out
    if training == "waits":
        assert (job.run / "checkpoints" / "checkpoint_000001.pt").exists()
    else:  # 1 s of grace, 4 s for the training and as many for Ray, and what it takes to look at them
        assert time.monotonic() - begin < 15, out


@pytest.mark.nightly
def test_a_node_that_is_down_is_named_before_anything_starts_and_a_run_without_a_checkpoint_is_set_aside(job):
    job.run.mkdir()
    (job.run / "metrics.jsonl").write_text("of a run that died early")
    job.start(FAKE_DOWN="node-b")
    code, out = job.wait()
    assert code == 1 and "can't use node-b" in out and "node-a (" not in out
    assert not (job.run / "seen.json").exists() and job.left() == []
    (aside,) = job.run.parent.glob("run.without-checkpoint-*")
    assert (aside / "metrics.jsonl").exists() and not (job.run / "metrics.jsonl").exists()
