"""vLLM in a process of its own: it goes on sampling while the trainer trains, and through weight updates.

Every step of vLLM's core carries the version of the weights that it was computed with, and vLLM notes for each answer
where one version ends and the next begins. A version changes only while generation is paused, when the last step's
tokens have left the core: so no token is counted to the wrong side.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

# First: it sets what vLLM reads at import.
from grpo_rl.engines.vllm.engine import WeightReceiver, engine_settings, module_of, samples_of, sampling_parameters

# isort: split
from vllm import RequestOutput
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from grpo_rl.engines.base import (
    ADAPTER_NAME,
    AbortedError,
    EngineDeadError,
    Samples,
    Sampling,
    check_request,
    digest,
)
from grpo_rl.engines.fingerprint import add, same_or_none
from grpo_rl.engines.vllm.cpu import offer_norms, packed_from, packed_heads, parts_of
from grpo_rl.engines.vllm.lora import adapter_request, hold_adapter, without_adapter
from grpo_rl.engines.vllm.shared_transfer import BACKEND, register

# In every process that imports this, the workers' included, before they are built.
register()  # the entry point does it too, where the package is installed and VLLM_PLUGINS does not leave it out
if not torch.cuda.is_available():
    offer_norms()

T = TypeVar("T")
_CLOSE_S = 10.0
"""Seconds that vLLM's processes may take to end by themselves."""
_LOOK_S = 0.2
"""Seconds between looks at whether the process lives, while a call waits for it."""


