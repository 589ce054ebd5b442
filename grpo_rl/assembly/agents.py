"""Builds the agent of ``env.dataset=agent``."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_rl.agents.programs import Function, Program
from grpo_rl.agents.recorder import Limits
from grpo_rl.assembly.environment import tool_parser_of
from grpo_rl.collectors.agent_sessions import AgentSettings
from grpo_rl.settings.schema import Settings


def make_agent(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> AgentSettings | None:
    """The agent, which starts no process before its first session; None where ``env.dataset`` is another task.

    Raises:
        ValueError: there is no such program, function, parser or variable.
    """
    if settings.env.dataset != "agent":
        return None
    own = settings.env.task
    deadline_s = own["deadline_s"]
    if own["command"]:
        agent = Program(own["command"], deadline_s, own["pass_environment"])
    else:
        agent = Function(own["agent"], deadline_s, own["pass_environment"])
    make_parser = tool_parser_of(settings)
    if settings.env.tool_parser is not None:
        make_parser(tokenizer, [])  # a wrong name is told before anything starts
    return AgentSettings(
        agent=agent,
        model=Path(settings.model.name).name,
        deadline_s=deadline_s,
        limits=Limits(own["max_calls"], own["max_session_tokens"]),
        make_parser=make_parser,
        tells=own["scorer"] is None,
        max_sessions=own["max_sessions"],
    )
