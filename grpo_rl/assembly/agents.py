"""Agents: the agent of ``env.dataset=agent`` and the parts that play its sessions; only its runs import it."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_rl.agents.programs import Function, Program
from grpo_rl.agents.recorder import Limits
from grpo_rl.assembly.environment import tool_parser_of
from grpo_rl.collectors.agent_sessions import AgentSettings
from grpo_rl.collectors.agents import AgentGroups, SteppedGroups
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.settings.schema import Settings
from grpo_rl.training.held_out_sessions import HeldOutSessions


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
