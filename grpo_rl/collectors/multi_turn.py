"""Conversations of several turns, each of which goes on by itself while the engine samples the others.

A slow tool holds up its own conversation alone. What was sampled is never tokenised again: ids of a reply are appended.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo_rl.by_name import one_line
from grpo_rl.collectors.groups import group_of_samples
from grpo_rl.data.group import NO_ROUTE, Group
from grpo_rl.data.kept import Kept
from grpo_rl.engines.base import Sampler, Samples, Sampling, StepByGenerate
from grpo_rl.envs.base import Failure, LLMEnv, Messages, Prompt, Reward
from grpo_rl.envs.chat import Dialog
from grpo_rl.envs.guards.guard import in_thread
from grpo_rl.waits.registry import waiting

IDLE_S = 0.05
"""Seconds that one wait for finished replies takes while the engine has nothing to do."""


@dataclass(eq=False)
class Trajectory:
    """One conversation: its tokens behind the prompt, and for each what training needs to know of it.

    Args:
        row: of the data, which the conversation is about; ``where`` names it in messages.
        kept: the kept sets of each turn and reply, if it has any, and its number of tokens.
        trainable: which tokens the policy chose; a reply's are not.
        turn_starts: where each turn of the policy begins in ``ids``.
        routes: experts of all tokens, the prompt's and the replies' too, from the last turn, which read them all.
        truncated: the policy reached a token limit before it was done.
        dropped: why there is nothing to train on; None where there is.
    """

    row: dict
    where: str
    prompt_ids: Sequence[int]
    dialog: Dialog
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[tuple[Kept | None, int]] = field(default_factory=list)
    trainable: list[bool] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    routes: torch.Tensor | None = None
    truncated: bool = False
    dropped: Failure | None = None
    replying_since: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole conversation, as the engine sees it."""
        return len(self.prompt_ids) + len(self.ids)

    def add_turn(self, samples: Samples, text: str, calls: Sequence[dict[str, Any]] = ()) -> None:
        """Appends a turn of the policy: its tokens, its text, and its calls as OpenAI's ``tool_calls``."""
        ids = samples.response_ids.tolist()
        self.dialog.say(text, calls)
        self.truncated = bool(samples.truncated[0])
        self.turn_starts.append(len(self.ids))
        self.ids += ids
        self.log_probs += samples.log_probs.tolist()
        self.versions += samples.versions.tolist()
        self.kept.append((samples.kept, len(ids)))
        self.trainable += [True] * len(ids)
        if samples.routes is not None and samples.prompt_routes is not None:
            self.routes = torch.cat([samples.prompt_routes, samples.routes])

    def add_reply(self, ids: Sequence[int]) -> None:
        """Appends a reply: tokens that the policy reads and did not choose."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.versions += [self.versions[-1] if self.versions else 0] * len(ids)
        self.kept.append((None, len(ids)))
        self.trainable += [False] * len(ids)


def play(env: LLMEnv, engine: Sampler, sampling: Sampling, trajectories: Sequence[Trajectory]) -> None:
    """Plays each conversation to its end, or until it is dropped.

    Args:
        env: whose task replies.
        engine: samples one turn at a time, many conversations at once.
        sampling: of each turn.
        trajectories: conversations that hold their prompts alone.
    """
    _Player(env, engine, sampling).play(trajectories)


def begin(env: LLMEnv, row: dict, where: str, prompt_ids: Sequence[int]) -> Trajectory:
    """A conversation that has only its prompt."""
    return Trajectory(row, where, prompt_ids, Dialog(env.task.prompt(row)))


class _Player:
    def __init__(self, env: LLMEnv, engine: Sampler, sampling: Sampling) -> None:
        self._env, self._engine, self._sampling = env, engine, sampling
        self._open: dict[int, Trajectory] = {}
        self._in_engine: set[int] = set()
        self._replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._arrived: dict[int, Any] = {}
        self._in_rounds = isinstance(engine, StepByGenerate) and engine.in_rounds

    def play(self, trajectories: Sequence[Trajectory]) -> None:
        self._open = dict(enumerate(trajectories))
        try:
            for i in self._open:
                self._submit(i)
            while self._open:
                for i, samples in self._engine.step() if self._in_engine else ():
                    self._in_engine.discard(i)
                    self._on_turn(i, samples)
                self._receive()
                if self._in_rounds and len(self._arrived) < len(self._open):
                    continue
                for i in sorted(self._arrived):
                    self._on_reply(i, self._arrived.pop(i))
        finally:
            self._engine.abort()

    def _submit(self, i: int) -> None:
        trajectory = self._open[i]
        sampling = turn_sampling(trajectory, self._sampling, self._engine.max_model_len)
        self._engine.submit(i, [*trajectory.prompt_ids, *trajectory.ids], sampling)
        self._in_engine.add(i)

    def _on_turn(self, i: int, samples: Samples) -> None:
        trajectory, env = self._open[i], self._env
        trajectory.add_turn(samples, *env.read_turn(samples.response_ids, trajectory.row))
        if trajectory.truncated:
            del self._open[i]  # the turn has no end: a reply would go into the middle of a sentence
            return
        trajectory.replying_since = time.monotonic()
        replies = self._replies
        in_thread(lambda: replies.put((i, _outcome(lambda: _replied(env, trajectory)))))

    def _receive(self) -> None:
        """Takes replies that are there or overdue; waits a moment for one where the engine has nothing to do."""
        arrived: dict[int, Any] = {}
        try:
            if not self._in_engine:
                arrived.update([self._replies.get(timeout=IDLE_S)])
            while True:
                arrived.update([self._replies.get_nowait()])
        except queue.Empty:
            pass
        deadline_s, now = self._env.guard.deadline_s, time.monotonic()
        for i, trajectory in self._open.items():
            if trajectory.replying_since and now - trajectory.replying_since > deadline_s:
                arrived.setdefault(i, TimeoutError(f"no reply within {deadline_s:g} s"))
        for i, reply in arrived.items():
            if i in self._open:
                self._arrived.setdefault(i, reply)

    def _on_reply(self, i: int, reply: Any) -> None:
        trajectory = self._open[i]
        trajectory.replying_since = None
        if _take_reply(self._env, trajectory, reply, self._engine.max_model_len):
            self._submit(i)
        else:
            del self._open[i]


def turn_sampling(trajectory: Trajectory, sampling: Sampling, max_model_len: int) -> Sampling:
    """Sampling settings of the next turn, shortened to the tokens that are left in the context."""
    limit = min(sampling.max_new_tokens, max_model_len - trajectory.num_tokens)
    return replace(sampling, max_new_tokens=limit, min_new_tokens=min(sampling.min_new_tokens, limit))


def _replied(env: LLMEnv, trajectory: Trajectory) -> tuple[Messages, list[int]] | None:
    """The task's reply to the last turn, and its ids; None where the conversation is over.

    Called in a thread that may be left behind, so that neither costs the engine a moment; it changes no token.
    """
    reply = trajectory.dialog.reply(env.task, trajectory.row, env.max_turns)
    if reply is None:
        return None
    return reply, env.encode_reply(reply, trajectory.ids[-1], trajectory.dialog.calls)


def _take_reply(env: LLMEnv, trajectory: Trajectory, reply: Any, max_model_len: int) -> bool:
    """True if the policy has another turn after this reply, which is appended.

    Args:
        reply: messages and their ids; None where the conversation is over; or the exception in the place of them.
    """
    if reply is None:
        return False
    if isinstance(reply, Exception):
        trajectory.dropped = _failure(env, trajectory, reply)
        return False
    messages, ids = reply
    if trajectory.num_tokens + len(ids) >= max_model_len:
        trajectory.truncated = True  # the policy never reads the reply
        return False
    trajectory.dialog.hear(messages)
    trajectory.add_reply(ids)
    return True


def _failure(env: LLMEnv, trajectory: Trajectory, error: Exception) -> Failure:
    where = f"{trajectory.where}, turn {trajectory.dialog.turns}"
    message = f"{type(env.task).__name__}.reply failed on {where}: {one_line(error)}"
    return Failure("timeout" if isinstance(error, TimeoutError) else "error", message)


async def converse(
    env: LLMEnv,
    trajectory: Trajectory,
    ask: Callable[[Sequence[int], Sampling], Awaitable[Samples]],
    sampling: Sampling,
    max_model_len: int,
) -> None:
    """Plays one conversation to its end, or until it is dropped; as :func:`play`, on an event loop.

    Args:
        ask: samples a turn.
    """
    goes_on = True
    while goes_on:
        samples = await ask(
            [*trajectory.prompt_ids, *trajectory.ids], turn_sampling(trajectory, sampling, max_model_len)
        )
        trajectory.add_turn(samples, *env.read_turn(samples.response_ids, trajectory.row))
        if trajectory.truncated:
            return
        goes_on = _take_reply(env, trajectory, await _reply(env, trajectory), max_model_len)


async def _reply(env: LLMEnv, trajectory: Trajectory) -> Any:
    """The reply with its ids, or the exception in its place; a thread that is late is abandoned."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        outcome = _outcome(lambda: _replied(env, trajectory))
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits any more
            loop.call_soon_threadsafe(reply.set_result, outcome)

    in_thread(call)
    deadline_s = env.guard.deadline_s
    with waiting("the task's reply", deadline_s=deadline_s):
        done, _ = await asyncio.wait({reply}, timeout=deadline_s)
    return reply.result() if done else TimeoutError(f"no reply within {deadline_s:g} s")


