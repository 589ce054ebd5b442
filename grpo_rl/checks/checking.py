"""All findings on a model, in the order in which each makes the next worth looking for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_rl.checks.finding import Finding, Unfit, unfit
from grpo_rl.checks.model import unloaded_findings
from grpo_rl.checks.scores import loaded_findings
from grpo_rl.planner.scenario import config_source
from grpo_rl.policies.hub import resolve_model
from grpo_rl.settings.schema import Settings

PREVENTING = ("config", "gate", "tokenizer", "written files", "chat template", "context", "memory")
"""Findings that have to be mended before the weights are worth loading."""


def findings(settings: Settings, quick: bool = False) -> Iterator[Finding]:
    """The findings on ``model.name``.

    Args:
        quick: read no weights.
    """
    name = settings.model.name
    try:
        with unfit("model"):
            source = config_source(name) if quick else str(resolve_model(name))
    except Unfit as error:
        yield error.finding
        return
    yield Finding("OK", "model", source)
    prevented = False
    for finding in unloaded_findings(settings, source):
        yield finding
        prevented = prevented or (finding.kind == "FIX" and finding.about in PREVENTING)
    if not quick and not prevented:
        yield from loaded_findings(settings, Path(source))
