"""Rollouts: rows of an environment, each stepped until it is done.

A rollout is the list of a row's steps, each with what the step led to under ``next``, as in TorchRL's ``env.rollout``.
With an engine that is awaited, each goes on by itself: a slow tool holds up its own conversation alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import groupby
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from grpo_rl.collectors.engine_policy import OPTIONAL, WRITTEN, EnginePolicy, turn_sampling, write
from grpo_rl.collectors.groups import verdict_of
from grpo_rl.data import keys
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.guards.guard import in_thread, outcome
from grpo_rl.envs.rows import Row, dialog_of, next_of, stacked

Rollout = list[Row]
Policy = Callable[[TensorDictBase], TensorDictBase]
Respond = Callable[[Sequence[Row]], Awaitable[None]]
Step = Callable[[EnvBase, Sequence[Row]], Awaitable[list[Row]]]


def reset_rows(env: EnvBase, policy: Policy | None = None, **which: Any) -> list[Row]:
    """The rows that ``reset`` gives: an `LLMEnv`'s own for an `EnginePolicy`, else TensorDicts.

    Args:
        policy: None for an engine that is awaited.
        which: see `LLMEnv.reset_rows`.
    """
    ours = isinstance(env, LLMEnv) and (policy is None or type(policy) is EnginePolicy)
    if ours and type(env)._reset is LLMEnv._reset and type(env)._step is LLMEnv._step:  # a user's own take effect
        return env.reset_rows(**which)
    return list(env.reset(**which).unbind(0))


def step(env: EnvBase, rows: Sequence[Row]) -> list[Row]:
    """The rows, with what their step led to under ``next``."""
    if isinstance(env, LLMEnv) and isinstance(rows[0], dict):
        after = env.step_rows(rows)
    else:  # `step` of a transformed environment takes nothing but the whole batch
        after = env._step(stacked(rows)).unbind(0)
    for row, led_to in zip(rows, after, strict=True):
        row["next"] = led_to
    return list(rows)


def is_done(row: Row) -> bool:
    """True if nothing follows a step."""
    done = next_of(row)["done"]
    return done if isinstance(done, bool) else bool(done.all())


def following(row: Row) -> Row:
    """The row of the next step: what the step led to, and what no step changes."""
    after = next_of(row)
    if isinstance(row, dict) or keys.GROUP_ID in after.keys():  # a dict is an `LLMEnv`'s
        return after
    return row.exclude("next", *WRITTEN, *OPTIONAL).update(after)


def note(env: LLMEnv, rollouts: Sequence[Rollout]) -> None:
    """Passes the rewards of a whole group to the environment's curriculum."""
    verdicts = [verdict_of(next_of(rollout[-1])) for rollout in rollouts]
    if verdicts and verdicts[0] is not None:
        env.note(int(rollouts[0][0][keys.ROW]), verdicts)


def in_rounds(env: EnvBase, policy: Policy, rows: Iterable[Row]) -> tuple[list[Rollout], float]:
    """The rollouts of the rows, the turns of all that are not done sampled and stepped together.

    Returns the seconds that the policy took, too.
    """
    ready, seconds = dict(enumerate(rows)), 0.0
    rollouts: list[Rollout] = [[] for _ in ready]
    while ready:
        batch, begun_s = list(ready.values()), time.perf_counter()
        if type(policy) is EnginePolicy:
            policy.respond(batch)
        else:
            batch = list(policy(stacked(batch)).unbind(0))
        seconds += time.perf_counter() - begun_s
        _advance(ready, rollouts, step(env, batch))
    return rollouts, seconds


def _advance(ready: dict[int, Row], rollouts: list[Rollout], stepped: Sequence[Row]) -> None:
    """Appends a step to each rollout that was ready; those that are not done are ready for the next."""
    for i, row in zip(list(ready), stepped, strict=True):
        rollouts[i].append(row)
        if is_done(row):
            del ready[i]
        else:
            ready[i] = following(row)


