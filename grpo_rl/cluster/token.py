"""Has Ray ask everyone for a token. Imported before ray, which reads this once, when it is imported.

A user's own choice (``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``) stays. Where
there is no token, one is made for this process and for the cluster that it starts. See
https://docs.ray.io/en/latest/ray-security/token-auth.html.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from pathlib import Path

log = logging.getLogger(__name__)


def ask_for_tokens() -> None:
    """Sets the environment variables that Ray reads."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if os.environ["RAY_AUTH_MODE"] == "token" and not given and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


if "ray" not in sys.modules:
    ask_for_tokens()
elif "RAY_AUTH_MODE" not in os.environ:  # a user's choice, or, in Ray's own processes, that of their cluster
    log.warning("ray was imported before grpo_rl.cluster.token: a cluster that is started here asks nobody for a token")
