"""Revisions: the commits of the hub that a run's model and data are of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.envs.sources import LOADED, repository_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.settings.tasks import MIXTURE

COMMIT = re.compile(r"[0-9a-f]{40}")


def revisions(model: Path, env: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """The commits that ``summary.json`` names; None where none is known, as of files of one's own.

    Args:
        model: the folder that the initial model was loaded from.
        env: the settings of the data, which have been read.
        before: these entries at the run's first start, where it resumes: its model's commit stays.
    """
    data = repository(env)
    return {
        "model_revision": (before or {}).get("model_revision") or model_revision(model),
        "data_revision": LOADED.get((data, env["revision"])) if data else None,
    }


def repository(env: Mapping[str, Any]) -> str | None:
    """The hub's data set that a run trains on, ``owner/name``; None: it trains on files or on rows that its task makes.

    A mixture has several, and none that could be named here.

    >>> repository({"dataset": "math", "path": None}), repository({"dataset": "math", "path": "hf:owner/name:subset"})
    ('DigitalLearningGmbH/MATH-lighteval', 'owner/name')
    """
    path = env.get("path")
    if env["dataset"] == MIXTURE:
        return None
    return repository_of(path) if path else task_spec(env["dataset"]).hub


def model_revision(folder: Path) -> str | None:
    """The commit of a model's folder in the hub's cache; None for another folder.

    >>> commit = "0123456789abcdef0123456789abcdef01234567"
    >>> model_revision(Path("hub/models--org--M/snapshots") / commit) == commit, model_revision(Path("runs/model"))
    (True, None)
    """
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else None
