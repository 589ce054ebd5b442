"""Constraints between the settings of ``env.dataset=agent``."""

from __future__ import annotations

from grpo_rl.by_name import is_name
from grpo_rl.settings.sections import Sections
from grpo_rl.settings.tasks import MIXTURE, TASKS

EPISODES = ("openenv", "verifiers")
"""Tasks that reward the steps of an episode, which an agent's session is not."""


def check_agent(settings: Sections) -> None:
    """Refuses settings of an agent that contradict each other.

    Raises:
        ValueError: there is no agent, or two; or no rows; or the scorer is no task, or one of episodes; or a
            curriculum is asked for.
    """
    if settings.env.dataset != "agent":
        return
    own = settings.env.task
    if bool(own["command"]) == bool(own["agent"]):
        raise ValueError(
            f"env.command={own['command']} and env.agent={own['agent']}; set one of them: a program, or "
            "package.module:function"
        )
    scorer = own["scorer"]
    if scorer in EPISODES:
        raise ValueError(
            f"env.scorer={scorer} rewards the steps of an episode, and an agent's session is scored by its final "
            f"message; leave env.scorer out and let the agent tell its reward, or train with env.dataset={scorer}"
        )
    names = [name for name in TASKS if name not in ("agent", MIXTURE, *EPISODES)]
    if scorer is not None and not is_name(scorer) and scorer not in names:
        raise ValueError(f"env.scorer={scorer}; it must be {' | '.join(names)} | package.module:Class, or null")
    if scorer is None and not settings.env.path:
        raise ValueError("env.dataset=agent has no rows of its own; set env.path, or env.scorer, whose rows are taken")
    if settings.env.curriculum:
        raise ValueError(
            "env.curriculum counts the rewards of single responses, not of an agent's sessions; leave it out"
        )