async def play(env: EnvBase, rows: Sequence[Row], respond: Respond, step: Step) -> list[Rollout]:
    """The rollouts of rows that go on together: those of one group, or a single one.

    Args:
        respond: writes the policy's responses into the rows.
        step: see :func:`step`; awaited, as scorers and tools take their time.
    """
    rollouts: list[Rollout] = [[] for _ in rows]
    ready = dict(enumerate(rows))
    while ready:
        await respond(list(ready.values()))
        _advance(ready, rollouts, await step(env, list(ready.values())))
    return rollouts


async def step_in_thread(env: EnvBase, rows: Sequence[Row]) -> list[Row]:
    """:func:`step` in a thread of its own."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def give(found: Any) -> None:
        if result.done():  # cancelled
            return
        result.set_exception(found) if isinstance(found, Exception) else result.set_result(found)

    def call() -> None:
        found = outcome(step, env, rows)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits any more
            loop.call_soon_threadsafe(give, found)

    in_thread(call)
    return await result


def at_own_pace(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows that go on together: a group whose task has one turn, as it may be scored together; else each alone."""
    found: list[list[Row]] = []
    for _, members in groupby(rows, key=lambda row: int(row[keys.GROUP_ID])):
        group = list(members)
        found += [[row] for row in group] if takes_turns(group[0]) else [group]
    return found


def takes_turns(row: Row) -> bool:
    """True if the policy may have several turns in a conversation of an `LLMEnv`."""
    return row.get(keys.HISTORY, None) is not None and dialog_of(row).max_turns > 1


async def gathered(work: Iterable[Coroutine[Any, Any, list[Rollout]]]) -> list[Rollout]:
    """All rollouts, in their order; where one raises, the others are cancelled."""
    first, *others = work
    if not others:  # at once: in a turn of the loop its engine could be lost
        return await first
    tasks = [asyncio.ensure_future(each) for each in (first, *others)]
    try:
        return [rollout for found in await asyncio.gather(*tasks) for rollout in found]
    finally:
        for task in tasks:
            task.cancel()


def play_all(env: EnvBase, policy: Policy, rows: Sequence[Row]) -> tuple[list[Rollout], float]:
    """The rollouts of the rows: each at its own pace where the policy's engine lets them, else in rounds.

    Returns the seconds that the policy took, too; where replies come meanwhile, those of all.
    """
    if not isinstance(policy, EnginePolicy) or policy.in_rounds or not any(map(takes_turns, rows)):
        return in_rounds(env, policy, rows)
    begun_s = time.perf_counter()
    try:
        return _at_own_pace(env, policy, list(rows)), time.perf_counter() - begun_s
    finally:
        policy.engine.abort()


def _at_own_pace(env: EnvBase, policy: EnginePolicy, rows: list[Row]) -> list[Rollout]:
    """The rollouts of the rows: those that have a response are stepped in threads while the engine samples others."""
    engine, longest = policy.engine, policy.engine.max_model_len
    rollouts: list[Rollout] = [[] for _ in rows]
    number = {id(row): i for i, row in enumerate(rows)}
    groups = [[number[id(row)] for row in group] for group in at_own_pace(rows)]
    together = {i: members for members in groups for i in members}
    in_engine: set[int] = set()
    stepped: queue.SimpleQueue[tuple[list[int], Any]] = queue.SimpleQueue()
    in_threads = 0

    def submit(i: int) -> None:
        prompt = rows[i][keys.TOKENS_PROMPT].tolist()
        engine.submit(i, prompt, turn_sampling(len(prompt), policy.sampling, longest))
        in_engine.add(i)

    def step_them(members: list[int]) -> None:
        stepped.put((members, outcome(step, env, [rows[i] for i in members])))

    for i in range(len(rows)):
        submit(i)
    while in_engine or in_threads:
        for i, samples in engine.step() if in_engine else ():
            write([rows[i]], samples, longest)
            in_engine.discard(i)
            if in_engine.isdisjoint(together[i]):
                in_thread(step_them, together[i])
                in_threads += 1
        while in_threads and not (in_engine and stepped.empty()):
            members, found = stepped.get()  # whatever it waits for has a deadline
            in_threads -= 1
            if isinstance(found, Exception):
                raise found
            for i, row in zip(members, found, strict=True):
                rollouts[i].append(row)
                if not is_done(row):
                    rows[i] = following(row)
                    submit(i)
    return rollouts
