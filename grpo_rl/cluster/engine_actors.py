"""Engines as Ray actors: placed by a placement group, and called like engines of this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.loop_thread import AsyncEngine, EngineStartError
from grpo_rl.waits import waiting
from grpo_rl.weights.remote import EngineControl

MOST_CALLS = 100_000
"""Calls to one engine at a time: each conversation is one."""
CLOSE_S = 30.0
"""Seconds that an engine has to end by itself."""
ENGINE_REMEDY = (
    "the engine is replaced once it fails a health check, inference_model.max_restarts times; where that is too late, "
    "lower inference_model.deadline_s"
)
WRONG_INPUT = f"{ValueError.__name__}: "
"""Beginning of the last line of a traceback, all that Ray keeps of a constructor's error, if settings are at fault."""


@ray.remote(max_restarts=0)  # who replaces it has to push weights into the new one
class _EngineActor:
    """Holds an engine in a process of its own, perhaps on another machine."""

    def __init__(self, make: Callable[[], AsyncEngine]) -> None:
        self._engine = make()

    async def about(self) -> dict[str, Any]:
        """The engine's attributes, which callers read."""
        names = ("dtype", "max_model_len", "takes_adapters", "proves_bytes", "version", "deadline_s")
        return {name: getattr(self._engine, name) for name in names} | {
            "node": ray.util.get_node_ip_address(), "pids": getattr(self._engine, "pids", []),
        }  # fmt: skip

    async def call(self, method: str, *args: Any) -> Any:
        """Calls the engine's method and returns its result."""
        return await getattr(self._engine, method)(*args)


class RayEngine(AsyncEngine, EngineControl):
    """An engine in a Ray actor, whose attributes are those that the actor's ``about`` returns."""

    def __init__(self, name: str, actor: Any, about: Mapping[str, Any]) -> None:
        self.name, self._actor = f"{name} on {about['node']}", actor
        self.dtype: torch.dtype = about["dtype"]
        self.max_model_len: int = about["max_model_len"]
        self.takes_adapters: bool = about["takes_adapters"]
        self.proves_bytes: bool = about["proves_bytes"]
        self.version: int = about["version"]
        self.deadline_s: float = about["deadline_s"]
        self.pids: list[int] = about["pids"]
        self._closed = False

    async def _call(self, method: str, *args: Any) -> Any:
        if self._closed:
            raise EngineDeadError(f"{self.name} was closed before {method}")
        call = asyncio.ensure_future(self._actor.call.remote(method, *args))
        try:
            # The engine has deadlines of its own, and its actor may hang as well.
            # A long response is logged where the engine is silent, too.
            limit_s = 2 * self.deadline_s
            with waiting(f"{self.name} to answer {method}", "", limit_s, self.version, ENGINE_REMEDY) as wait:
                while not (await asyncio.wait({call}, timeout=limit_s))[0]:
                    if method != "generate":
                        raise EngineDeadError(f"{self.name} did not answer {method} within {limit_s:g} s")
                    await self._call("check_health")
                    wait.again()
            return call.result()
        except RayTaskError as error:
            raise _cause(error) from error
        except RayError as error:  # a result may be lost with its node after it was given
            raise self._died(method, error) from error
        finally:
            call.cancel()

    def _died(self, method: str, error: RayError) -> EngineDeadError:
        # Ray's own message has many lines.
        return EngineDeadError(f"{self.name} died during {method}: {str(error).splitlines()[0]}")

    @override
    def submit(self, method: str, *args: Any) -> Future[Any]:
        ours: Future[Any] = Future()

        def deliver(theirs: Future[Any]) -> None:
            error = theirs.exception()
            if isinstance(error, RayTaskError):
                error = _cause(error)
            elif isinstance(error, RayError):
                error = self._died(method, error)
            if not ours.set_running_or_notify_cancel():
                return
            if error is not None:
                ours.set_exception(error)
            else:
                if method == "finish_weight_update":
                    self.version = int(args[0])
                ours.set_result(theirs.result())

        self._actor.call.remote(method, *args).future().add_done_callback(deliver)
        return ours

    @override
    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        return await self._call("generate", request_id, list(prompt), n, sampling)

    @override
    async def check_health(self) -> None:
        await self._call("check_health")

    async def cache_bytes(self) -> int:
        """Bytes of the engine's KV cache; 0 on a CPU."""
        return await self._call("cache_bytes")

    @override
    async def close(self) -> None:
        if self._closed:
            return
        try:
            await asyncio.wait_for(self._call("close"), CLOSE_S)
        except (EngineDeadError, TimeoutError):
            pass
        finally:
            self._closed = True
            ray.kill(self._actor)


def _cause(error: RayTaskError) -> BaseException:
    """The engine's exception, as it would be raised in this process."""
    return error.cause if isinstance(error.cause, BaseException) else error


async def launch(
    name: str,
    make: Callable[[], AsyncEngine],
    place: PlacementGroup | None = None,
    bundle: int = 0,
    num_cpus: float = 1,
    num_gpus: float = 0,
    deadline_s: float = 1800.0,
) -> RayEngine:
    """Starts an engine in an actor, and waits until it is ready.

    Args:
        make: builds the engine, in the actor, which reserves so many CPUs and GPUs.
        place: the placement group, in whose ``bundle`` it runs; None: wherever there is room.
        deadline_s: seconds until the engine must be ready.

    Raises:
        ValueError: its constructor refused the settings.
        EngineStartError: its process ended while it started.
        EngineDeadError: it was not ready in time, or its constructor raised; retrying would fail the same way.
    """
    # Ray allows 1,000 concurrent calls by default; a pause would queue behind them.
    options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_concurrency": MOST_CALLS}
    if place:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(place, bundle)
    actor = _EngineActor.options(**options).remote(make)  # pyrefly: ignore[missing-attribute]
    try:
        with waiting(f"{name} to start", "", deadline_s):
            about = await asyncio.wait_for(actor.about.remote(), deadline_s)
    except BaseException as error:
        ray.kill(actor)
        if isinstance(error, RayError):
            *_, last = str(error).strip().splitlines() or [""]
            if getattr(error, "actor_init_failed", False) and last.startswith(WRONG_INPUT):
                raise ValueError(f"{name} did not start: {last.removeprefix(WRONG_INPUT)}") from error
            is_final = isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)
            kind = EngineDeadError if is_final else EngineStartError
            raise kind(f"{name} did not start: {error}") from error
        if isinstance(error, TimeoutError):
            raise EngineDeadError(
                f"{name} was not ready within {deadline_s:g} s: its model loads slowly, or Ray has no room for "
                f"{num_cpus:g} CPUs and {num_gpus:g} GPUs (`ray status` shows what is taken)"
            ) from None
        raise
    return RayEngine(name, actor, about)
