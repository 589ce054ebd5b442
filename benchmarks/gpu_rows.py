"""The rows of `gpu.py`: each yields its figures one after the other, so that one cut short keeps those it has.

A figure is its name and a number, or its name and why there is none. Every row runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from grpo_rl.settings.sections import Train

Figures = Iterator[tuple[str, float | str]]
ROOT = Path(__file__).resolve().parents[1]
SHARED_GPU = ("train_model.devices=[0]", "inference_model.devices=[0]")
LARGE_GPU_GIB = 100
MAX_STALENESS = Train().max_staleness
"""The config's default, which the runs keep."""
WARM_STEPS = MAX_STALENESS + 2
"""Steps of a run that its rate leaves out: two compile, and in an asynchronous one so many more fill the queue."""
STEPS, TOY_STEPS = 48, 12
"""Steps of a run, of 128 responses each, and of a toy's, of 16."""
POLL_S = 0.02
ENDED = re.compile(r"(?P<test>tests/.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b")
SUMMARY = re.compile(r"(FAILED|ERROR) (?P<test>tests/.+?) - (?P<why>.*)")
"""Pytest's line at the end of a test, and its line in the summary."""


class NotAvailable(Exception):
    """The row can't be measured here, and nothing is broken."""


@dataclass(frozen=True)
class Place:
    """The device on which, and the sizes at which, the rows are measured.

    Args:
        toy: sizes that a CPU computes in seconds.
        folder: for models and runs; rows share it.
        measured: figures of the rows before, by row and figure.
    """

    toy: bool
    device: str
    folder: Path
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def model(self, shape: str) -> Path:
        """The folder of a model of this shape, or of the toy."""
        from shapes import model_folder

        return model_folder("toy" if self.toy else shape, self.folder / "models", self.device)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


def tests(place: Place) -> Figures:
    """The tests marked `gpu`: how many passed, failed and were skipped, and what failed, as they end."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-vv", "--color=no", "-m", "gpu", *files]
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if ended := ENDED.match(line):
                what = ended["outcome"].lower().replace("error", "failed")
                counts[what] += 1
                yield what, counts[what]
                if what == "failed":
                    yield f"failed: {ended['test']}", ""
            elif told := SUMMARY.match(line):
                yield f"failed: {told['test']}", told["why"]
    if process.returncode:
        raise RuntimeError(f"{counts['failed']} tests failed; pytest ended with exit code {process.returncode}")
    yield "failed", 0


def quickstart(place: Place) -> Figures:
    """The quickstart by its script, without evaluation."""
    rows = run_script("grpo.py", recipe(place), place.folder / "quickstart")
    yield from step_figures(rows)
    yield "median sync_ms", 1000 * median(row["time/sync_s"] for row in rows[2:])


def asynchronous(place: Place) -> Figures:
    """The quickstart with one GPU for trainer and engine, which work at the same time."""
    if reason := missing("ray"):
        raise NotAvailable(reason)
    sync = place.measured.get("quickstart", {}).get("steps/s")
    # Without a GPU the devices are the machine's processor.
    extra = [*SHARED_GPU * place.on_gpu, *["inference_model.engine=vllm"] * place.toy]
    rows = run_script("grpo_async.py", [*recipe(place), *extra], place.folder / "async")
    figures = dict(step_figures(rows))
    yield from figures.items()
    yield "steps/s, async over sync", figures["steps/s"] / sync if sync else "the quickstart gave no rate"
    yield "largest staleness, versions", max(row["staleness/max"] for row in rows)


def recipe(place: Place) -> list[str]:
    """The overrides of the quickstart, or of a run of seconds."""
    if not place.toy:
        return ["+experiment=quickstart", "evaluate.rows=0", f"train.total_dialog_turns={STEPS * 128}"]
    sys.path.append(str(ROOT / "tests"))
    from tiny_runs import tiny_run

    (folder := place.folder / "tiny").mkdir(exist_ok=True)
    return [*tiny_run(folder), f"train.total_dialog_turns={TOY_STEPS * 16}", "train.checkpoint_frequency=0"]


def step_figures(rows: Sequence[Mapping[str, float]]) -> Figures:
    """The times of a run's steps, by the wall clock, and by each step's own parts.

    The rate leaves out the first steps, in which code is compiled and an asynchronous run's first groups are sampled,
    and the last ones, in which it samples nothing more. Steps of 9 s twice, 4 s, and then 2 s each, with a second
    between any two of them:

    >>> steps = itertools.accumulate([9.0, 9.0, 4.0, *[2.0] * 6], lambda end, step_s: end + 1 + step_s)
    >>> rows = [{"time/train_s": 2.0, "ended_s": end} for end in steps]
    >>> rows[0] |= {"time/train_s": 9.0}
    >>> dict(step_figures(rows))  # doctest: +NORMALIZE_WHITESPACE
    {'steps': 9, 'first 15 steps_s': 42.0, 'longest step after the second over the median': 1.0,
     'steps/s': 0.3333333333333333}

    Args:
        rows: from :func:`run_script`.

    Raises:
        RuntimeError: there are too few.
    """
    kept = rows[WARM_STEPS - 1 : len(rows) - MAX_STALENESS]  # from the end of the last step before the window
    if len(kept) < 3:
        raise RuntimeError(f"the run logged {len(rows)} steps; {WARM_STEPS + MAX_STALENESS + 2} are needed")
    seconds = [sum(s for name, s in row.items() if name.startswith("time/")) for row in rows]
    yield "steps", len(rows)
    yield "first 15 steps_s", rows[:15][-1]["ended_s"] - (rows[0]["ended_s"] - seconds[0])
    yield "longest step after the second over the median", max(seconds[2:]) / median(seconds[2:])
    yield "steps/s", (len(kept) - 1) / (kept[-1]["ended_s"] - kept[0]["ended_s"])


def run_script(script: str, overrides: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps of a run of a script of sota/, in a process of its own; what it prints goes on at once.

    Each step has ``ended_s`` too: when its metrics were written, in seconds of a clock.

    Raises:
        NotAvailable: the script refused the config.
        RuntimeError: the run failed; gives its last line.
    """
    command = [sys.executable, str(ROOT / "sota" / script), *overrides, f"hydra.run.dir={folder}"]
    ended: list[float] = []
    path = folder.with_suffix(".log")
    # A file, and no pipe: what the script leaves running would keep a pipe open.
    with path.open("wb") as log, path.open("rb") as output:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT) as process:
            is_over = False
            while not is_over:
                is_over = process.poll() is not None  # before the last look
                ended += [time.perf_counter()] * (len(steps_of(folder)) - len(ended))
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
                time.sleep(0 if is_over else POLL_S)
    if process.returncode:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        if last.startswith("error: "):
            raise NotAvailable(f"not available: {last.removeprefix('error: ')}")
        raise RuntimeError(f"{script} ended with exit code {process.returncode}: {last}")
    return [row | {"ended_s": end} for row, end in zip(steps_of(folder), ended, strict=True)]


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of the run's steps so far."""
    from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics

    there = (folder / METRICS_FILE).exists()
    return [row for row in read_metrics(folder) if "time/train_s" in row] if there else []


