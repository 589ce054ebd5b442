"""Builds what plays the sessions of ``env.dataset=agent``."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_rl.agents.messages import ToolParser
from grpo_rl.agents.programs import Function, Program
from grpo_rl.agents.recorder import Limits
from grpo_rl.by_name import is_name, object_by_name
from grpo_rl.collectors.agents import AgentGroups, AgentSettings
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.settings.derived import responses_at_once
from grpo_rl.settings.schema import Settings


def make_agent_groups(settings: Settings, env: LLMEnv) -> AgentGroups | None:
    """The groups of agents' sessions; None where ``env.dataset`` is another task.

    Raises:
        ValueError: there is no such program, function or parser.
    """
    if settings.env.dataset != "agent":
        return None
    own = settings.env.task
    deadline_s = own["deadline_s"]
    if own["command"]:
        agent = Program(own["command"], deadline_s)
    else:
        agent = Function(own["agent"], responses_at_once(settings), deadline_s)
    return AgentGroups(
        env,
        AgentSettings(
            agent=agent,
            model=Path(settings.model.name).name,
            deadline_s=deadline_s,
            limits=Limits(own["max_calls"], own["max_session_tokens"]),
            parser=make_parser(own["tool_parser"], env.tokenizer),
            tells=own["scorer"] is None,
        ),
        Sampling(**settings.sampling),
        settings.inference_model.max_model_len,
    )


def make_parser(name: str | None, tokenizer: PreTrainedTokenizerBase) -> ToolParser | None:
    """vLLM's parser of tool calls by its name, or one of the user's own; None where none is asked for.

    Raises:
        ValueError: there is no such parser.
    """
    if name is None:
        return None
    if is_name(name):
        return object_by_name(name, "env.tool_parser", inspect.isclass)(tokenizer)
    return importlib.import_module("grpo_rl.engines.vllm.tool_parsers").tool_parser(name, tokenizer)