class AsyncVLLMEngine:
    """One vLLM instance, its core in a process of its own; see :class:`grpo_rl.engines.base.AsyncEngine`.

    Building one takes until the process is ready, half a minute with a small model; it may be built in another thread
    than the one whose event loop then uses it.

    Args:
        model, max_model_len, seed, tensor_parallel_size, gpu_memory_utilization, enforce_eager, dtype, max_num_seqs,
            adapter_rank, adapter_targets: as of :class:`grpo_rl.engines.vllm.engine.VLLMEngine`.
        name: for messages.
        deadline_s: seconds that the process may take to answer a call. Some wait for the step under way: it has to be
            longer than the longest step.
        transfer: how weights come: ``shared_memory``, or vLLM's own ``nccl`` and ``ipc``, for GPUs.
        keep_cache: an answer that lives through an update keeps the keys and values of its past, made by older
            weights, instead of having them computed anew. Answers that are asked for once :meth:`pause` has returned
            never read what older weights have made; those that still waited for their turn then may.

    Raises:
        ValueError: as :class:`grpo_rl.engines.vllm.engine.VLLMEngine`.
    """

    def __init__(
        self,
        model: str | Path,
        max_model_len: int,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool = True,
        dtype: str = "bfloat16",
        max_num_seqs: int = 256,
        adapter_rank: int = 0,
        adapter_targets: Sequence[str] = (),
        name: str = "the engine",
        deadline_s: float = 60.0,
        transfer: str = "shared_memory",
        keep_cache: bool = False,
    ) -> None:
        self.name, self.deadline_s, self.version = name, deadline_s, 0
        self.max_model_len, self.dtype = max_model_len, getattr(torch, dtype)
        self.takes_adapters = adapter_rank > 0
        self._keep_cache, self._pauses = keep_cache, 0
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._adapter: LoRARequest | None = None
        self._can_free = torch.cuda.is_available()
        self.proves_bytes = tensor_parallel_size == 1 and not torch.cuda.is_available()
        settings = engine_settings(
            model,
            max_model_len,
            seed,
            tensor_parallel_size,
            gpu_memory_utilization,
            enforce_eager,
            self.dtype,
            max_num_seqs,
            adapter_rank,
            adapter_targets,
        )
        if tensor_parallel_size == 1:
            settings["distributed_executor_backend"] = NamelessExecutor
        arguments = AsyncEngineArgs(
            **settings,
            worker_extension_cls=f"{__name__}.{SharedMemoryReceiver.__name__}",
            weight_transfer_config=WeightTransferConfig(BACKEND if transfer == "shared_memory" else transfer),
        )
        self._llm: AsyncLLM | None = AsyncLLM.from_engine_args(arguments)
        manager = self._llm.engine_core.resources.engine_manager
        self.pids = [process.pid for process in getattr(manager, "processes", ())]
        """Of vLLM's processes."""

    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.generate`."""
        check_request([prompt], n, sampling, self.max_model_len)
        answer = asyncio.ensure_future(self._answer(request_id, prompt, n, sampling))
        try:
            # A long answer may take longer than the deadline; the process has to say in between that it is there.
            while not (await asyncio.wait({answer}, timeout=self.deadline_s))[0]:
                await self.check_health()
            output = answer.result()
        except CoreDeadError as error:
            raise self._dead(f"answering {request_id}") from error
        finally:
            answer.cancel()
        if any(part.finish_reason == "abort" for part in output.outputs):
            raise AbortedError(f"{request_id} was aborted on {self.name}")
        return _with_versions(output)

    async def _answer(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> RequestOutput:
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if self._keep_cache:
            # Not the version: what comes within a pause is computed by weights of a version that is yet to come.
            request["cache_salt"] = f"pause-{self._pauses}"
        parameters = sampling_parameters(n, sampling)
        outputs = self._core.generate(request, parameters, request_id, lora_request=self._adapter)
        return [output async for output in outputs][-1]

    async def abort(self, *request_ids: str) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.abort`."""
        await self._within("an abort", self._core.abort(request_ids))

    async def pause(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.pause`."""
        # Not `AsyncLLM.pause_generation`, which waits another 20 ms so that the last tokens are seen before it returns.
        call = self._core.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._keep_cache)
        await self._within("a pause", call)
        self._pauses += 1

    async def resume(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.resume`."""
        await self._within("going on", self._core.resume_generation())

    async def check_health(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.check_health`."""
        await self._within("a health check", self._core.is_paused())

    # What a trainer drives an update through: vLLM's names and arguments, so that vLLM's own trainers can.

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects the engine with the trainer, where a transfer needs that."""
        request = WeightTransferInitRequest(init_info=init_info)
        await self._within("connecting with the trainer", self._core.init_weight_transfer_engine(request))

    async def start_weight_update(self) -> None:
        """Begins an update; generation has to be paused."""
        self._turns = defaultdict(asyncio.Event)
        self._turns[0].set()
        await self._within("the begin of an update", self._core.start_weight_update())

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes in a part of the weights, from where the transfer has them; parts with a number in their order.

        Raises:
            EngineDeadError: also where the part before does not come.
        """
        turns, number = self._turns, update_info.get("number")
        if number is not None:  # over Ray, calls that are made one after the other may overtake each other
            await self._within(f"part {number} of an update, whose turn has not come", turns[number].wait())
        request = WeightTransferUpdateRequest(update_info=update_info)
        call = asyncio.ensure_future(self._core.update_weights(request))
        if number is not None:
            turns[number + 1].set()  # behind this one, which need not be over
        await self._within("a part of an update", call)

    async def finish_weight_update(self, weight_version: str) -> None:
        """Ends an update: what is sampled from now on carries the version."""
        await self._within("the end of an update", self._core.finish_weight_update())
        if self.takes_adapters:
            await self._within("taking an adapter", self._core.collective_rpc("hold_received_adapter"))
            self._adapter = adapter_request(int(weight_version))
        await self._within("taking a version", self._core.update_weight_version(weight_version))
        self.version = int(weight_version)

    async def abandon_weight_update(self) -> None:
        """Gives up an update, so that another can begin; the weights are old in part, and must not be sampled from."""
        await self._within("giving up an update", self._core.collective_rpc("abandon_weight_update"))

    async def weight_version(self) -> int:
        """Version of the weights, as the process says it."""
        return _number(await self._within("asking for its version", self._core.get_weight_version()))

    async def fingerprints(self, shapes: Mapping[str, Sequence[int]], read_back: bool = False) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.proves_bytes`.

        Args:
            read_back: fingerprints also where it would answer with digests, of which those of packed weights are noted
                when they are packed. What is read back is what products are made with, which takes far longer.
        """
        plain = {name: list(shape) for name, shape in shapes.items()}
        arguments = (plain, str(self.dtype).removeprefix("torch."), self.proves_bytes and not read_back)
        call = self._core.collective_rpc("held_fingerprints_of", args=arguments)
        shards = await self._within("fingerprints", call)
        return {name: add(*(shard[name] for shard in shards)) for name in shapes}

    async def sleep(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.sleep`; on CPU, where there is nothing to free, a pause."""
        await self._within("going to sleep", self._core.sleep(level=1 if self._can_free else 0, mode="keep"))

    async def wake(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.wake`."""
        await self._within("waking up", self._core.wake_up(None if self._can_free else ["scheduling"]))

    async def close(self) -> None:
        """See :meth:`grpo_rl.engines.base.AsyncEngine.close`."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # One that hangs is killed then, before whoever closes this gives up on it.
            await asyncio.to_thread(llm.shutdown, min(self.deadline_s, _CLOSE_S))

    @property
    def _core(self) -> AsyncLLM:
        if self._llm is None:
            raise self._dead("a call: it was closed")
        return self._llm

    async def _within(self, what: str, call: Awaitable[T]) -> T:
        """What the call returns.

        Raises:
            EngineDeadError: it did not return within the deadline, or the process died.
        """
        task = asyncio.ensure_future(call)
        clock = asyncio.get_running_loop().time
        end = clock() + self.deadline_s
        try:
            while not task.done() and clock() < end:
                # A process that dies leaves the calls that wait for it as they are.
                if self._llm is None or self._llm.errored:
                    raise self._dead(what)
                await asyncio.wait({task}, timeout=max(0.0, min(_LOOK_S, end - clock())))
            if not task.done():
                raise EngineDeadError(
                    f"{self.name} (process {self._pids}) did not answer {what} within {self.deadline_s:g} s"
                )
            return task.result()
        except CoreDeadError as error:
            raise self._dead(what) from error
        finally:
            task.cancel()

    @property
    def _pids(self) -> str:
        return ", ".join(map(str, self.pids))

    def _dead(self, what: str) -> EngineDeadError:
        return EngineDeadError(f"{self.name} (process {self._pids}) died; it was asked for {what}")


def _with_versions(output: RequestOutput) -> Samples:
    """The answers, each token with the version of its weights."""
    spans = [span for answer in output.outputs for span in answer.weight_versions or ()]
    versions = [_number(span.version) for span in spans]
    lengths = torch.tensor([span.end - span.start for span in spans], dtype=torch.long)
    samples = samples_of(output, max(versions))
    token_versions = torch.tensor(versions).repeat_interleave(lengths)
    assert len(token_versions) == len(samples.response_ids), "vLLM did not say which weights sampled each token"
    return replace(samples, token_versions=token_versions)


def _held_digest(model: torch.nn.Module, name: str, dtype: torch.dtype) -> int:
    """Digest of the weight that the model computes with, where one worker holds all of it; noted where it is packed."""
    path, _, kind = name.rpartition(".")
    module, index = module_of(model, path)
    module = without_adapter(module)
    packed, tensor = packed_from(module), getattr(module, kind)
    if packed and kind == "weight" and not isinstance(module, VocabParallelEmbedding):
        return packed[index]
    if not tensor.numel():
        raise LookupError(f"vLLM holds no {name} that can be read")
    held = digest(parts_of(module, tensor.to(dtype))[index])
    if isinstance(module, VocabParallelEmbedding):
        # What is looked up is one thing, what a head on CPU multiplies by another: both have to be what was sent.
        heads = [head for head in packed_heads(model) if head.weight.data_ptr() == module.weight.data_ptr()]
        return same_or_none(held, *(made[0] for head in heads if (made := packed_from(head))))
    return held


def _number(version: str) -> int:
    return 0 if version == "default" else int(version)


class NamelessExecutor(UniProcExecutor):
    """vLLM's executor of one worker, in a process that leaves nothing in /dev/shm, however it ends.

    Named semaphores would stay there when the engine is killed together with vLLM's resource tracker.
    """

    def _init_executor(self) -> None:
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("fork", force=True)  # whose semaphores have no names; nothing is started by it
        try:
            super()._init_executor()
        finally:
            multiprocessing.set_start_method(before, force=True)


class SharedMemoryReceiver(WeightReceiver):
    """What workers learn beside taking weights: to speak with plain numbers, which travel between processes."""

    weight_transfer_engine: Any  # the worker's
    _weight_update_active: bool

    def held_fingerprints_of(self, shapes: dict[str, list[int]], dtype: str, as_bytes: bool) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.vllm.engine.WeightReceiver.held_fingerprints`.

        Args:
            as_bytes: digests of bytes in the place of fingerprints, but for adapters.
        """
        by_bytes = {name for name in shapes if as_bytes and not ADAPTER_NAME.fullmatch(name)}
        rest = {name: torch.Size(shape) for name, shape in shapes.items() if name not in by_bytes}
        model = self.model_runner.get_model()
        held = self.held_fingerprints(rest, getattr(torch, dtype)) if rest else {}
        return held | {name: _held_digest(model, name, getattr(torch, dtype)) for name in by_bytes}

    def hold_received_adapter(self) -> None:
        """Puts an adapter that came with the last update in the place of the one before."""
        if adapter := self.weight_transfer_engine.adapter:
            hold_adapter(self.model_runner, adapter)
            self.weight_transfer_engine.adapter = {}

    def abandon_weight_update(self) -> None:
        """Ready for another update."""
        self._weight_update_active = False
        if hasattr(self.weight_transfer_engine, "abandon"):  # vLLM's own transfers have nothing to give up
            self.weight_transfer_engine.abandon()
