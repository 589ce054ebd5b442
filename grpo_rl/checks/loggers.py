"""Checks of the loggers: their packages, and where Weights & Biases is online, its key."""

from __future__ import annotations

import os
from collections.abc import Iterator

from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.monitor.logger_names import logger_names

SERVER, SERVER_S = "https://api.wandb.ai", 10.0
REMEDY = "set logger.mode=offline (wandb sync uploads it later) or logger.backend=none"


def loggers(case: Case) -> Iterator[Finding]:
    """Imports what the loggers need; asks W&B's server alone, and only online."""
    from grpo_rl.monitor.loggers import check_loggers  # which imports torch

    given, names = case.read.logger, logger_names(case.read.logger.backend)
    check_loggers(given.backend, given.settings)
    text = f"{', '.join(names)} can be imported" if names else "none"
    yield Finding("OK", "loggers", f"{text}; metrics.jsonl and the report are always written")
    if "wandb" in names:
        yield _wandb(str(given.settings.get("wandb", {}).get("mode", given.mode)))


def _wandb(mode: str) -> Finding:
    import requests  # which wandb brings

    if mode != "online":
        return Finding("OK", "wandb", f"{mode}: no key is needed, and nothing is sent; `wandb sync` uploads it later")
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return Finding("SKIP", "wandb", "online by an identity token, which W&B's own library alone can judge")
    server = os.environ.get("WANDB_BASE_URL", SERVER).rstrip("/")
    stored = requests.utils.get_netrc_auth(server)  # by `wandb login`
    key = os.environ.get("WANDB_API_KEY") or (stored and stored[1])
    why = "no key is here"
    if key:
        try:
            query = {"query": "query { viewer { username } }"}
            reply = requests.post(f"{server}/graphql", json=query, auth=("api", key), timeout=SERVER_S)
            if reply.ok and (viewer := reply.json()["data"]["viewer"]):
                return Finding("OK", "wandb", f"online as {viewer['username']} at {server}")
            status = f"{reply.status_code} {reply.reason}"
            refused = reply.ok or reply.status_code in (401, 403)  # ok, and no viewer: the key is no one's
            why = f"the key is refused at {server} ({status})" if refused else f"{server} answers {status}"
        except (requests.RequestException, LookupError, TypeError) as error:
            why = f"{server} can't be reached ({error})"
    return Finding("FIX", "wandb", f"online, and {why}: wandb login --relogin, or WANDB_API_KEY; or {REMEDY}")