def prefix(place: Place) -> Figures:
    """`prefix.py`'s measure, in micro-batches that are full."""
    import prefix as script

    from grpo_rl.policies.policy import TrainPolicy

    policy = TrainPolicy.load(place.model("0.6B"), torch.bfloat16, place.device, compile=None)
    tokens = 128 if place.toy else 16_384
    shapes = [(32, 8, 4)] if place.toy else [(512, 128, 8), (1024, 128, 16)]
    run = functools.partial(script.step, policy, max_tokens=tokens)
    for shape in itertools.starmap(script.Shape, shapes):
        # Two warm-up rounds more: the first full micro-batch compiles.
        for groups in (shape.shared, shape.repeated):
            run(groups(policy.model.config.vocab_size, shape.filling(tokens)))
        (row,) = script.speedups(run, [shape], policy.model.config.vocab_size, steps=5, fill=tokens)
        yield f"speed-up, {shape}", row["speed-up"]
        yield f"speed-up over the token ratio, {shape}", row["of the token ratio"]


def head(place: Place) -> Figures:
    """`head.py`'s measure against TRL's fused head and Liger's, with and without a gradient of the entropy."""
    import head as script

    sizes = [(32, 16, 64)] * 3 if place.toy else [(8192, 4096, 131072), (8192, 1024, 151936), (8192, 2048, 151936)]
    names = {"grpo_rl": None, "trl_fused": missing("trl"), "liger": liger_missing(place)}
    for label, numbers in zip(("H=4096", "H=1024", "H=2048"), sizes, strict=True):
        shape = script.Shape(*numbers, memory_bar=1.0)
        inputs = script.make_inputs(shape, place.device)
        there = [name for name, reason in names.items() if not reason]
        speedups: dict[str, list[float]] = {name: [] for name in there}
        for entropy_counts in (False, True):
            arms = {name: script.timed(name, inputs, entropy_counts) for name in there}
            medians = {k: harness.summarize(v)["median"] for k, v in harness.rounds(arms, 5, warmup=2).items()}
            script.check_agreement(medians)
            compared = script.ratios(medians)
            if not entropy_counts:
                yield f"ours, fwd_bwd_ms, {label}", 1000 * medians["grpo_rl"]["fwd_bwd_s"]
                share = names["trl_fused"] or compared["trl_fused"]["our share of its memory"]
                yield f"share of TRL's memory, {label}", share
            for name in there:
                speedups[name].append(compared[name]["our speed-up"])
        for name, peer in (("trl_fused", "TRL's"), ("liger", "Liger's")):
            yield f"times faster than {peer}, {label}", names[name] or min(speedups[name])


