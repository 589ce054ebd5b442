"""vLLM as an engine, in the training process: the production engine on GPU and on CPU. For vLLM 0.32."""

import gc
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count, groupby, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grpo_rl.engines.vllm.environment  # noqa: F401, what vLLM reads at import

# isort: split
from typing_extensions import override
from vllm import LLM, RequestOutput
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.platforms import current_platform

from grpo_rl.engines.base import ADAPTER_NAME, Engine, Samples, Sampling, check_request
from grpo_rl.engines.fingerprint import add
from grpo_rl.engines.vllm.common import VLLMBase
from grpo_rl.engines.vllm.lora import adapter_request
from grpo_rl.engines.vllm.sampling import samples_of, token_counts, with_routes


class VLLMEngine(VLLMBase, Engine):
    """One vLLM instance in this process; its arguments are those of :class:`VLLMBase`."""

    def __init__(self, model: str | Path, max_model_len: int, **settings: Any) -> None:
        super().__init__(model, max_model_len, **settings)
        self._asleep = False
        self._requests: dict[str, tuple[int, Sampling, str | None]] = {}
        self._keys = map(str, count()) if self._records_routes else repeat(None)
        before = torch.cuda.memory_allocated() if self._can_free else 0
        try:
            with threads_kept() if self._can_free else nullcontext():
                self._llm = LLM(**self._arguments, use_tqdm_on_load=False)
                if self._records_routes:
                    self._llm.collective_rpc("record_routes")
                if self._has_drafts:
                    self._llm.collective_rpc("meter_drafts")
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the half-built engine
            with suppress(Exception):
                release(self._can_sleep)
            raise
        self.held_gib = (torch.cuda.memory_allocated() - before) / 2**30 if self._can_free else 0.0
        """GPU memory that the engine holds in this process: weights, KV cache and graphs.

        PyTorch counts it also while the engine sleeps and has freed it."""
        # vLLM freezes the garbage collector's view of what exists, to spare an engine's own process work. Here that
        # takes in the trainer, whose cycles would never be freed: a sweep would keep every job's model.
        gc.unfreeze()

    @override
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        assert not self._asleep, "wake() the engine before it generates"
        check_request(prompts, n, sampling, self.max_model_len)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        keys = [next(self._keys) for _ in prompts]
        parameters = [self._parameters(n, sampling, key) for key in keys]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False, lora_request=self._adapter)
        return [self._samples(output, sampling, key) for output, key in zip(outputs, keys, strict=True)]

    def _samples(self, output: RequestOutput, sampling: Sampling, key: str | None) -> Samples:
        samples = samples_of(output, self.version, sampling, self._vocabulary)
        if key is None:
            return samples
        return with_routes(samples, self._llm.collective_rpc("take_routes", args=(key, token_counts(output)))[0])

    @override
    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        assert not self._asleep, "wake() the engine before it generates"
        check_request([prompt], 1, sampling, self.max_model_len)
        key = next(self._keys)
        parameters = self._parameters(1, sampling, key)
        self._requests[str(request)] = request, sampling, key
        self._llm.llm_engine.add_request(
            str(request), {"prompt_token_ids": list(prompt)}, parameters, lora_request=self._adapter
        )

    @override
    def step(self) -> list[tuple[int, Samples]]:
        outputs = self._llm.llm_engine.step() if self._requests else []
        finished = [(output, *self._requests.pop(output.request_id)) for output in outputs if output.finished]
        return [(request, self._samples(output, sampling, key)) for output, request, sampling, key in finished]

    @override
    def abort(self) -> None:
        if self._requests:
            self._llm.llm_engine.abort_request(list(self._requests))
            if keys := [key for *_, key in self._requests.values() if key is not None]:
                self._llm.collective_rpc("forget_routes", args=(keys,))
            self._requests.clear()

    @override
    def metrics(self) -> dict[str, float]:
        return self._llm.collective_rpc("draft_metrics")[0] if self._has_drafts else {}

    @override
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        factors: dict[str, Tensor] = {}
        own = without_factors(weights, factors)
        if first := next(own, None):
            own = chain([first], own)
            # Another process gets its weights a layer at a time, so that never more than one is held to be sent.
            for part in [own] if self._is_one_worker else by_layer(own):
                self._llm.collective_rpc("receive_weights", args=(part,))
        if factors:
            self._llm.collective_rpc("receive_adapter", args=(factors,))
            self._adapter = adapter_request(version)
        # What was cached under the old weights must not be read under the new ones.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache after a weight update: requests are still running")
        self.version = version

    @override
    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = True) -> dict[str, int]:
        plain = {name: list(shape) for name, shape in shapes.items()}
        arguments = (plain, str(self.dtype).removeprefix("torch."), self.proves_bytes and not read_back)
        shards = self._llm.collective_rpc("held_fingerprints", args=arguments)
        return {name: add(*(shard[name] for shard in shards)) for name in shapes}

    def sleep(self) -> None:
        """Moves weights to host memory and frees the KV cache, where ``can_sleep``; else only refuses work."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
        self._asleep = True

    @override
    def wake(self) -> None:
        if self._asleep and self._can_sleep:
            self._llm.wake_up()
        self._asleep = False

    @override
    def close(self) -> None:
        if self._llm is None:
            return
        core, self._llm = self._llm.llm_engine.engine_core, None  # pyrefly: ignore[bad-assignment]
        pools = allocator.allocator_and_pools if (allocator := sleep_allocator()) else {}
        held = dict(pools)
        try:
            core.shutdown()
        finally:
            # It drops the pools while weights lie in them, and those that are freed later count as held for ever.
            pools |= held
            held.clear()
            del core
            release(self._can_sleep)


def sleep_allocator() -> Any:
    """vLLM's allocator of the memory from which an engine of this process can sleep; None where none ever could."""
    if not torch.cuda.is_available():
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def release(slept: bool) -> None:
    """Frees what vLLM keeps for itself in a process in which an engine was closed, or did not start.

    It keeps a process group, notes on reloaded layers, which refer back to the layers, the pool of CUDA graphs, which
    may take no new ones once its own are gone (vLLM's pull request 46023), and the pools of an engine that could sleep:
    it refuses a second such engine while they hold anything. Those of another engine are left alone.
    """
    LAYERWISE_INFO.clear()
    type(current_platform)._global_graph_pool = None
    cleanup_dist_env_and_memory()
    gc.collect()
    if slept and (allocator := sleep_allocator()):
        allocator.release_pools()


@contextmanager
def threads_kept() -> Iterator[None]:
    """A context that leaves torch as many CPU threads as it had; vLLM's start on a GPU takes all but one.

    Compiled functions check the number, and would all be compiled again.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def without_factors(weights: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come, except for an adapter's factors, which are put into ``factors``."""
    for name, tensor in weights:
        if ADAPTER_NAME.fullmatch(name):
            factors[name] = tensor.detach()
        else:
            yield name, tensor.detach()


def by_layer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive weights of the same layer, as one list each.

    >>> names = ["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight", "norm.weight"]
    >>> [len(part) for part in by_layer([(name, torch.zeros(1)) for name in names])]
    [1, 2, 1, 1]
    """
    number = re.compile(r".*?\.\d+\.")
    for _, part in groupby(weights, key=lambda weight: (number.match(weight[0]) or [""])[0]):
        yield list(part)
