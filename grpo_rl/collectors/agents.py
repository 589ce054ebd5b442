"""AgentGroups: groups whose responses are the sessions of agents, which call the policy through an endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from grpo_rl.agents.messages import MakeParser, Message
from grpo_rl.agents.programs import Agent, AgentError, Client
from grpo_rl.agents.recorder import Limits, Session
from grpo_rl.agents.requests import finite
from grpo_rl.agents.server import ChatServer
from grpo_rl.collectors.groups import rewarded
from grpo_rl.collectors.sequences import group_of_sequences
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.agent import TOLD
from grpo_rl.envs.base import Failure, LLMEnv, Prompt, Reward
from grpo_rl.waits.registry import waiting


@dataclass(frozen=True, eq=False)
class AgentSettings:
    """An agent, and what holds for its sessions.

    Args:
        agent: plays the sessions.
        model: the policy's name for its client.
        deadline_s: seconds of a session, for messages: the agent itself keeps them.
        limits: of a session.
        make_parser: makes what finds calls of tools in responses.
        tells: the agent tells its reward; otherwise the task scores its final message.
        max_sessions: sessions at the same time; further ones wait for their turn.
    """

    agent: Agent
    model: str
    deadline_s: float
    limits: Limits
    make_parser: MakeParser | None
    tells: bool
    max_sessions: int = 256


@dataclass(eq=False)
class _Played:
    """One session, once it is over, and its number in the group."""

    number: int
    session: Session
    told: float | None = None
    final: str | None = None
    failure: Failure | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation that is scored: that of the last response, and the agent's own final text, if it has one."""
        own = [] if self.final is None else [{"role": "assistant", "content": self.final}]
        return [*self.session.responses[-1].messages, *own]


