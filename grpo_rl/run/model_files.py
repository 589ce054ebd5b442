"""The files of a finished run's model: what it writes into its folder, and what of that may be uploaded."""

from __future__ import annotations

from pathlib import Path

MODEL = "model"
"""The folder of the model in that of its run."""
CARD = "README.md"
"""The model card in it."""
KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
"""The endings of a model's files."""


def model_files(run: Path) -> list[Path]:
    """The files of a run's model, and none that lies among them besides.

    Raises:
        ValueError: the run has no model.
    """
    folder = run / MODEL
    if not (folder / CARD).is_file():
        raise ValueError(f"{run} has no model; a run writes it, with its card, when it finishes")
    files = (path for path in sorted(folder.iterdir()) if path.suffix in KINDS)
    return [path for path in files if path.is_file() and not path.is_symlink()]
