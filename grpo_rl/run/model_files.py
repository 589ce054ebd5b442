"""The files of a finished run's model: what it writes into its folder, and what of that may be uploaded."""

import re
from pathlib import Path

MODEL = "model"
"""The folder of the model in that of its run."""
CARD = "README.md"
"""The model card in it."""
KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
"""The endings of a model's files."""
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}|wandb_v1_\w{20,})\b")
"""Keys of services, as they look."""


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
