r"""Roofline of a step: what it would take at this machine's measured best, the floor behind ``limit_fraction``.

A floor counts the matrix products of a step, those of causal attention included, and the weights that have to come from
memory. It leaves out what should be small in comparison (element-wise work, the optimizer, rewards), and counts every
response token in full, though a response's last one need not be fed back: with responses of a few dozen tokens,
the fraction is below 1 even where nothing is wasted. Of a mixture's experts those count that a token visits; decoding
reads at least as many. What adapters add to products and reads is left out, being small next to the weights
that they adapt. Source of the counts: PaLM, appendix B, https://arxiv.org/abs/2204.02311, but with the keys that a
token sees rather than all.

The machine's rates are measured once, and remembered in the cache folder.

Letters: N parameters of the trunk, H hidden size, V vocabulary, A query heads times their size; P prompt tokens of a
group, R its response tokens, of all responses together; K keys that tokens see, summed over tokens and layers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from grpo_rl.data.batching import groups_to_score, prefix_tree
from grpo_rl.data.group import Group
from grpo_rl.policies.supported import ATTENDING
from grpo_rl.storage.cache import cache_folder
from grpo_rl.storage.whole_file import replacing

PROBE_BYTES = 2**29
"""Size of the memory that is read: more than the caches of all but the largest servers hold."""


@dataclass(frozen=True)
class Rates:
    """The rates of a machine at its best: floating-point operations in a large matrix product, and bytes read."""

    gemm_flops_per_s: float
    bytes_per_s: float

    def best(self, other: Rates) -> Rates:
        """The higher of each: what slows a measurement down is never the machine's doing."""
        return Rates(*map(max, astuple(self), astuple(other)))


def machine_rates(dtype: torch.dtype, device: torch.device | str = "cpu", again: bool = False) -> Rates:
    """The rates of this machine, measured the first time and kept; ``again``: anew, and the higher of both is kept."""
    path, name = cache_folder() / "rates.json", _machine(dtype, torch.device(device))
    known = _read(path).get(name)
    if known and not again:
        return known
    rates = measure_rates(dtype, device)
    rates = rates.best(known) if known else rates
    kept = {name: asdict(r) for name, r in (_read(path) | {name: rates}).items()}
    with contextlib.suppress(OSError):  # a cache that can't be written costs a second at each start, and no run
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, path.with_suffix(f".{os.getpid()}.partial")) as partial:
            partial.write_text(json.dumps(kept, indent=2) + "\n")
    return rates


