"""TextLog: what a run shows as lines, with the time of each, in the file that Hydra logs to."""

from __future__ import annotations

import logging
from pathlib import Path

FILE = "grpo.log"
FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
"""Hydra's own."""


class TextLog:
    """Appends lines to the run folder's log: each step, each note, whatever the terminal shows.

    The file has the name of Hydra's, ``grpo.log``, ``grpo_async.log`` or ``sft.log``. A resumed run goes on in the log
    of its folder, while Hydra's own, of a new folder, has its start.
    """

    def __init__(self, run_dir: Path) -> None:
        handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
        name = Path(handlers[0].baseFilename).name if handlers else FILE
        self._handler = _Handler(run_dir / name, encoding="utf-8", delay=True)
        self._handler.setFormatter(logging.Formatter(FORMAT))
        # A logger without a name in the registry: Hydra's handlers would print each line in the terminal again.
        self._logger = logging.Logger("grpo_rl.run", logging.INFO)
        self._logger.addHandler(self._handler)

    def write(self, text: str) -> None:
        """Appends a line."""
        self._logger.info(text)

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


class _Handler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: a full disk is told by the files that matter."""