def _outcome(call: Callable[[], Any]) -> Any:
    """The call's result, or the exception that it raised."""
    try:
        return call()
    except Exception as error:
        return error
    except BaseException as error:  # a tool that calls sys.exit() ends its conversation, not the run
        return RuntimeError(one_line(error))


def judge(env: LLMEnv, group: Sequence[Trajectory]) -> list[Reward | Failure]:
    """The reward of each conversation about one row, or why it has none."""
    env.guard.record([trajectory.dropped for trajectory in group if trajectory.dropped], group[0].row)
    whole = [trajectory.dialog.messages for trajectory in group if not trajectory.dropped]
    rewards = iter(env.guard.score_dialogs(group[0].row, whole, group[0].where))
    return [trajectory.dropped or next(rewards) for trajectory in group]


def group_of_trajectories(prompt: Prompt, trajectories: Sequence[Trajectory]) -> Group:
    """The conversations about one prompt as a group, not yet rewarded.

    >>> t = Trajectory({}, "row 0", [1], Dialog([]))
    >>> t.add_turn(Samples.from_lists([[5]], [[-0.5]], [False], version=3), "hm"); t.add_reply([8, 9])
    >>> group = group_of_trajectories(Prompt(0, 0, "?", torch.tensor([1])), [t, t])
    >>> group.response_ids.tolist(), group.trainable.tolist(), group.offsets.tolist()
    ([5, 8, 9, 5, 8, 9], [True, False, False, True, False, False], [0, 3, 6])
    """
    samples = Samples.from_lists(
        [t.ids for t in trajectories], [t.log_probs for t in trajectories], [t.truncated for t in trajectories], 0
    )
    kept = Kept.joined(part for t in trajectories for part in t.kept)
    return replace(
        group_of_samples(prompt, samples),
        kept_ids=kept and kept.ids,
        kept_counts=kept and kept.counts,
        versions=torch.tensor([version for t in trajectories for version in t.versions], dtype=torch.long),
        trainable=torch.tensor([chosen for t in trajectories for chosen in t.trainable], dtype=torch.bool),
        **_routes(trajectories),
    )


def _routes(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """The group's routes, if they were recorded; a conversation may have ended with a reply that was never read."""
    known = [t.routes for t in trajectories if t.routes is not None]
    if not known:
        return {}
    prompt = len(trajectories[0].prompt_ids)
    whole = []
    for t in trajectories:
        routes = known[0][:0] if t.routes is None else t.routes[prompt:]
        missing = len(t.ids) - len(routes)
        whole.append(torch.cat([routes, known[0].new_full((missing, *known[0].shape[1:]), NO_ROUTE)]))
    return {"routes": torch.cat(whole), "prompt_routes": known[0][:prompt]}
