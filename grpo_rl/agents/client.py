"""The client's settings and the function that an agent's process calls: with few imports, for many processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from grpo_rl.by_name import object_by_name

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Client:
    """Settings of an OpenAI client, for one session.

    Args:
        base_url: of the endpoint, up to and with ``/v1``.
        api_key: names the session.
        model: the served model's name.
    """

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class NamedFunction:
    """The function, found where it is called."""

    name: str

    def __call__(self, client: dict[str, str], row: dict[str, Any]) -> object:
        os.environ.update(without_proxy())
        return object_by_name(self.name, "env.agent")(Client(**client), row)


def without_proxy() -> dict[str, str]:
    """Variables that keep clients from sending the endpoint's calls, and the session's key, to a proxy."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = given if given == "*" or LOOPBACK in given.split(",") else f"{given},{LOOPBACK}".strip(",")
    return {"no_proxy": hosts, "NO_PROXY": hosts}
