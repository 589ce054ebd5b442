"""Starts of training scripts as forks of a process that has imported everything, so that one takes a second, not ten.

A mode is a script with a tiny model, and the number of processes that train. The async one samples with engines of this
process, whose responses follow from the prompt alone; all between them and the training loop is as in any run.
"""

import asyncio
import contextlib
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

from kill_points import Point, arm, folder_of_library, points

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # for loop_control and tiny_runs
STEPS, GROUPS, REPEATS = 3, 2, 4
"""A run has so many steps, a step so many groups, and a group so many responses."""
PATIENCE_S = 300
"""Seconds after which a start hangs."""
HUNG = 124
"""Status of a start that was ended because it hung, as that of ``timeout``."""


@dataclass(frozen=True)
class Mode:
    """A kind of run.

    Args:
        exact: a run that was killed and went on ends bit for bit as one that was not.
    """

    name: str
    script: str = "grpo.py"
    overrides: tuple[str, ...] = ()
    processes: int = 1
    exact: bool = True


MODES = {
    mode.name: mode
    for mode in (
        Mode("sync"),
        Mode("async", "grpo_async.py", ("inference_model.engine=vllm", "mismatch.bound=null"), exact=False),
        Mode("LoRA", overrides=("train_model.lora.rank=4",)),
        Mode("two ranks", overrides=("train_model.parallel=fsdp",), processes=2),
    )
}


@dataclass
class Start:
    """A start of a script: how it ended, what it took and said, where it died, the points that each rank passed."""

    status: int
    seconds: float
    said: str
    died_at: Point | None = None
    passed: list[list[Point]] = field(default_factory=list)


def overrides(mode: Mode, folder: Path) -> list[str]:
    """The overrides of a run of a few steps, with all that a run can write."""
    from tiny_runs import tiny_run

    sizes = [f"env.num_envs={GROUPS}", f"env.repeats={REPEATS}", f"train.optim_batch_size={GROUPS * REPEATS}"]
    sizes += [f"train.total_dialog_turns={STEPS * GROUPS * REPEATS}", "train.micro_batch_tokens=512"]
    written = ["train.keep_checkpoints=2", "train.lineage=true", "evaluate.rows=2", "resume=auto"]
    return [*tiny_run(folder), *sizes, *written, *mode.overrides]


