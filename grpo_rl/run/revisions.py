"""Revisions: the commits of the hub that a run's model and data are of, as this machine's cache of the hub has them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from grpo_rl.envs.sources import repository_of
from grpo_rl.envs.spec import task_spec

COMMIT = re.compile(r"[0-9a-f]{40}")


def revisions(model: Path, env: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """The commits that ``summary.json`` names; None where none is known, as of files of one's own.

    Args:
        model: the folder that the initial model was loaded from.
        env: the settings of the data, which have been read.
        before: these entries at the run's first start, where it resumes: its model's commit stays.
    """
    own = repository_of(env["path"]) if env["path"] else own_repository(env["dataset"])
    return {
        "model_revision": (before or {}).get("model_revision") or model_revision(model),
        "data_revision": data_revision(own, env["revision"]) if own else None,
    }


def own_repository(dataset: str) -> str | None:
    """The repository of the hub with a task's own data; None for a task that makes its own."""
    task = importlib.import_module(task_spec(dataset).load_rows.__module__)
    return getattr(task, "HUB_NAME", "").partition(":")[0] or None


def model_revision(folder: Path) -> str | None:
    """The commit of a model's folder in the hub's cache; None for another folder.

    >>> commit = "0123456789abcdef0123456789abcdef01234567"
    >>> model_revision(Path("hub/models--org--M/snapshots") / commit) == commit, model_revision(Path("runs/model"))
    (True, None)
    """
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else None


def data_revision(repository: str, revision: str | None) -> str | None:
    """The commit of a data set that was loaded at a revision: what the cache says that a branch or tag is.

    Loading by the name of a branch or tag writes there, and offline reads there, which commit that is.

    Args:
        revision: None: the main branch.
    """
    if revision and COMMIT.fullmatch(revision):
        return revision
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or constants.DEFAULT_REVISION)).read_text().strip()
    except OSError:
        return None
    return commit if COMMIT.fullmatch(commit) else None
