"""Agents: the agent of ``env.dataset=agent`` and the parts that play its sessions; only its runs import it."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from grpo_rl.agents.programs import Function, Program
from grpo_rl.agents.recorder import Limits
from grpo_rl.assembly.environment import tool_parser_of
from grpo_rl.collectors.agent_sessions import AgentSessions, AgentSettings, Played
from grpo_rl.collectors.agents import AgentGroups, SteppedGroups
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.engines.loop_thread import LoopThread, SteppedEngine
from grpo_rl.envs.base import Failure, LLMEnv, Reward
from grpo_rl.settings.schema import Settings
from grpo_rl.training.evaluate import Evaluation, Sessions, judged


class Agents:
    """The agent of a run, which starts no process before its first session."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> None:
        own = settings.env.task
        deadline_s = own["deadline_s"]
        if own["command"]:
            agent = Program(own["command"], deadline_s, own["pass_environment"])
        else:
            agent = Function(own["agent"], deadline_s, own["pass_environment"])
        make_parser = tool_parser_of(settings)
        if settings.env.tool_parser is not None:
            make_parser(tokenizer, [])  # a wrong name is refused before anything starts
        self._sampling = Sampling(**settings.sampling)
        self._max_model_len = settings.inference_model.max_model_len
        self._settings = AgentSettings(
            agent=agent,
            model=Path(settings.model.name).name,
            deadline_s=deadline_s,
            limits=Limits(own["max_calls"], own["max_session_tokens"]),
            make_parser=make_parser,
            tells=own["scorer"] is None,
            max_sessions=own["max_sessions"],
        )
        self.held_out = HeldOutSessions(self._settings)

    def groups(self, env: LLMEnv) -> AgentGroups:
        """The source of groups of a run that samples during training."""
        return AgentGroups(env, self._settings, self._sampling, self._max_model_len)

    def stepped_groups(self, env: LLMEnv, engine: Sampler) -> SteppedGroups:
        """The source of groups of a run that samples and trains in turns."""
        return SteppedGroups(self.groups(env), engine)

    def close(self) -> None:
        """Kills the agent's processes."""
        self._settings.agent.close()


class HeldOutSessions(Sessions):
    """Plays sessions about all held-out rows at the same time; the results of one row are next to each other.

    They have an endpoint and a guard of their own: nothing of them is counted or trained on with the sessions of
    training. Their problems are logged once, where those of scorers are.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings

    @override
    def for_now(self) -> AbstractContextManager[None]:
        return self._settings.agent.for_now()

    @override
    def evaluate(
        self, env: LLMEnv, engine: Sampler, rows: Sequence[dict[str, Any]], sampling: Sampling, samples: int
    ) -> Evaluation:
        guard, stepped = env.held_out_guard, SteppedEngine(engine)
        sessions = AgentSessions(env, self._settings, sampling, engine.max_model_len, guard)
        named = [(f"held-out row {i}", row) for i, row in enumerate(rows)]

        async def all_rows() -> list[list[Played]]:
            seeds = [[i * 100_003 + number for number in range(samples)] for i in range(len(rows))]
            playing = (sessions.play(row, where, seeds[i], stepped.sample) for i, (where, row) in enumerate(named))
            return list(await asyncio.gather(*playing))

        loop = LoopThread()
        try:
            by_row = stepped.run(loop.start(all_rows()))
        finally:
            loop.run(sessions.close())
            loop.close()
        results: list[Reward | Failure] = []
        for (where, row), own in zip(named, by_row, strict=True):
            results += sessions.judge(row, where, own)
        assert len(results) == len(rows) * samples
        for kind, text in sessions.told().items():
            guard.tell_once(kind, text)
        played = [one for own in by_row for one in own]
        lasts = [one.session.responses[-1] if one.session.responses else None for one in played]
        dialogs = [one.dialog for one in played]
        prompts = [env.task.prompt(row)[-1]["content"] for row in rows for _ in range(samples)]
        for i, last in enumerate(lasts):
            if last:  # the prompt of the first call which the session's last one extends
                prompts[i] = env.decode_prompt(last.chain[0].prompt_ids)
        return judged(
            env.task,
            results,
            prompts,
            [dialog.messages for dialog in dialogs],
            [dialog.text for dialog in dialogs],
            [one.session.counts["tokens"] for one in played],
            [last is not None and last.finish_reason == "length" for last in lasts],
            samples,
        )
