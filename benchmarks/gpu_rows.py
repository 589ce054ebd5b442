"""The rows of `gpu.py`: each yields its figures one after the other, so that one cut short keeps those it has.

A figure is its name and a number, or its name and why there is none. Every row runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import harness
import torch

Figures = Iterator[tuple[str, float | str]]
ROOT = Path(__file__).resolve().parents[1]
SHARED_GPU = ("train_model.devices=[0]", "inference_model.devices=[0]")
LARGE_GPU_GIB = 100


class NotAvailable(Exception):
    """The row can't be measured here, and nothing is broken."""


@dataclass(frozen=True)
class Place:
    """Where and at which sizes the rows are measured.

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


def quickstart(place: Place) -> Figures:
    """The quickstart by its script, without evaluation."""
    rows = run_script("grpo.py", recipe(place), place.folder / "quickstart")
    yield from step_figures(rows)
    yield "sync, median", 1000 * median(row["time/sync_s"] for row in rows[2:])


def asynchronous(place: Place) -> Figures:
    """The quickstart with one GPU for trainer and engine, which work at the same time."""
    if find_spec("ray") is None:
        raise NotAvailable("Ray is not installed")
    sync = place.measured.get("quickstart", {}).get("steps/s after the second")
    extra = ["inference_model.engine=vllm"] if place.toy else []
    rows = run_script("grpo_async.py", [*recipe(place), *SHARED_GPU, *extra], place.folder / "async")
    figures = dict(step_figures(rows))
    yield from figures.items()
    ratio = figures["steps/s after the second"] / sync if sync else "the quickstart gave no rate to compare with"
    yield "steps/s over the quickstart's in turns", ratio
    yield "largest staleness", max(row.get("staleness/max", 0.0) for row in rows)


def recipe(place: Place) -> list[str]:
    """The overrides of the quickstart, or of a run of seconds."""
    if not place.toy:
        return ["+experiment=quickstart", "evaluate.rows=0"]
    from grpo_rl.testing import tiny_run

    (folder := place.folder / "tiny").mkdir(exist_ok=True)
    return tiny_run(folder)


def step_figures(rows: Sequence[Mapping[str, float]]) -> Figures:
    """What the steps of a run took, from its metrics; the first two compile.

    >>> rows = [{"time/sample_s": s, "time/other_s": 1.0} for s in (9.0, 4.0, 1.0, 1.0, 4.0)]
    >>> dict(step_figures(rows))  # 10, 5, 2, 2 and 5 s  # doctest: +NORMALIZE_WHITESPACE
    {'steps': 5, 'all steps': 24.0, 'longest step after the second over the median': 2.5,
     'steps/s after the second': 0.3333333333333333}
    """
    seconds = [sum(s for name, s in row.items() if name.startswith("time/")) for row in rows]
    if len(seconds) < 3:
        raise RuntimeError(f"the run logged {len(seconds)} steps; three are needed")
    later = seconds[2:]
    yield "steps", len(seconds)
    yield "all steps", sum(seconds)
    yield "longest step after the second over the median", max(later) / median(later)
    yield "steps/s after the second", len(later) / sum(later)


def run_script(script: str, overrides: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps of a run of a script of sota/.

    Raises:
        NotAvailable: the script refused the config.
        RuntimeError: the run failed; gives its last line.
    """
    from grpo_rl.monitor.metrics import read_metrics

    command = [sys.executable, str(ROOT / "sota" / script), *overrides, f"hydra.run.dir={folder}"]
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    print(log.read_text(), flush=True)
    if status:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "it said nothing")
        if last.startswith("error: "):
            raise NotAvailable(f"not available: {last.removeprefix('error: ')}")
        raise RuntimeError(f"{script} ended with exit code {status}: {last}")
    return [row for row in read_metrics(folder) if "time/train_s" in row]


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
        ratios: dict[str, list[float]] = {name: [] for name in names}
        memory: dict[str, float] = {}
        for entropy_counts in (False, True):
            arms = {name: script.timed(name, inputs, entropy_counts) for name in there}
            medians = {k: harness.summarize(v)["median"] for k, v in harness.rounds(arms, 5, warmup=2).items()}
            script.check_agreement(medians)
            ours = medians["grpo_rl"]
            if not entropy_counts:
                yield f"ours, {label}", 1000 * ours["fwd_bwd_s"]
                memory = {name: ours["memory_mib"] / max(m["memory_mib"], 1e-9) for name, m in medians.items()}
            for name in there:
                ratios[name].append(medians[name]["fwd_bwd_s"] / ours["fwd_bwd_s"])
        for name, said in (("trl_fused", "TRL's"), ("liger", "Liger's")):
            yield f"times faster than {said}, {label}", names[name] or min(ratios[name])
        yield f"share of TRL's memory, {label}", names["trl_fused"] or memory["trl_fused"]


