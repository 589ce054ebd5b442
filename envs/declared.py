"""Declarations of a task's settings: what the config says of a parameter, in the ``Annotated`` of its type."""

from typing import Annotated, Any

from pydantic import Field


def means(meaning: str, *, of_reward: bool = False, **limits: float) -> Any:
    """The meaning and the limits of a setting.

    Args:
        of_reward: whether it stands in ``env.reward``, next to the weights.
        limits: ``ge``, ``gt``, ``le`` or ``lt``, as pydantic has them.
    """
    return Field(description=meaning, json_schema_extra={"of_reward": of_reward}, **limits)


def weight(meaning: str) -> Any:
    """The meaning of a weight of the reward."""
    return means(f"weight: {meaning}", of_reward=True)


SystemPrompt = Annotated[str | None, means("the system message; null: none")]
