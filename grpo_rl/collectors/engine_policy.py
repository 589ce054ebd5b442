"""EnginePolicy: an engine as a TorchRL policy; and rollouts: rows of an environment, each stepped until it is done.

A rollout is the list of a row's steps, each with what the step led to under ``next``, as in TorchRL's ``env.rollout``.
"""

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from grpo_rl.collectors.groups import verdict_of
from grpo_rl.data import keys
from grpo_rl.engines.base import Sampler, Samples, Sampling, StepByGenerate
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.guards.guard import in_thread, outcome
from grpo_rl.envs.rows import Row, dialog_of, next_of, stacked

Rollout = list[Row]
Policy = Callable[[TensorDictBase], TensorDictBase]

WRITTEN = [keys.TOKENS_RESPONSE, keys.LOG_PROBS_RESPONSE, keys.VERSIONS, keys.TRUNCATED, keys.MAX_TOKENS]
"""Entries that a policy writes into each row."""
OPTIONAL = [keys.KEPT_IDS, keys.KEPT_COUNTS, keys.ROUTES_FULL]
"""Entries that it writes as well where its engine records them."""


class EnginePolicy(TensorDictModuleBase):
    """Samples a response for each row: for ``env.rollout``, TorchRL's collectors and ours.

    All rows that have as many tokens left are sampled in one call. If each prompt is that of as many rows of its group,
    or of the batch where rows have no group's id, the engine computes it once. A row that is done gets an empty
    response.

    Args:
        engine: in this process, or a fleet that looks like one engine.
        sampling: of each turn; shortened to the tokens that are left in the context.
    """

    in_keys = [keys.TOKENS_PROMPT]  # pyrefly: ignore[bad-override-mutable-attribute]
    out_keys = WRITTEN  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, engine: Sampler, sampling: Sampling) -> None:
        super().__init__()
        self.engine, self.sampling = engine, sampling

    @property
    def in_rounds(self) -> bool:
        """True if a response depends on those of its batch, so that all turns of a round are sampled together."""
        return isinstance(self.engine, StepByGenerate) and self.engine.in_rounds

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes a response, its log-probabilities, policy version and truncation into each row.

        Kept sets and the experts of each token, of prompt and response, come with them where the engine gives any.
        """
        rows = list(tensordict.unbind(0))
        self.respond(rows)
        return stacked(rows)

    def respond(self, rows: Sequence[Row]) -> None:
        """Writes what :meth:`forward` writes into rows that are not stacked."""
        calls: dict[Sampling, list[Row]] = {}
        for row in rows:
            if row.get("done", False):
                write([row], _NOTHING, self.engine.max_model_len)
                continue
            sampling = turn_sampling(len(row[keys.TOKENS_PROMPT]), self.sampling, self.engine.max_model_len)
            calls.setdefault(sampling, []).append(row)
        for sampling, asked in calls.items():
            groups = list(by_prompt(asked).values())
            if len({len(members) for members in groups}) > 1:  # one call all the same: responses depend on their batch
                groups = [[row] for row in asked]
            prompts = [members[0][keys.TOKENS_PROMPT].tolist() for members in groups]
            sampled = self.engine.generate(prompts, len(groups[0]), sampling)
            for members, samples in zip(groups, sampled, strict=True):
                write(members, samples, self.engine.max_model_len)


def by_prompt(rows: Iterable[Row]) -> dict[tuple[int, tuple[int, ...]], list[Row]]:
    """The rows of each group that go on from the same tokens, by the group's id, if it has one, and these tokens."""
    found: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        found.setdefault((int(row.get(keys.GROUP_ID, -1)), tuple(row[keys.TOKENS_PROMPT].tolist())), []).append(row)
    return found


def turn_sampling(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> Sampling:
    """The sampling settings of a turn, shortened to the tokens that are left in the context."""
    limit = min(sampling.max_new_tokens, max_model_len - prompt_tokens)
    if limit == sampling.max_new_tokens or limit < 1:  # the engine refuses a prompt that leaves no room
        return sampling
    return replace(sampling, max_new_tokens=limit, min_new_tokens=min(sampling.min_new_tokens, limit))


def write(rows: Sequence[Row], samples: Samples, max_model_len: int) -> None:
    """Writes the responses to one prompt into the rows that ask for them."""
    lengths = samples.offsets.diff().tolist()
    log_probs, versions = samples.log_probs.split_with_sizes(lengths), samples.versions.split_with_sizes(lengths)
    longest = torch.tensor([max_model_len])
    for g, (row, ids) in enumerate(zip(rows, samples.response_ids.split_with_sizes(lengths), strict=True)):
        row[keys.TOKENS_RESPONSE] = ids
        row[keys.LOG_PROBS_RESPONSE] = log_probs[g]
        row[keys.VERSIONS] = versions[g]
        row[keys.TRUNCATED] = samples.truncated[g : g + 1]
        row[keys.MAX_TOKENS] = longest
    if samples.kept:
        counts = samples.kept.counts.split(lengths)
        ids_of = samples.kept.ids.split([int(own.sum()) for own in counts])
        for g, row in enumerate(rows):
            row[keys.KEPT_IDS], row[keys.KEPT_COUNTS] = ids_of[g], counts[g]
    if samples.routes is not None and samples.prompt_routes is not None:
        for row, routes in zip(rows, samples.routes.split(lengths), strict=True):
            row[keys.ROUTES_FULL] = torch.cat([samples.prompt_routes, routes])


_NOTHING = Samples.from_lists([[]], [[]], [False], 0)


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
        append_steps(ready, rollouts, step(env, batch))
    return rollouts, seconds


def append_steps(ready: dict[int, Row], rollouts: list[Rollout], stepped: Sequence[Row]) -> None:
    """Appends a step to each rollout that was ready; those that are not done are ready for the next."""
    for i, row in zip(list(ready), stepped, strict=True):
        rollouts[i].append(row)
        if is_done(row):
            del ready[i]
        else:
            ready[i] = following(row)


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
