"""The client's settings and the function that an agent's process calls: with few imports, for many processes."""

from dataclasses import dataclass
from typing import Any

from grpo_rl.by_name import object_by_name


@dataclass(frozen=True)
class Client:
    """Settings of an OpenAI client, for one session.

    Args:
        base_url: of the endpoint, including ``/v1``.
        api_key: names the session.
        model: the served model's name.
    """

    base_url: str
    api_key: str
    model: str


def call_named(name: str, client: dict[str, str], row: dict[str, Any]) -> object:
    """The result of the function of this name, which is found where it is called."""
    return object_by_name(name, "env.agent")(Client(**client), row)