def missing(package: str) -> str | None:
    """Says that a package is not installed; None where it is.

    >>> missing("torch"), missing("no_such_package")
    (None, 'no_such_package is not installed')
    """
    return None if find_spec(package) else f"{package} is not installed"


def liger_missing(place: Place) -> str | None:
    """Why Liger's kernels can't run here; None where they can. On a CPU its operators stand for them."""
    on_gpu = torch.device(place.device).type == "cuda"
    if on_gpu and torch.cuda.get_device_capability(place.device) != (9, 0):
        return "Liger's CuTe kernels need a Hopper GPU"
    return missing("liger_kernel") or (missing("cutlass") if on_gpu else None)


def whole_step(place: Place) -> Figures:
    """`step_vs_trl.py`'s arms in turns, on prompts of the quickstart."""
    import step_vs_trl as script

    from grpo_rl.envs.gsm8k import load_rows
    from grpo_rl.policies.hub import load_tokenizer

    folder = place.model("0.6B")
    tokenizer = load_tokenizer(folder)
    count, repeats, response = (2, 2, 8) if place.toy else (16, 8, 512)
    rows = load_rows("quickstart-train", "train")[:count]
    prompts = tuple([{"role": "user", "content": row["question"]}] for row in rows)
    template = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    lengths = tuple(len(template(prompt)) for prompt in prompts)
    # Both arms are on the GPU at once: engines of half their usual size leave room for the other's activations.
    work = script.Work(str(folder), prompts, lengths, repeats, response, engine_share=None if place.toy else 0.18)
    on_gpu = torch.device(place.device).type == "cuda"
    extra = ["inference_model.engine=transformers"] if place.toy else ["train.micro_batch_tokens=16384"]
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        arms = {"ours": stack.enter_context(contextlib.closing(harness.Arm("ours", script.our_arm, work, extra)))}
        yield "start of ours, caches as they are", time.perf_counter() - start
        steps = 1 if place.toy else 3
        alone = harness.rounds({"ours": arms["ours"].step}, steps, script.WARMUP_STEPS)["ours"]
        figures = harness.summarize(alone)["median"]
        for name in ("step_s", "sample_s", "train_s"):
            yield f"ours alone, {name}", figures[name]
        yield "ours alone, push", 1000 * figures["sync_s"]
        if reason := missing("trl"):
            yield "times faster than TRL", reason
            return
        large = not on_gpu or torch.cuda.get_device_properties(0).total_memory > LARGE_GPU_GIB * 2**30
        setting = script.TRLSetting("bf16", min(32 if large else 16, work.responses), "vllm" if on_gpu else "generate")
        trl = harness.Arm(setting.name, script.trl_arm, work, setting)
        arms["trl"] = stack.enter_context(contextlib.closing(trl))
        for _ in range(script.WARMUP_STEPS):
            trl.step()
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, steps, warmup=0)
    medians = {name: harness.summarize(reports)["median"]["step_s"] for name, reports in results.items()}
    yield "ours, a step", medians["ours"]
    yield f"{setting.name}, a step", medians["trl"]
    yield "times faster than TRL", medians["trl"] / medians["ours"]


def push(place: Place) -> Figures:
    """`push.py`'s push in one process, of a trainer on the engine's device."""
    import push as script

    from grpo_rl.policies.hub import DEFAULT_MODEL

    if find_spec("vllm") is None:
        raise NotAvailable("vLLM is not installed")
    for size in ("135M", "0.6B"):
        model = DEFAULT_MODEL if size == "135M" and not place.toy else str(place.model(size))
        work = script.Work(model, device=place.device, engine_share=0.2)
        with contextlib.closing(harness.Arm(f"push {size}", script.in_process_arm, work)) as arm:
            (reports,) = harness.rounds({f"push {size}": arm.step}, 5, warmup=2).values()
        yield f"push, {size}", 1000 * harness.summarize(reports)["median"]["step_s"]
        if place.toy:
            return  # both are the same toy
