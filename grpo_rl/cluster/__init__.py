"""Many engines run on many nodes; this folder alone imports Ray.

Its import sets Ray's environment, which Ray reads when it is imported itself: clients must present a token. A
user's own choice (``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``, ``~/.ray/auth_token``) stays. Where
there is no token, one is made for this process and for the cluster that it starts. See
https://docs.ray.io/en/latest/ray-security/token-auth.html.
"""

import os
import secrets
import sys

if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    _given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if (
        os.environ["RAY_AUTH_MODE"] == "token"
        and not _given
        and not os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