def missing(package: str) -> str | None:
    """Says that a package is not installed; None where it is.

    >>> missing("torch"), missing("no_such_package")
    (None, 'no_such_package is not installed')
    """
    return None if find_spec(package) else f"{package} is not installed"


def liger_missing(place: Place) -> str | None:
    """Says why Liger's kernels can't run here; None where they can. On a CPU its operators stand for them."""
    if place.on_gpu and torch.cuda.get_device_capability(place.device) != (9, 0):
        return "Liger's CuTe kernels need a Hopper GPU"
    return missing("liger_kernel") or (missing("cutlass") if place.on_gpu else None)


def whole_step(place: Place) -> Figures:
    """`step_vs_trl.py`'s own arm on the quickstart's questions."""
    script, work = step_work(place)
    extra = ["inference_model.engine=transformers"] if place.toy else ["train.micro_batch_tokens=16384"]
    start = time.perf_counter()
    with contextlib.closing(harness.Arm("ours", script.our_arm, work, extra)) as ours:
        yield "start_s, caches as they are", time.perf_counter() - start
        alone = {"ours": functools.partial(ours.step, alone=True)}
        figures = harness.summarize(harness.rounds(alone, step_rounds(place), script.WARMUP_STEPS)["ours"])["median"]
        for name in ("step_s", "sample_s", "train_s"):
            yield name, figures[name]
        yield "push_ms", 1000 * figures["sync_s"]


def step_work(place: Place) -> tuple[Any, Any]:
    """`step_vs_trl.py`, and the step that both arms make."""
    import step_vs_trl as script

    count, repeats, response = (2, 2, 8) if place.toy else (16, 8, 512)
    # Of 80 GiB 0.18 hold the weights (1.2 GiB) and the cache of all 128 responses (about 10 GiB at 112 KiB a token):
    # no response waits for room in either engine, and both trainers have what is left.
    share = None if place.toy else 0.18
    model = str(place.model("0.6B"))
    return script, script.make_work(model, "quickstart-train", count, repeats, response, engine_share=share)


def step_rounds(place: Place) -> int:
    """The rounds of which the median counts."""
    return 1 if place.toy else 3


def trl_step(place: Place) -> Figures:
    """`step_vs_trl.py`'s arm of TRL, the same step, next to our step's time."""
    if reason := missing("trl"):
        raise NotAvailable(reason)
    script, work = step_work(place)
    ours_s = place.measured.get("whole step", {}).get("step_s")
    failed: dict[str, str] = {}
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        found = script.first_that_runs(stack, work, trl_settings(place, work.responses), failed)
        yield from ((f"{name}, step_s", reason) for name, reason in failed.items())
        if found is None:
            yield "times slower than ours", "TRL ran at none of its settings"
            return
        trl, setting = found
        yield "start and warm-up_s, caches as they are", time.perf_counter() - start
        seconds: list[float] = []
        for number in range(1, step_rounds(place) + 1):  # a row that is cut short keeps the rounds that it has
            (report,) = harness.rounds({"trl": functools.partial(trl.step, alone=True)}, 1, warmup=0)["trl"]
            seconds.append(report["step_s"])
            yield "rounds", number
            yield f"{setting.name}, step_s", median(seconds)
            yield "times slower than ours", median(seconds) / ours_s if ours_s else "our whole step gave no time"


def trl_settings(place: Place, responses: int) -> list:
    """TRL's settings for the whole step, the fastest first: with vLLM, and with Liger's kernels where they can run."""
    from step_vs_trl import TRLSetting

    large = not place.on_gpu or torch.cuda.get_device_properties(0).total_memory > LARGE_GPU_GIB * 2**30
    # Twice as many responses a forward may not fit into 80 GiB, and a setting that fails takes the row's time.
    batch = min(32 if large else 16, responses)
    plain = TRLSetting(harness.dtype_name(), batch, "vllm" if place.on_gpu else "generate")
    has_liger = place.on_gpu and not missing("liger_kernel")
    return [*[replace(plain, liger=True)] * has_liger, plain]


def push(place: Place) -> Figures:
    """`push.py`'s push in one process, of a trainer of 135M parameters on the engine's device."""
    import push as script

    from grpo_rl.policies.hub import DEFAULT_MODEL

    if reason := missing("vllm"):
        raise NotAvailable(reason)
    model = str(place.model("toy")) if place.toy else DEFAULT_MODEL
    work = script.Work(model, device=place.device, engine_share=0.2)
    with contextlib.closing(harness.Arm("push", script.in_process_arm, work)) as arm:
        step = functools.partial(arm.step, alone=True)
        (reports,) = harness.rounds({"push": step}, 5, warmup=2).values()
        yield "135M, push_ms", 1000 * harness.summarize(reports)["median"]["step_s"]
