"""AgentSessions: sessions of agents about a row, played side by side and judged."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rl.agents.programs import Agent, AgentError, Client
from grpo_rl.agents.recorder import Limits, Sample, Session
from grpo_rl.agents.requests import MakeParser, finite
from grpo_rl.agents.server import ChatServer
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.agent import TOLD
from grpo_rl.envs.base import Failure, LLMEnv, Reward
from grpo_rl.envs.chat import Dialog
from grpo_rl.envs.guards.guard import ScoreGuard
from grpo_rl.envs.task import Messages, last_said, plays_turns
from grpo_rl.waits import waiting


@dataclass(frozen=True, eq=False)
class AgentSettings:
    """An agent, and what holds for its sessions.

    Args:
        model: the policy's name for its client.
        deadline_s: seconds of a session, for messages: the agent itself keeps them.
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
class Played:
    """One session, once it is over, and its number among those about its row."""

    number: int
    session: Session
    told: float | None = None
    final: str | None = None
    failure: Failure | None = None

    @property
    def dialog(self) -> Dialog:
        """The conversation that is scored: that of the last response, and the agent's own final text, if it has one."""
        own = [] if self.final is None else [{"role": "assistant", "content": self.final}]
        if not self.session.responses:
            return Dialog(own)
        last = self.session.responses[-1]
        return Dialog([*last.messages, *own], prompt_messages=len(last.chain[0].messages) - 1)


class AgentSessions:
    """Plays sessions and judges them; one whose agent fails, is late or is killed has a failure instead of a reward.

    Args:
        env: environment whose task scores the sessions.
        sampling: of each response, for all that requests leave open.
        max_model_len: most tokens of a prompt and its response.
        guard: scores the sessions and counts their failures; that of training by default.
    """

    def __init__(
        self,
        env: LLMEnv,
        settings: AgentSettings,
        sampling: Sampling,
        max_model_len: int,
        guard: ScoreGuard | None = None,
    ) -> None:
        self._env, self._settings, self._max_model_len = env, settings, max_model_len
        self._guard = guard or env.guard
        self._server = ChatServer(
            settings.model, env.tokenizer, sampling, max_model_len=max_model_len, takes_rewards=settings.tells
        )
        self._room = asyncio.Semaphore(settings.max_sessions)
        self._starting: asyncio.Task[None] | None = None
        self._problems: dict[str, str] = {}
        self._noted: set[str] = set()

    async def play(self, row: Mapping[str, Any], where: str, seeds: Sequence[int], sample: Sample) -> list[Played]:
        """A session for each seed, all about one row.

        Args:
            where: names the row in messages.
            seeds: mixed into those of the sessions' requests.
            sample: what it raises, but for a ValueError, ends the sessions that asked for it.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._starting)  # sessions that are cancelled leave the server to the others
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def watched(ids: Sequence[int], sampling: Sampling) -> Samples:
            try:
                return await sample(ids, sampling)
            except ValueError:  # the request asks for what the engine can't do: its client gets the message
                raise
            except Exception as error:  # the engine is lost: the caller has to know
                if not broken.done():
                    broken.set_exception(error)
                raise

        async def one(number: int, seed: int) -> Played:
            async with self._room:
                with waiting("the sessions of agents", where, self._settings.deadline_s + 60):
                    return await self._session(row, where, number, seed, watched)

        sessions = [asyncio.ensure_future(one(i, seed)) for i, seed in enumerate(seeds)]
        played = asyncio.gather(*sessions)
        try:
            await asyncio.wait({played, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await broken
            return await played
        finally:
            broken.cancel()
            for session in sessions:
                session.cancel()

    async def _session(self, row: Mapping[str, Any], where: str, number: int, seed: int, sample: Sample) -> Played:
        tokenizer, settings = self._env.tokenizer, self._settings
        session = Session(tokenizer, sample, self._max_model_len, settings.make_parser, settings.limits, seed)
        played, key = Played(number, session), self._server.open(session)
        try:
            result = await settings.agent.play(Client(self._server.url, key, settings.model), row)
            if isinstance(result, str):
                played.final = result
            elif result is not None:
                self._tell(session, result)
        except (AgentError, TimeoutError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "error"
            played.failure = Failure(kind, f"the agent failed on {where}, session {number}: {error}")
        finally:
            self._server.end(key)
            played.told = session.reward
        return played

    def _tell(self, session: Session, result: object) -> None:
        number = finite(result)
        if number is None:
            raise AgentError(f"its result is a {type(result).__name__}; it must be a finite number, a text or None")
        if not self._settings.tells:
            raise AgentError("it returned a number, and env.scorer gives the reward; return a text or None")
        session.reward = number

    def judge(self, row: dict, where: str, sessions: Sequence[Played]) -> list[Reward | Failure]:
        """The reward of each session about one row, or why it has none.

        Raises:
            ScoreError: too many have none.
        """
        for played in sessions:
            this = f"{where}, session {played.number}"
            if played.failure is None and not played.session.responses:
                played.failure = Failure("error", f"the agent made no call of the policy on {this}")
            elif played.failure is None and self._settings.tells and played.told is None:
                played.failure = Failure("error", f"the agent sent no reward on {this}; POST it to /v1/reward")
            self._problems = played.session.problems | self._problems
        self._guard.record([played.failure for played in sessions if played.failure])
        scored = iter(self._scored(row, where, [played for played in sessions if played.failure is None]))
        return [played.failure or next(scored) for played in sessions]

    def _scored(self, row: dict, where: str, sessions: Sequence[Played]) -> list[Reward | Failure]:
        guard = self._guard
        if not self._settings.tells:
            return guard.score_dialogs(row, [self._judged(row, played) for played in sessions], where)
        scored: list[Reward | Failure] = []
        for played in sessions:
            scored += guard.score_dialogs({**row, TOLD: played.told}, [played.dialog.messages], where)
        return scored

    def _judged(self, row: dict, played: Played) -> Messages:
        """The messages that the scorer reads of a session: the conversation, or its final message alone."""
        messages, task = played.dialog.messages, self._env.task
        if not plays_turns(task):
            return messages
        # Such a task looks for the policy's turns behind its own prompt, which no agent's conversation begins with.
        return [*task.prompt(row), {"role": "assistant", "content": last_said(messages)}]

    def told(self) -> dict[str, str]:
        """Fields of requests that were left aside or replaced, and problems of sessions, by kind."""
        notes = {note: f"In an agent's request, {note}" for note in list(self._server.notes)}
        return notes | self._problems | self._server.problems

    def events(self) -> list[str]:
        """The texts of :meth:`told`, each kind once."""
        told = self.told()
        new = [note for note in told if note not in self._noted]
        self._noted.update(new)
        return [told[note] for note in new]

    async def close(self) -> None:
        """Ends the server; the agent stays."""
        await self._server.close()
