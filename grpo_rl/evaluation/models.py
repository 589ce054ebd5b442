"""The folder of the model that `grpo-rl eval` is given by name."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_rl.policies.before_loading import local_path
from grpo_rl.policies.hub import resolve_model
from grpo_rl.run.export import export_checkpoint
from grpo_rl.run.model_files import MODEL
from grpo_rl.training.checkpoint import CHECKPOINTS, checkpoints


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """The folder of a model: a folder, a hub name, a run's exported model or newest checkpoint, or a checkpoint.

    A checkpoint is exported into a temporary folder, removed at the end.

    Raises:
        ValueError: there is no such model, or the checkpoint is one of adapters.
    """
    path = local_path(name)
    if path and (path / MODEL / "config.json").is_file():
        path = path / MODEL
    elif path and path.is_dir() and (found := checkpoints(path / CHECKPOINTS)):
        path = found[-1]
    if path and path.is_file():
        with tempfile.TemporaryDirectory(prefix="grpo_rl_eval_") as folder:
            export_checkpoint(path, Path(folder, MODEL))
            yield Path(folder, MODEL)
        return
    yield resolve_model(str(path) if path else name)