@contextlib.contextmanager
def working_in(work: Path, stays: bool = False) -> Iterator[None]:
    """Has runs started in the folder, which is removed in the end unless it stays."""
    # Rates measured beside kills are none for the user's runs; threads of Rust's would not survive a fork.
    os.environ |= {"GRPO_RL_CACHE": str(work / "cache"), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.chdir(work)
    try:
        yield
    finally:
        if not stays:
            shutil.rmtree(work, ignore_errors=True)


def warm(modes: list[Mode], work: Path) -> None:
    """Has a run of each mode in this process: its forks then have what a run imports, caches and computes once."""
    import gc

    import torch
    from tiny_runs import run_script

    torch.set_num_threads(1)
    if any(mode.script == "grpo_async.py" for mode in modes):
        _sample_in_this_process()
    for mode in modes:
        if mode.processes == 1:
            run_script(ROOT / "sota" / mode.script, overrides(mode, work), work / "warm" / mode.name)
    import outcome  # noqa: F401

    gc.collect()
    gc.freeze()  # the collections of a run then have little to look through


def undisturbed(mode: Mode, work: Path, *more: str) -> tuple[Path, Start]:
    """A run that no one disturbs, and its points."""
    whole = work / f"whole {mode.name}"
    done = start(mode, [*overrides(mode, work), *more], whole)
    if done.status:
        raise RuntimeError(f"the undisturbed run of {mode.name} failed: {done.said[-3000:]}")
    return whole, done


def start(mode: Mode, arguments: list[str], folder: Path, kill_at: int | None = None, rank: int = 0) -> Start:
    """Starts the mode's script in forks of this process and waits for its end; nothing that it started lives on.

    Args:
        kill_at: number of the point at which it dies.
        rank: the process that dies; the others are killed then, as torchrun does.
    """
    log, witness = (folder.with_suffix(suffix) for suffix in (".log", ".witness"))
    tallies = [folder.with_suffix(f".tally{number}") for number in range(mode.processes)]
    for file in (log, witness, *tallies):
        file.unlink(missing_ok=True)
    port = SystemRandom().randrange(10_000, 32_000)  # below those that the kernel hands out to others meanwhile
    begun, children = time.monotonic(), {}
    for number in range(mode.processes):
        if not (child := os.fork()):
            at = kill_at if number == rank else None
            files = log, tallies[number], witness
            _be_the_run(mode, [*arguments, f"hydra.run.dir={folder}"], files, folder, at, number, port)
        children[child] = number
    statuses: dict[int, int] = {}
    try:
        while len(statuses) < len(children):
            for child in children.keys() - statuses.keys():
                ended, code = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(code)
            hangs = time.monotonic() - begun > PATIENCE_S
            if hangs or any(statuses.values()):
                for child in children.keys() - statuses.keys():
                    _kill(child)
                    os.waitpid(child, 0)
                    statuses[child] = HUNG if hangs else 0
            time.sleep(0.002)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    # Beside a rank that was killed another one may have ended first, which says so with a code of its own.
    ends = [status for status in statuses.values() if status]
    status = -signal.SIGKILL if -signal.SIGKILL in ends else next(iter(ends), 0)
    died = points(witness)
    said = log.read_text(errors="replace") if log.exists() else ""
    return Start(status, time.monotonic() - begun, said, died[0] if died else None, [*map(points, tallies)])


def _kill(child: int) -> None:
    """Kills a fork that runs, and all it started; in its first moments it has no process group of its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _be_the_run(
    mode: Mode, arguments: list[str], files: tuple[Path, Path, Path], folder: Path, at: int | None, rank: int, port: int
) -> None:
    """Runs the script in a forked process, and ends the process."""
    log, tally, witness = files
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if mode.processes > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(mode.processes), "LOCAL_WORLD_SIZE": str(mode.processes)}
        if folder_of_library():  # vLLM preloads others
            arm(folder, at, tally if at is None else None, witness)
        sys.argv = [str(ROOT / "sota" / mode.script), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _sample_in_this_process() -> None:
    """Gives the async script engines of this process in the place of Ray's actors."""
    from loop_control import Reads
    from transformers import AutoConfig

    from grpo_rl.assembly import asynchronous, site
    from grpo_rl.cluster.fleet import Fleet, FleetEngine
    from grpo_rl.engines.base import Samples
    from grpo_rl.engines.loop_thread import LoopThread
    from grpo_rl.settings.devices import allocate
    from grpo_rl.weights.shared_memory import SharedMemoryTransport

    class Member(Reads):
        """An engine of a fleet, in this process: its responses are digits that follow from the prompt."""

        async def generate(self, request_id: str, prompt: list[int], n: int, sampling: object) -> Samples:
            """Responses after a moment that depends on the prompt, as groups end out of order in any run."""
            await asyncio.sleep(0.005 * (sum(prompt) % 7))
            ids = [[1 + (sum(prompt) + g * k) % 200 for k in range(1, 5 + g)] for g in range(n)]
            return Samples.from_lists(ids, [[-5.0] * len(row) for row in ids], [False] * n, self.version)

        async def close(self) -> None: ...

    async def launch(number: int) -> Member:
        return Member(f"engine {number}")

    def make_engine(*_: object) -> FleetEngine:
        loop = LoopThread()
        fleet = Fleet(launch, 1)
        loop.run(fleet.start())
        return FleetEngine(fleet, loop, SharedMemoryTransport)

    @contextlib.contextmanager
    def make_site(settings: object) -> Iterator[site.Site]:
        heads = AutoConfig.from_pretrained(settings.model.name).num_attention_heads
        yield site.Site(allocate(settings, "async", num_attention_heads=heads, cores=2), None, 0, 1)

    asynchronous.make_engine, site.make_site = make_engine, make_site