def measure_rates(dtype: torch.dtype, device: torch.device | str = "cpu", seconds: float = 1.0) -> Rates:
    """The rates of this machine: the best of all calls within about so many seconds; other load only slows them."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    sizes = (4096, 8192) if device.type == "cuda" else (512, 1024, 2048)
    part_s = seconds / (2 + len(sizes))  # the rest goes into buffers and warming up
    flops_per_s = []
    for size in sizes:  # where the best lies depends on caches and cores
        # Random numbers: a GPU draws less power, and is faster, on constants.
        factor = torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)
        took_s = _best_s(functools.partial(torch.mm, factor, factor), device, part_s)
        flops_per_s.append(2 * size**3 / took_s)
        if 8 * took_s > seconds:  # the next product; of bfloat16 in plain loops it would take a minute
            break
    memory = torch.ones(PROBE_BYTES // 4, device=device)
    bytes_per_s = memory.nbytes / _best_s(memory.sum, device, part_s)
    del factor, memory
    if device.type == "cuda":
        torch.cuda.empty_cache()  # an engine that is built next counts what is free
    return Rates(max(flops_per_s), bytes_per_s)


def _best_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    # On a GPU calls are queued: several in a row hide what starting and awaiting one costs.
    calls = 10 if device.type == "cuda" else 1

    def took_s() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    took_s()  # warm-up: kernels are chosen, memory is touched
    end = time.perf_counter() + seconds
    best = took_s()
    while time.perf_counter() < end:
        best = min(best, took_s())
    return best


def _machine(dtype: torch.dtype, device: torch.device) -> str:
    unit = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return f"{unit}, {torch.get_num_threads()} threads, {dtype}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path) -> dict[str, Rates]:
    try:
        return {name: Rates(**rates) for name, rates in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none yet, or none that can be used: they are measured again


EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""The names under which configs say how many experts a token visits."""
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The names of windows in configs, by type of layer; a chunk is counted as a window of its size."""


def experts_of_a_token(config: PreTrainedConfig) -> int | None:
    """The number of experts that a token visits, by its config; None: not given there, or no experts."""
    return next((n for name in EXPERTS_OF_A_TOKEN if (n := getattr(config, name, None))), None)


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model that a floor depends on.

    Args:
        trunk: N, parameters that a token is multiplied by, but for those of the embedding and the head.
        attention: A, query heads times their size.
        decode_bytes: weights that each decoding step reads: trunk and head, not the embedding's table.
        pushed_bytes: size of a push: all weights, tied ones once, or adapters alone.
        windows: positions back that a token sees in each layer that attends, its own included; None: all.
        trained: share of the weights that have a gradient: a frozen one's is not computed.
    """

    trunk: int
    hidden: int
    vocab: int
    attention: int
    decode_bytes: int
    pushed_bytes: int
    windows: tuple[int | None, ...]
    trained: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, pushes_adapters: bool = False) -> ModelSizes:
        """The sizes of a transformers model, in the dtype it has now.

        Args:
            pushes_adapters: they alone travel, after a base that went with the first push; else they are merged.
        """
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # pyrefly: ignore[missing-attribute]
        base = [p for name, p in model.named_parameters() if ".lora_" not in name]
        adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
        trunk = [p for p in base if p is not embedding and p is not head]
        vocab, hidden = head.shape
        config = model.config.get_text_config()
        chosen = experts_of_a_token(config)
        active = sum(_active(p, chosen) for p in trunk)
        heads = getattr(config, "num_attention_heads", None) or 1
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        window = {kind: getattr(config, name, None) for kind, name in WINDOWS.items()}
        layers = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        return cls(
            trunk=active,
            hidden=hidden,
            vocab=vocab,
            attention=heads * head_dim,
            decode_bytes=(active + _numel(head)) * model.dtype.itemsize,
            pushed_bytes=sum(map(_numel, adapters if pushes_adapters else base)) * model.dtype.itemsize,
            windows=tuple(window.get(kind) for kind in layers if kind in ATTENDING),
            trained=sum(_numel(p) for p in [*trunk, head] if p.requires_grad) / sum(map(_numel, [*trunk, head])),
        )

    def keys_seen(self, start: int, end: int) -> int:
        """The keys that the tokens of a sequence see from position ``start`` up to ``end``, in all layers.

        >>> sizes = ModelSizes(1, 1, 1, attention=1, decode_bytes=1, pushed_bytes=1, windows=(None, 2))
        >>> sizes.keys_seen(0, 3), sizes.keys_seen(2, 3)  # 1 + 2 + 3 and 1 + 2 + 2; 3 and 2
        (11, 5)
        """

        def up_to(position: int, window: int | None) -> int:
            growing = position if window is None else min(position, window)
            return growing * (growing + 1) // 2 + (position - growing) * growing

        return sum(n * (up_to(end, w) - up_to(start, w)) for w, n in Counter(self.windows).items())

    def forward_flops(self, start: int, end: int, predicted: int = 0) -> int:
        """Operations on the tokens of a sequence from position ``start`` up to ``end``, so many of them with the head.

        They are $2N + 2HV$ a token, without the head $2N$, and $4AK$.
        """
        trunk = 2 * self.trunk * (end - start) + 4 * self.attention * self.keys_seen(start, end)
        return trunk + 2 * self.hidden * self.vocab * predicted


def floors_s(
    groups: Sequence[Group],
    sizes: ModelSizes,
    rates: Rates,
    epochs: int = 1,
    skip_zero_advantage: bool = False,
    mask_truncated: bool = False,
    inference_devices: int = 1,
) -> dict[str, float]:
    r"""The least seconds of each phase of the step that samples these groups and trains on them.

    - ``sample``: $2NP + 4AK$ for the prompts, what they begin with in common computed once, then $2(N + HV)R + 4AK$ for
      the responses or, where that takes longer, reading the weights once for every token of the longest response;
    - ``score``: $2N(P + R) + 2HVR + 4AK$ where a reference has scored them, what sequences begin with in common
      computed once, else 0;
    - ``train``: three times as much in each epoch, twice where weights are frozen;
    - ``sync``: what is pushed read once and written once.

    Args:
        skip_zero_advantage: zero-variance groups are not trained on.
        mask_truncated: responses that met the length limit are not trained on; a group of such alone is not computed.
        inference_devices: devices that sample side by side, each as fast as ``rates``.

    4 prompt and 3 + 2 response tokens, attention left aside. Sampling: 2·100·4 = 800 operations for the prompt;
    2·140·5 = 1400 for the responses take 1.4 s, less than the 12 s of reading 280 bytes 3 times. Training:
    6·100·9 + 6·40·5 = 6600 operations.

    >>> from grpo_rl.testing import random_group
    >>> sizes = ModelSizes(100, hidden=4, vocab=10, attention=0, decode_bytes=280, pushed_bytes=280, windows=())
    >>> floors_s([random_group(prompt=4, lengths=[3, 2])], sizes, Rates(gemm_flops_per_s=1000, bytes_per_s=70))
    {'sample': 12.8, 'score': 0.0, 'train': 6.6, 'sync': 8.0}
    """

    def forward(passed: Sequence[Group]) -> int:
        sequences = [np.concatenate([group.prompt_ids, ids]) for group in passed for ids in group.responses]
        lengths = [len(group.prompt_ids) for group in passed for _ in range(group.size)]
        total = 0
        for branch in (b for b in prefix_tree(sequences) if b.stop):
            predicted = max(0, branch.stop - max(branch.start, min(lengths[member] for member in branch.members)))
            total += sizes.forward_flops(branch.start, branch.stop, predicted)
        return total

    branches = prefix_tree([group.prompt_ids.numpy() for group in groups])
    prefill = sum(sizes.forward_flops(branch.start, branch.stop) for branch in branches)
    ends = ((p, n) for group in groups for p in [len(group.prompt_ids)] for n in group.lengths.tolist())
    decode = sum(sizes.forward_flops(start, start + length, length) for start, length in ends)
    longest = max((int(group.chosen_lengths.max()) for group in groups), default=0)
    read_s = longest * sizes.decode_bytes / rates.bytes_per_s
    scored = [group for group in groups if group.ref_log_probs is not None]
    with_old = [group for group in groups if group.old_log_probs is not None]
    trained = groups_to_score(groups, skip_zero_advantage, mask_truncated)
    flops_per_s = rates.gemm_flops_per_s
    return {
        "sample": (prefill / flops_per_s + max(decode / flops_per_s, read_s)) / inference_devices,
        "score": (forward(scored) + forward(with_old)) / flops_per_s,
        # The backward multiplies twice for each product of the forward: for the input's gradient and the weight's.
        "train": (2 + sizes.trained) * epochs * forward(trained) / flops_per_s,
        "sync": 2 * sizes.pushed_bytes / rates.bytes_per_s,
    }


