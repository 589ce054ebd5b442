"""Simulated engines in simulated Ray actors: the driver's code that calls them is the real one.

An actor is a process of its own: its answers take time and may come late, it may die with all calls that are under way,
or hang. The engine in it samples one token after the other, and says of each what weights it had for it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_rl.cluster.engine_actors import RayError, RayTaskError
from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.engines.shared_memory import parts, trainers_memory
from simulation.world import World

DEADLINE_S = 10.0
"""Seconds in which an engine has to answer a call."""
ANSWERS_TWICE = ("check_health", "weight_version", "fingerprints", "pause", "resume")
"""Calls that an engine may be asked for twice."""


class SimulatedEngine:
    """The engine in the actor, with the interface of `grpo_rl.engines.vllm.asynchronous.AsyncVLLMEngine`."""

    dtype, max_model_len, takes_adapters, proves_bytes = torch.float32, 64, False, False
    deadline_s = DEADLINE_S

    def __init__(self, name: str, world: World) -> None:
        self.name, self.version = name, 0
        self._world = world
        self.weights: dict[str, Tensor] = {}
        self._slowness = 20.0 if world.happens("slow engine", name) else 1.0
        self._groups = 0
        self._running = asyncio.Event()
        self._running.set()
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """Samples token by token; log-probability: minus the number of optimizer steps that the weights have seen."""
        ids, log_probs, versions = [], [], []
        self._groups += 1
        for _ in range(n):
            ids.append([])
            log_probs.append([])
            for _ in range(1 + int(self._world.seconds(1.0))):
                await asyncio.sleep(self._world.token_s(self._groups) * self._slowness)
                await self._running.wait()
                ids[-1].append(int(prompt[0]))
                log_probs[-1].append(-self._updates())
                versions.append(self.version)
        self._groups -= 1
        samples = Samples.from_lists(ids, log_probs, [False] * n, self.version)
        return replace(samples, token_versions=torch.tensor(versions))

    def _updates(self) -> float:
        """Optimizer steps that the weights have seen; a quarter more where they do not all say the same."""
        steps = self.weights["steps"]
        return steps.item() + (0.0 if all(bool((w == steps).all()) for w in self.weights.values()) else 0.25)

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def check_health(self) -> None: ...

    async def start_weight_update(self) -> None:
        """Begins an update."""
        assert not self._running.is_set(), f"{self.name} takes weights while it samples"
        self._turns = defaultdict(asyncio.Event)
        self._turns[0].set()

    async def update_weights(self, bucket: Mapping[str, Any]) -> None:
        """Takes a bucket from the trainer's memory, once its turn has come."""
        number = bucket["number"]
        try:
            await asyncio.wait_for(self._turns[number].wait(), self.deadline_s)
        except TimeoutError:
            raise EngineDeadError(f"{self.name}: part {number} of an update waits for the one before") from None
        memory = trainers_memory(bucket["path"], bucket["size"])
        header = memory[bucket["start"] : bucket["start"] + 16].view(torch.int64).tolist()
        assert header == [bucket["version"], number], f"bucket {number} was written over: {header}"
        part = None
        for part in parts(memory, bucket["tensors"]):
            held = self.weights.get(part.name)
            held = torch.zeros(part.shape) if held is None else held.clone()
            held.view(-1)[part.first : part.first + len(part.values)] = part.values
            self.weights[part.name] = held
        if part is not None and self._world.happens("weights damaged in a push", self.name):
            self.weights[part.name] = self.weights[part.name] + 0.5
        self._turns[number + 1].set()

    async def finish_weight_update(self, weight_version: str) -> None:
        """Ends an update."""
        self.version = int(weight_version)

    async def abandon_weight_update(self) -> None: ...

    async def weight_version(self) -> int:
        return self.version

    async def fingerprints(self, shapes: Mapping[str, Sequence[int]], read_back: bool = False) -> dict[str, int]:
        return {name: fingerprint(self.weights[name]) for name in shapes}

    async def close(self) -> None: ...


