"""Origin of a run: its command, the version of the code, a hash of its settings, and the hub's commits that it read."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo_rl
from grpo_rl.envs.sources import LOADED, repository_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.settings.compose import program, typed
from grpo_rl.settings.tasks import MIXTURE
from grpo_rl.storage.masking import masked_override

COMMIT = re.compile(r"[0-9a-f]{40}")
PRIVATE = re.compile(r"[+~]{0,2}(logger\b|resume=)")
"""Overrides that are not repeated: they don't change what is computed; a logger's may hold a key or a password."""


def origin(config: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The entries of ``summary.json`` on how to make the run again: command, git commit or version, hash of the config.

    Args:
        before: the earlier entries, where the run resumes. The command is that of the resume, whose settings hold
            from there on; that of the start comes as ``command_of_start`` where it is another.
    """
    code = {"git_commit": commit} if (commit := git_commit(Path(grpo_rl.__file__).parents[1])) else {}
    processes = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    script = ["a", "notebook"] if "ipykernel" in sys.modules else [*program("sync"), *sys.argv[1:]]
    now = command(typed or script, processes)
    first = before.get("command_of_start", before["command"]) if before else now
    commands = {"command": now} | ({"command_of_start": first} if first != now else {})
    return commands | code | {"grpo_rl": grpo_rl.__version__, "config_hash": config_hash(config)}


def command(words: Sequence[str], processes: int = 1) -> str:
    """The command line that a shell takes, without loggers and ``resume``, and with secrets masked.

    Args:
        processes: how many torchrun started, on all nodes together.

    >>> command(["python", "sota/grpo.py", "env.dataset=gsm8k", "env.system_prompt=Think first.", "logger.name=me"])
    "python sota/grpo.py env.dataset=gsm8k 'env.system_prompt=Think first.'"
    >>> command(["grpo-rl", "train", "logger={settings: {wandb: {api_key: x}}}"])
    'grpo-rl train'
    >>> command(["python", "sota/grpo.py", "seed=1"], processes=4)
    'torchrun --nproc-per-node=4 sota/grpo.py seed=1'
    """
    if processes > 1:
        words = ["torchrun", f"--nproc-per-node={processes}", *words[words[0] == "python" :]]
    return shlex.join(masked_override(word) for word in words if not PRIVATE.match(word))


def git_commit(checkout: Path) -> str | None:
    """The commit of a checkout, with ``+changes`` where files differ from it; None if it is none, or git is missing."""
    if not (checkout / ".git").exists():
        return None
    try:
        head = _git(checkout, "rev-parse", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+changes" * bool(changed)


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", checkout, *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve digits that runs with the same settings share, wherever they log and whatever they resumed from.

    >>> config_hash({"a": 1, "resume": None}) == config_hash({"resume": "x", "logger": {}, "a": 1})
    True
    """
    settings = {key: value for key, value in config.items() if key not in ("resume", "logger")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


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
