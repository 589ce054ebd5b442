"""The command ``grpo-rl push-to-hub``: uploads a finished run's model, and nothing else of the run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL = "model"
"""The folder of a finished run's model in that of its run."""
CARD = "README.md"
"""The model card in it."""

KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
"""The endings of a model's files."""
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}|wandb_v1_\w{20,})\b")
"""Keys of services, as they look."""


def add_push_to_hub(parser: argparse.ArgumentParser) -> None:
    """Uploads the model of a finished run, with its card, to the Hugging Face hub. Checkpoints, logs and responses stay
    here. You have to be logged in (`hf auth login`, or HF_TOKEN).
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("repo", metavar="REPO", help="organisation/name on the hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="list the files and their sizes, upload nothing")
    parser.set_defaults(run_command=_push)


def _push(options: argparse.Namespace) -> int:
    # Imported late: help should not wait for it.
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    files = model_files(options.run)
    for path in files:
        print(f"{path.stat().st_size / 1e6:10.2f} MB  {path.name}")
    total = sum(path.stat().st_size for path in files) / 1e6
    if options.dry_run:
        print(f"{total:10.2f} MB in all would go to {options.repo}; nothing was uploaded.")
        return 0
    try:
        api = HfApi()
        if options.private and _is_public(api, options.repo):
            raise ValueError(
                f"{options.repo} is there already, and public; make it private on the hub, or leave out --private"
            )
        api.create_repo(options.repo, private=options.private, exist_ok=True)
        done = api.upload_folder(
            repo_id=options.repo,
            folder_path=options.run / MODEL,
            allow_patterns=[path.name for path in files],
            commit_message="Model trained with grpo_rl",
        )
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        raise ValueError(f"the hub refuses ({error}); log in with `hf auth login`, or set HF_TOKEN") from error
    except httpx2.HTTPError as error:
        raise ValueError(f"the hub can't be reached ({error or type(error).__name__}); try again later") from error
    print(f"{total:10.2f} MB in all: {done}")
    return 0


def _is_public(api: HfApi, repo: str) -> bool:
    """True if a repository is there that all can read: to make it again with ``private`` changes nothing."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return not api.repo_info(repo).private
    except RepositoryNotFoundError:
        return False


def model_files(run: Path) -> list[Path]:
    """The files of a run's model.

    Raises:
        ValueError: the run has no model, or next to it lies a file of another kind, or one with a key.
    """
    folder = run / MODEL
    if not (folder / CARD).is_file():
        what = "has no model card, as it was made before there was one" if folder.is_dir() else "has no model"
        raise ValueError(f"{run} {what}; a run writes both when it finishes")
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in files:
        if path.parent != folder or path.suffix not in KINDS or path.is_symlink():
            raise ValueError(f"{path} is no file of a model, and is not uploaded; move it away")
        if path.suffix != ".safetensors" and SECRET.search(path.read_text(errors="replace")):
            raise ValueError(f"{path} holds what looks like a key; nothing is uploaded")
    return files