class _Answer(Future):
    """Stands for a Ray object reference."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def future(self) -> Future[Any]:
        return self


class SimulatedActor:
    """Stands for a Ray actor that holds an engine.

    Args:
        make: makes the engine.
        node: number of the node that it runs on; actors die with their node.
    """

    def __init__(self, make: Callable[[], SimulatedEngine], node: int, world: World) -> None:
        self.node, self._world = node, world
        self.alive, self._hangs = True, False
        self._unanswered_since_s: float | None = None
        """Since when a call waits for an engine that hangs; a later call, or none, changes nothing."""
        self._open: dict[Future[Any], None] = {}
        """Calls that were not answered yet, in their order."""
        self._tasks: list[asyncio.Task[None]] = []  # in order: a set's is another in each process
        self.engine = make()
        self.about, self.call = SimpleNamespace(remote=self._about), SimpleNamespace(remote=self._call)

    def _about(self) -> _Answer:
        async def about() -> dict[str, Any]:
            await asyncio.sleep(self._world.launch_s())
            if self._world.happens("crash of an engine that starts", self.engine.name):
                self.die()
            names = ("dtype", "max_model_len", "takes_adapters", "proves_bytes", "version", "deadline_s")
            return {name: getattr(self.engine, name) for name in names} | {"node": f"node {self.node}", "pids": []}

        return self._answer("about", about)

    def _call(self, method: str, *args: Any) -> _Answer:
        async def work() -> Any:
            if method in ANSWERS_TWICE and self._world.happens("message doubled", f"{self.engine.name} {method}"):
                await getattr(self.engine, method)(*args)
            return await getattr(self.engine, method)(*args)

        answer = self._answer(method, work)
        if method == "generate":  # the request of a group is named group-<its number>-<...>
            self._world.on_sampling(self, int(args[0].split("-")[1]), answer.future())
        return answer

    def _answer(self, method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> _Answer:
        value = _Answer()
        self._open[value] = None
        value.add_done_callback(lambda call: self._open.pop(call, None))
        self._world.later(self._message_s(method), lambda: self._begin(value, method, work))
        return value

    def _message_s(self, method: str) -> float:
        """Seconds that a message takes; calls overtake each other, as with Ray."""
        late = self._world.happens("message late", f"{self.engine.name} {method}")
        return self._world.seconds(15.0 if late else 0.01)

    def _begin(self, value: Future[Any], method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        where = f"{self.engine.name} {method}"
        if self.alive and self._world.happens("crash of an engine", where):
            self.die()
        if self.alive and self._world.happens("engine hangs", where):
            self._hangs, self._unanswered_since_s = True, self._world.now()
        if self.alive and self._world.happens("clock jumps", where):
            self._world.jump_clock()
        if method == "update_weights" and self._world.happens("crash of the trainer in a push", where):
            self._world.kill_trainer()
        if not self.alive:
            self._fail(value)
        elif not self._hangs:
            task = asyncio.get_running_loop().create_task(self._serve(value, method, work))
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    async def _serve(self, value: Future[Any], method: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            result, error = await work(), None
        except Exception as raised:
            result, error = None, RayTaskError(method, str(raised), raised, "actor", 1, "127.0.0.1")
        self._world.later(self._message_s(method), lambda: self._deliver(value, method, result, error))

    def _deliver(self, value: Future[Any], method: str, result: Any, error: RayTaskError | None) -> None:
        if not self.alive or self._hangs or value.done() or not value.set_running_or_notify_cancel():
            return
        if method not in ("generate", "check_health"):
            self._world.tell(
                f"{self.engine.name} answers {method}{f' with {type(error.cause).__name__}' if error else ''}"
            )
        value.set_exception(error) if error else value.set_result(result)

    @property
    def silent_s(self) -> float:
        """Seconds since the first call that an engine that hangs will never answer; 0: there is none."""
        return self._world.now() - self._unanswered_since_s if self.alive and self._unanswered_since_s else 0.0

    def _fail(self, value: Future[Any]) -> None:
        if not value.done() and value.set_running_or_notify_cancel():
            value.set_exception(RayError(f"the actor of {self.engine.name} died"))

    def die(self) -> None:
        """Ends the process; calls that are under way fail as soon as Ray has noticed."""
        if not self.alive:
            return
        self.alive = False
        self._world.tell(f"{self.engine.name} is dead")
        for task in list(self._tasks):
            task.cancel()
        for value in list(self._open):
            self._world.later(self._world.seconds(1.0), lambda value=value: self._fail(value))
