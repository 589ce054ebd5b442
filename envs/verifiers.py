"""Verifiers: environments of Prime Intellect's verifiers by name, with their data, rewards and turns as they are."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import itertools
import json
import os
import queue
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

from grpo_rl.envs.declared import means
from grpo_rl.envs.episodes import Episodes
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages

TIMEOUT_S = 60.0
"""Seconds that an environment may take from a turn to its next one."""


_under_way: set[Future] = set()
"""Episodes that have not ended: asyncio itself keeps no task alive."""


class Verifiers(Episodes["_Exchange"]):
    """Tasks of a taskset of verifiers, played by its environment; a response earns ``episode``, the sum of its rewards.

    The environment runs as it does under verifiers; the one agent that it talks to is the policy, in a plain chat. Its
    rewards and metrics, by their names, are logged as measures.

    Source: https://github.com/PrimeIntellect-ai/verifiers, ``verifiers.v1`` of 0.4.
    """

    def reset(self, row: dict) -> tuple[_Exchange, Messages]:
        """Begins an episode up to the policy's first turn."""
        exchange = _Exchange(_environment(row["taskset"]), row["data"])
        try:
            messages = exchange.next()
            if messages is None:
                raise RuntimeError(f"the episode of task {row['idx']} ended without a turn of the policy")
        except BaseException:
            exchange.close()
            raise
        return exchange, messages

    def step(self, state: _Exchange, text: str) -> tuple[str, float, bool]:
        """Gives the environment the policy's turn, and waits for its next one or the end."""
        state.answer(text)
        messages = state.next()
        if messages is None:
            return "", state.reward, True
        return "\n\n".join(message["content"] for message in messages), 0.0, False

    def cut_off(self, state: _Exchange) -> float:
        """Notifies the environment that the policy has no further turn, so that it scores what there is."""
        state.answer(None)
        while state.next() is not None:  # it may ask once more
            state.answer(None)
        return state.reward

    def measures(self, state: _Exchange) -> dict[str, float]:
        """Each reward and metric by its name."""
        return state.measures

    def close(self, state: _Exchange) -> None:
        """Cancels the episode, if it is under way."""
        state.close()

    def gold(self, row: dict) -> str | None:
        """The field ``answer`` of the task, where it has one."""
        answer = row["data"].get("answer")
        return answer if isinstance(answer, str) else None


class _Exchange:
    """One episode under way: the environment in an event loop's thread, and the policy outside of it."""

    def __init__(self, env: Any, data: Mapping[str, Any]) -> None:
        self.reward, self.measures = 0.0, {}
        self._prompts: queue.SimpleQueue[Messages | Exception | None] = queue.SimpleQueue()
        self._loop, self._replies = _loop(os.getpid()), asyncio.Queue[str | None]()
        self._future = asyncio.run_coroutine_threadsafe(self._play(env, data), self._loop)
        _under_way.add(self._future)
        self._future.add_done_callback(_under_way.discard)

    def next(self) -> Messages | None:
        """The environment's messages to the policy; None: the episode has ended."""
        try:
            messages = self._prompts.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"the environment has been silent for {TIMEOUT_S:g} s") from None
        if isinstance(messages, Exception):
            raise messages
        return messages

    def answer(self, text: str | None) -> None:
        self._loop.call_soon_threadsafe(self._replies.put_nowait, text)

    def close(self) -> None:
        self._future.cancel()

    async def turn(self, messages: Messages) -> str | None:
        self._prompts.put(messages)
        return await self._replies.get()

    async def _play(self, env: Any, data: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        try:
            kind = type(env.taskset).task_type()
            task = kind(kind.data_type().model_validate(data), env.taskset.config.task)
            trace_task = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
            episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=trace_task)
            agents = vf.Agents(env.config, lambda name, spec: _PolicyAgent(name, spec, episode, self))
            await env.setup(agents)
            await env.run(task, agents)
            await env.finalize(task, episode)
            for trace in episode.traces:
                self.measures |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
                self.measures |= {name: value for name, value in trace.metrics.items() if value is not None}
            self.reward = sum(trace.reward for trace in episode.traces)
        # Foreign code: whatever it raises is passed to the thread that waits.
        except Exception as error:
            self._prompts.put(error)
        else:
            self._prompts.put(None)


class _PolicyAgent:
    """The agent of an environment that the policy plays: a chat without tools, whose trace the episode gets."""

    trainable = True

    def __init__(self, name: str, spec: Any, episode: Any, exchange: _Exchange) -> None:
        self.name, self.spec, self._episode, self._exchange = name, spec, episode, exchange

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        trace_task = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        info = vf.AgentInfo(config=self.spec, name=self.name)
        trace = vf.Trace(task=trace_task, state=state_cls(type(task))(), agent=info)
        yield _Interaction(task, trace, self.spec.max_turns, self._exchange)
        trace.stop("user_closed")
        trace.ok = True
        await task.score(trace)
        self._episode.traces.append(trace)