class AgentGroups:
    """Plays groups of sessions, all at the same time, and judges them.

    A session whose agent fails, is late or is killed is left out of its group, as a response whose scorer failed.

    Args:
        env: environment whose rows the sessions are about, and whose task scores them.
        settings: of the agent.
        sampling: of each response, for all that requests leave open.
        max_model_len: most tokens of a prompt and its response.
    """

    def __init__(self, env: LLMEnv, settings: AgentSettings, sampling: Sampling, max_model_len: int) -> None:
        self._env, self._settings, self._max_model_len = env, settings, max_model_len
        self._server = ChatServer(settings.model, env.tokenizer, sampling, takes_rewards=settings.tells)
        self._room = asyncio.Semaphore(settings.max_sessions)
        self._starting: asyncio.Task[None] | None = None
        self._scorers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")  # scores one group at a time
        self._counts: Counter[str] = Counter()
        self._problems: dict[str, str] = {}
        self._noted: set[str] = set()

    async def play(
        self, prompt: Prompt, group_size: int, sample: Callable[[Sequence[int], Sampling], Awaitable[Samples]]
    ) -> Group | None:
        """The group of one row, with its rewards; None where fewer than two of its sessions have one.

        Args:
            sample: samples one response to a prompt. What it raises, but for a ValueError, ends the group.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._starting)  # a group that is cancelled leaves the server to the others
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def watched(ids: Sequence[int], sampling: Sampling) -> Samples:
            try:
                return await sample(ids, sampling)
            except ValueError:  # the request asks for what the engine can't do: its client is told
                raise
            except Exception as error:  # the engine is lost: whoever asked for the group has to know
                if not broken.done():
                    broken.set_exception(error)
                raise

        async def one(number: int) -> _Played:
            async with self._room:
                with waiting("the sessions of agents", f"row {prompt.row}", self._settings.deadline_s + 60):
                    return await self._session(prompt, number, watched)

        sessions = [asyncio.ensure_future(one(i)) for i in range(group_size)]
        played = asyncio.gather(*sessions)
        try:
            await asyncio.wait({played, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await broken
            found = await played
        finally:
            broken.cancel()
            for session in sessions:
                session.cancel()
        return await asyncio.get_running_loop().run_in_executor(self._scorers, self._judged, prompt, found)

    async def _session(self, prompt: Prompt, number: int, sample: Callable[..., Awaitable[Samples]]) -> _Played:
        env, settings = self._env, self._settings
        seed = prompt.group_id * 100_003 + number
        session = Session(env.tokenizer, sample, self._max_model_len, settings.make_parser, settings.limits, seed)
        played, key = _Played(number, session), self._server.open(session)
        try:
            result = await settings.agent.play(Client(self._server.url, key, settings.model), env.task.rows[prompt.row])
            if isinstance(result, str):
                played.final = result
            elif result is not None:
                self._tell(key, result)
        except (AgentError, TimeoutError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "error"
            played.failure = Failure(kind, f"the agent failed on row {prompt.row}, session {number}: {error}")
        finally:
            played.told = self._server.end(key)
        return played

    def _tell(self, key: str, result: object) -> None:
        number = finite(result)
        if number is None:
            raise AgentError(f"its result is a {type(result).__name__}; it must be a finite number, a text or None")
        if not self._settings.tells:
            raise AgentError("it returned a number, and env.scorer gives the reward; return a text or None")
        self._server.rewards[key] = number

    def _judged(self, prompt: Prompt, sessions: Sequence[_Played]) -> Group | None:
        for played in sessions:
            where = f"row {prompt.row}, session {played.number}"
            if played.failure is None and not played.session.responses:
                played.failure = Failure("error", f"the agent made no call of the policy on {where}")
            elif played.failure is None and self._settings.tells and played.told is None:
                played.failure = Failure("error", f"the agent told no reward on {where}; POST it to /v1/reward")
            self._counts.update(played.session.counts)
            self._problems = played.session.problems | self._problems
        self._counts["sessions"] += len(sessions)
        whole = [played for played in sessions if played.failure is None]
        self._env.guard.record([played.failure for played in sessions if played.failure])
        results = self._scored(prompt, whole)
        kept = [(one, result) for one, result in zip(whole, results, strict=True) if isinstance(result, Reward)]
        if len(kept) < 2:
            return None
        recorded = [(played, result, sequence) for played, result in kept for sequence in played.session.sequences()]
        self._counts["sequences"] += len(recorded)
        # A group has one prompt, of a token at least; a chat template begins all conversations alike, as a rule.
        begin = Counter(sequence.prompt_ids[0] for *_, sequence in recorded).most_common(1)[0][0]
        self._counts["left_out"] += sum(sequence.prompt_ids[0] != begin for *_, sequence in recorded)
        recorded = [entry for entry in recorded if entry[2].prompt_ids[0] == begin]
        if len({played.number for played, *_ in recorded}) < 2:
            return None
        group = group_of_sequences(prompt, [sequence for *_, sequence in recorded])
        group = replace(group, sessions=torch.tensor([played.number for played, *_ in recorded]))
        return rewarded(group, [result for _, result, _ in recorded])

    def _scored(self, prompt: Prompt, sessions: Sequence[_Played]) -> list[Reward | Failure]:
        row, where, guard = self._env.task.rows[prompt.row], f"row {prompt.row}", self._env.guard
        if not self._settings.tells:
            return guard.score_dialogs(row, [played.messages for played in sessions], where)
        scored: list[Reward | Failure] = []
        for played in sessions:
            scored += guard.score_dialogs({**row, TOLD: played.told}, [played.messages], where)
        return scored

    def metrics(self) -> dict[str, float]:
        """Counts of sessions, calls and sequences so far; see `grpo_rl.agents.recorder.Session.counts`."""
        names = ("sessions", "calls", "extended", "rewritten", "branches", "sequences", "left_out")
        return {f"agents/{name}": self._counts[name] for name in names}

    def events(self) -> list[str]:
        """Fields of requests that were left aside or replaced, and problems of sessions, each told once."""
        told = {note: f"In an agent's request, {note}" for note in list(self._server.notes)} | self._problems
        new = [note for note in told if note not in self._noted]
        self._noted.update(new)
        return [told[note] for note in new]

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return dict(self._counts)

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on counting from :meth:`state`."""
        self._counts = Counter(state)

    async def close(self) -> None:
        """Ends sessions under way, and the server."""
        await asyncio.to_thread(self._settings.agent.close)  # it waits until what it kills has ended
        await self._server.close()
        self._scorers.shutdown(wait=False, cancel_futures=True)