def _active(parameter: Tensor, chosen: int | None) -> int:
    """Numbers of a parameter that multiply one token: of stacked experts [E, outputs, inputs] the chosen ones."""
    stacked = chosen is not None and parameter.ndim == 3 and parameter.shape[1] > 1 and len(parameter) > chosen
    return _numel(parameter) * chosen // len(parameter) if stacked else _numel(parameter)


def _numel(parameter: Tensor) -> int:
    """The count of numbers that a parameter stands for: those of 4 bits lie two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state else parameter.numel()


def roofline_metrics(floors: Mapping[str, float], phases_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """``limit_fraction``, the step's floor over the time it took, and the same of each phase that had work to do.

    >>> roofline_metrics({"sample": 1.0, "score": 0.0, "train": 3.0}, {"sample": 2.0, "score": 0.1, "train": 4.0}, 8.0)
    {'limit_fraction': 0.5, 'limit_fraction/sample': 0.5, 'limit_fraction/train': 0.75}
    """
    return {"limit_fraction": sum(floors.values()) / step_s} | {
        f"limit_fraction/{phase}": floor / phases_s[phase]
        for phase, floor in floors.items()
        if floor > 0 and phases_s.get(phase, 0.0) > 0
    }


class StepRoofline:
    """The roofline metrics of a run's steps on this machine.

    Measures the machine's rates where they are not known yet. A step that is faster than its floor shows that they were
    measured on a busy machine: they are then measured once more, and the higher are kept.

    Args:
        model: the one that is trained; the engine samples with the same weights in the same dtype.
        work: what a step does: ``epochs`` and the other arguments of :func:`floors_s`, in its order.
        pushes_adapters: adapters alone travel, see :meth:`ModelSizes.of`.
        rates: the rates to go by, whatever a step shows; a benchmark measures its own.
    """

    def __init__(
        self, model: PreTrainedModel, *work: int, pushes_adapters: bool = False, rates: Rates | None = None
    ) -> None:
        self.sizes, self._work = ModelSizes.of(model, pushes_adapters), work
        self._dtype, self._device = model.dtype, model.device
        self.rates = rates or machine_rates(self._dtype, self._device)
        self._measured_again = rates is not None

    def metrics(self, groups: Sequence[Group], phases_s: Mapping[str, float], step_s: float) -> dict[str, float]:
        """:func:`roofline_metrics` of a step that sampled these groups and trained on them."""
        metrics = roofline_metrics(floors_s(groups, self.sizes, self.rates, *self._work), phases_s, step_s)
        # Once a run: a model that fits into the caches can be faster than memory, however often that is measured.
        if max(metrics.values()) > 1 and not self._measured_again:
            self._measured_again = True
            # The engine may hold all memory that there is: a metric is no reason to end a run.
            with contextlib.suppress(torch.OutOfMemoryError):
                self.rates = machine_rates(self._dtype, self._device, again=True)
                metrics = roofline_metrics(floors_s(groups, self.sizes, self.rates, *self._work), phases_s, step_s)
        return metrics
