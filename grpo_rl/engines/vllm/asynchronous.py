"""vLLM in a process of its own: it goes on sampling while the trainer trains, and through weight updates.

Every step of vLLM's core carries the version of the weights that it was computed with, and vLLM records for each
response where one version ends and the next begins. A version changes only while generation is paused, when the last
step's tokens have left the core, so no token is counted to the wrong side.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpo_rl.engines.vllm.environment  # noqa: F401, what vLLM reads at import

# isort: split
from typing_extensions import override
from vllm import RequestOutput
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

from grpo_rl.engines.base import EngineDeadError, Samples, Sampling, check_request
from grpo_rl.engines.fingerprint import add
from grpo_rl.engines.loop_thread import AsyncEngine
from grpo_rl.engines.vllm.common import NamelessExecutor, VLLMBase
from grpo_rl.engines.vllm.lora import adapter_request
from grpo_rl.engines.vllm.sampling import samples_with_versions, token_counts, version_number, with_routes
from grpo_rl.engines.vllm.shared_transfer import BACKEND

T = TypeVar("T")
_CLOSE_S = 10.0
"""Time in which vLLM's processes may end by themselves; after it they are killed."""
_POLL_S = 0.2
"""Interval at which a waiting call checks that the process lives."""


class AsyncVLLMEngine(VLLMBase, AsyncEngine):
    """One vLLM instance, its core in a process of its own; see :class:`grpo_rl.engines.loop_thread.AsyncEngine`.

    Building one takes until the process is ready, half a minute with a small model; it may be built in another thread
    than the one whose event loop then uses it.

    Args:
        deadline_s: seconds in which the process has to answer a call; longer than the longest step of sampling, as some
            calls wait for the one under way.
        transfer: how weights come: through the host's ``shared_memory``, through memory of the trainer's own GPU
            (``ipc``), or by vLLM's own ``nccl``, between GPUs.
        keep_cache: a response under way in an update keeps the keys and values of its past, made by older weights,
            instead of having them computed anew. Requests that are made once :meth:`pause` has returned never read
            what older weights have made; those that waited in the queue then may.
        settings: the other arguments of :class:`VLLMBase`.
    """

    def __init__(
        self,
        model: str | Path,
        max_model_len: int,
        name: str = "the engine",
        deadline_s: float = 60.0,
        transfer: str = "shared_memory",
        keep_cache: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, max_model_len, **settings)
        self.name, self.deadline_s = name, deadline_s
        self._keep_cache, self._pauses = keep_cache, 0
        self._recording: asyncio.Future[Any] | None = None
        self._forgetting: set[asyncio.Future[None]] = set()  # held until done: event loops only refer to them weakly
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        if self._is_one_worker:
            self._arguments["distributed_executor_backend"] = NamelessExecutor
        how = WeightTransferConfig(transfer if transfer == "nccl" else BACKEND)
        arguments = AsyncEngineArgs(**self._arguments, weight_transfer_config=how)
        self._llm: AsyncLLM | None = AsyncLLM.from_engine_args(arguments)
        manager = self._llm.engine_core.resources.engine_manager  # pyrefly: ignore[missing-attribute]
        self.pids = [process.pid for process in getattr(manager, "processes", ())]
        """Process ids of vLLM's core."""

    @override
    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        check_request([prompt], n, sampling, self.max_model_len)
        response = asyncio.ensure_future(self._sample(request_id, prompt, n, sampling))
        awaits_routes = self._records_routes
        try:
            # A long response may take longer than the deadline; meanwhile the process has to pass health checks.
            while not (await asyncio.wait({response}, timeout=self.deadline_s))[0]:
                await self.check_health()
            output = response.result()
            if any(part.finish_reason == "abort" for part in output.outputs):
                raise RuntimeError(f"{request_id} was aborted on {self.name}")
            samples = samples_with_versions(output, sampling, self._vocabulary)
            if not self._records_routes:
                return samples
            call = self._core.collective_rpc("take_routes", args=(request_id, token_counts(output)))
            (taken,) = await self._within("routes", call)
            awaits_routes = False
            return with_routes(samples, taken)
        except CoreDeadError as error:
            raise self._dead(f"sampling {request_id}") from error
        finally:
            response.cancel()
            # No request is made before recording has begun.
            if awaits_routes and self._recording and self._recording.done() and not self._recording.exception():
                # Not waited for: the caller may be cancelled, and what ended it is not to be hidden.
                forgetting = asyncio.ensure_future(self._forget_routes(request_id, response))
                self._forgetting.add(forgetting)
                forgetting.add_done_callback(self._forgetting.discard)

    async def _forget_routes(self, request_id: str, response: asyncio.Future[Any]) -> None:
        """Drops what is recorded of a request's routes, if the process lives."""
        await asyncio.wait({response})  # its abort has reached vLLM then
        with suppress(EngineDeadError):
            await self._within("forgetting routes", self._core.collective_rpc("forget_routes", args=([request_id],)))

    async def _sample(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> RequestOutput:
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if self._keep_cache:
            # Not the version: requests made in a pause are computed by weights of a version that is yet to come.
            request["cache_salt"] = f"pause-{self._pauses}"
        if self._records_routes:
            if self._recording is None:
                call = self._within("recording routes", self._core.collective_rpc("record_routes"))
                self._recording = asyncio.ensure_future(call)
            await asyncio.shield(self._recording)
        parameters = self._parameters(n, sampling, request_id if self._records_routes else None)
        outputs = self._core.generate(request, parameters, request_id, lora_request=self._adapter)
        return [output async for output in outputs][-1]

    async def pause(self) -> None:
        """Holds all requests where they are; once it has returned, no token is under way."""
        # Not `AsyncLLM.pause_generation`, which waits another 20 ms so that the last tokens are seen before it returns.
        call = self._core.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._keep_cache)  # pyrefly: ignore[missing-attribute]
        await self._within("a pause", call)
        self._pauses += 1

    async def resume(self) -> None:
        """Goes on with the requests that were held, and those that came in the pause."""
        await self._within("going on", self._core.resume_generation())

    @override
    async def check_health(self) -> None:
        await self._within("a health check", self._core.is_paused())

    # An update in steps, under vLLM's names and arguments, so that vLLM's own trainers can drive it.

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
        """Takes in a part of the weights, from where the transfer has them; numbered parts in their order."""
        turns, number = self._turns, update_info.get("number")
        if number is not None:  # over Ray, calls that are made one after the other may overtake each other
            await self._within(f"part {number} of an update, whose turn has not come", turns[number].wait())
        request = WeightTransferUpdateRequest(update_info=update_info)
        call = asyncio.ensure_future(self._core.update_weights(request))
        if number is not None:
            turns[number + 1].set()  # behind this one, which need not be over
        await self._within("a part of an update", call)

    async def finish_weight_update(self, weight_version: str) -> None:
        """Ends an update; tokens sampled from now on carry the version."""
        await self._within("the end of an update", self._core.finish_weight_update())
        if self.takes_adapters:
            await self._within("taking an adapter", self._core.collective_rpc("hold_received_adapter"))
            self._adapter = adapter_request(int(weight_version))
        await self._within("taking a version", self._core.update_weight_version(weight_version))
        self.version = int(weight_version)

    async def abandon_weight_update(self) -> None:
        """Gives up an update, so that another can begin; the weights are mixed, and must not be sampled from."""
        await self._within("giving up an update", self._core.collective_rpc("abandon_weight_update"))

    async def weight_version(self) -> int:
        """Version of the weights, according to the process."""
        return version_number(await self._within("asking for its version", self._core.get_weight_version()))

    async def cache_bytes(self) -> int:
        """Bytes of the KV cache that vLLM found to be left when it started; 0 on a CPU."""
        return (await self._within("asking for its cache", self._core.collective_rpc("cache_bytes")))[0]

    async def fingerprints(self, shapes: Mapping[str, Sequence[int]], read_back: bool = False) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.base.Engine.fingerprints`."""
        plain = {name: list(shape) for name, shape in shapes.items()}
        arguments = (plain, str(self.dtype).removeprefix("torch."), self.proves_bytes and not read_back)
        call = self._core.collective_rpc("held_fingerprints", args=arguments)
        shards = await self._within("fingerprints", call)
        return {name: add(*(shard[name] for shard in shards)) for name in shapes}

    @override
    async def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # vLLM kills a process that hangs after this time, before the caller gives up on it.
            await asyncio.to_thread(llm.shutdown, min(self.deadline_s, _CLOSE_S))

    @property
    def _core(self) -> AsyncLLM:
        if self._llm is None:
            raise self._dead("a call: it was closed")
        return self._llm

    async def _within(self, what: str, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        clock = asyncio.get_running_loop().time
        end = clock() + self.deadline_s
        try:
            while not task.done() and clock() < end:
                # A process that dies leaves the calls that wait for it as they are.
                if self._llm is None or self._llm.errored:
                    raise self._dead(what)
                await asyncio.wait({task}, timeout=max(0.0, min(_POLL_S, end - clock())))
            if not task.done():
                raise self._dead(f"{what} within {self.deadline_s:g} s", "did not answer")
            return task.result()
        except CoreDeadError as error:
            raise self._dead(what) from error
        finally:
            task.cancel()

    def _dead(self, what: str, how: str = "died during") -> EngineDeadError:
        return EngineDeadError(f"{self.name} (process {', '.join(map(str, self.pids))}) {how} {what}")
