"""Metrics and responses for TensorBoard, in the run folder; tensorboard is imported only where it is used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.storage.masking import printable

LIBRARY = "torch.utils.tensorboard"
ROWS = 8
"""Responses of a step that are shown as text."""


class Log:
    """Event files in the run folder's ``tensorboard/``; ``tensorboard --logdir outputs`` shows all runs.

    A resumed run makes TensorBoard drop the steps after its checkpoint. Each call is on the disk before it
    returns. Values are 32-bit floats, as TensorBoard's scalars are.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        self._writer = SummaryWriter(folder, purge_step=last_step + 1 if folder.exists() else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [
            f"**reward {row['reward']:.3g}**\n\n{_verbatim(row['prompt'])}\n\n{_verbatim(row['completion'])}"
            for row in rows[:ROWS]
        ]
        self._writer.add_text("completions", "\n\n---\n\n".join(texts), step)
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


def _verbatim(text: str) -> str:
    """The text as Markdown shows it letter by letter: indented, it is code.

    >>> _verbatim("a *b*\\nc")
    '    a *b*\\n    c'
    """
    return "\n".join(f"    {line}" for line in printable(text).split("\n"))