class _Interaction:
    """A conversation that the environment leads, as ``verifiers.v1.Interaction`` is one."""

    def __init__(self, task: Any, trace: Any, max_turns: int | None, exchange: _Exchange) -> None:
        self.trace, self._task, self._max_turns, self._exchange = trace, task, max_turns, exchange

    async def turn(self, message: Any = None) -> Any:
        import verifiers.v1 as vf
        from verifiers.v1.agent import Segment
        from verifiers.v1.dialects.chat import parse_message

        if await self._stopped():
            return Segment(messages=[], terminated=True)
        turns = self._opening() if not self.trace.nodes else []
        given = [vf.UserMessage(content=message)] if isinstance(message, str) else message or ()
        turns += [parse_message(each) if isinstance(each, dict) else each for each in given]
        for each in turns:
            self._add(each)
        text = await self._exchange.turn([{"role": each.role, "content": _text(each)} for each in turns])
        if text is None:
            self.trace.stop("max_turns")
            return Segment(messages=[], terminated=True)
        reply = vf.AssistantMessage(content=text)
        self._add(reply, sampled=True)
        return Segment(messages=[reply])

    def _opening(self) -> list[Any]:
        import verifiers.v1 as vf

        data = self._task.data
        opening = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*opening, vf.UserMessage(content=data.prompt)]
        return [*opening, *(data.prompt or ())]

    async def _stopped(self) -> bool:
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import invoke

        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
            return True
        for hook in self._task.hooks("stop") if self.trace.nodes else ():
            verdict = invoke(hook, {vf.Trace: self.trace})
            if await verdict if inspect.isawaitable(verdict) else verdict:
                self.trace.stop(hook.__name__)
                return True
        return False

    def _add(self, message: Any, sampled: bool = False) -> None:
        import verifiers.v1 as vf

        nodes = self.trace.nodes
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def _text(message: Any) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    if any(part.type != "text" for part in parts):
        raise ValueError("the environment shows images, which the policy can't see")
    return "\n".join(part.text for part in parts)


@functools.lru_cache(maxsize=16)
def _environment(taskset: str) -> Any:
    config = json.loads(taskset)
    name = config["id"]
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ValueError("env.dataset=verifiers needs verifiers: pip install 'grpo-rl[verifiers]'") from error
    try:
        env = vf.load_environment(vf.resolve_env_config({"taskset": config}))
    # A foreign package's code runs here: its name, its settings and its imports may be wrong in any way.
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"env.name={name} can't be loaded: {type(error).__name__}: {why}") from error
    kind, given = type(env.taskset).task_type(), env.taskset.config
    agents = [field for field, value in env.config if isinstance(value, vf.AgentConfig)]
    faults = {
        f"lets several agents talk ({', '.join(agents)})": len(agents) != 1,
        "runs in a container": kind.NEEDS_CONTAINER,
        "gives tools": bool(kind.toolsets(given.task) or type(env.taskset).toolsets(given)),
        "prepares a machine for each task": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
    }
    if found := [fault for fault, there in faults.items() if there]:
        raise ValueError(f"env.name={name} {' and '.join(found)}; the policy plays the one agent of a plain chat")
    return env


@functools.lru_cache(maxsize=1)
def _loop(process_id: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    # Or asyncio complains at exit of each episode that is under way.
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(_cancelled(), loop).result(5))
    return loop


async def _cancelled() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def load_rows(
    path: AnySource = None,
    split: str = "train",
    name: Annotated[
        str | None, means("the taskset: an installed package, or one that comes with verifiers, such as textarena")
    ] = None,
    taskset: Annotated[
        Mapping[str, Any] | None, means("the taskset's settings, those of `--env.taskset` under verifiers")
    ] = None,
    episodes: Annotated[int | None, means("tasks that are taken; null: all", ge=1)] = None,
    held_out: Annotated[float, means("share of them that is kept for evaluation", ge=0, lt=1)] = 0.1,
) -> Sequence[dict]:
    """The tasks of a taskset, as plain values; those held out come last.

    Raises:
        ValueError: a path is given; verifiers or the taskset can't be loaded; it has no end, or too few tasks; it needs
            a container, tools, or several agents.
    """
    Source.of(path).refuse("verifiers, whose data is the taskset's", "path")
    if not name:
        raise ValueError("env.name is empty; give a taskset of verifiers, such as env.name=textarena")
    config = json.dumps({**(taskset or {}), "id": name}, sort_keys=True)
    found = _environment(config).taskset
    if episodes is None and not found.bounded:
        raise ValueError(f"env.name={name} makes tasks without end; set env.episodes to how many to take")
    tasks = [
        {"taskset": config, "idx": index, "data": task.data.model_dump(mode="json")}
        for index, task in enumerate(itertools.islice(found, episodes))
    ]
    kept = len(tasks) - int(len(tasks) * held_out)
    chosen = tasks[:kept] if split == "train" else tasks[kept:]
    if not chosen:
        raise ValueError(f"env.name={name} has {len(tasks)} tasks, none of them for {split} by env.held_out={held_out}")
    return chosen


VerifiersEnv = TaskSpec(Verifiers, load_rows, row_settings=("name", "taskset", "episodes", "held_out"))
"""Tasks of a taskset of verifiers as a TorchRL environment."""
