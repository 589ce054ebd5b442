"""Checks of the loggers: their packages, and where Weights & Biases is online, its key."""

from __future__ import annotations

import base64
import json
import netrc
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.monitor.logger_names import logger_names

SERVER, SERVER_S = "https://api.wandb.ai", 10.0
REMEDY = "set logger.mode=offline (wandb sync uploads it later) or logger.backend=none"


def loggers(case: Case) -> Iterator[Finding]:
    """Imports what the loggers need; asks W&B's server alone, and only online."""
    given = case.read.logger
    names = logger_names(given.backend)
    from grpo_rl.monitor.loggers import check_loggers  # which imports torch

    check_loggers(given.backend, given.settings)
    if not names:
        yield Finding("OK", "loggers", "none; metrics.jsonl and the report are always written")
        return
    others = [name for name in names if name != "wandb"]
    if others:
        yield Finding("OK", "loggers", f"{', '.join(others)} can be imported")
    if "wandb" in names:
        mode = given.settings.get("wandb", {}).get("mode", given.mode)
        yield _wandb(str(mode))


def _wandb(mode: str) -> Finding:
    if mode != "online":
        return Finding("OK", "wandb", f"{mode}: no key is needed, and nothing is sent; `wandb sync` uploads it later")
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return Finding("SKIP", "wandb", "online by an identity token, which W&B's own library alone can judge")
    server = os.environ.get("WANDB_BASE_URL", SERVER).rstrip("/")
    key = os.environ.get("WANDB_API_KEY") or _stored_key(urllib.parse.urlparse(server).hostname or "")
    if not key:
        return Finding("FIX", "wandb", f"online, and no key is here: wandb login, or WANDB_API_KEY; or {REMEDY}")
    query = json.dumps({"query": "query { viewer { username } }"}).encode()
    word = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Authorization": f"Basic {word}", "Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(f"{server}/graphql", query, headers)
        with urllib.request.urlopen(asked, timeout=SERVER_S) as reply:
            viewer = (json.load(reply).get("data") or {}).get("viewer")
    except urllib.error.HTTPError as error:
        why = "the key is refused" if error.code in (401, 403) else f"the server says {error.code} {error.reason}"
        return Finding("FIX", "wandb", f"online, and {why} at {server}: wandb login --relogin; or {REMEDY}")
    except (OSError, ValueError, AttributeError) as error:
        return Finding("FIX", "wandb", f"online, and {server} can't be reached ({error}); {REMEDY}")
    if not viewer:
        return Finding(
            "FIX", "wandb", f"online, and the key is refused at {server}: wandb login --relogin; or {REMEDY}"
        )
    return Finding("OK", "wandb", f"online as {viewer.get('username')} at {server}")


def _stored_key(host: str) -> str | None:
    """The key that `wandb login` has stored."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return found[2] if found else None
