"""TextLog: what a run shows as lines, with the time of each, in the file that Hydra logs to."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import datetime
from pathlib import Path

FILE = "grpo.log"


class TextLog:
    """Appends lines to the run folder's log: each step, each note, whatever the terminal shows.

    The file has the name of Hydra's, ``grpo.log``, ``grpo_async.log`` or ``sft.log``. A resumed run goes on in the log
    of its folder, while Hydra's own, of a new folder, has its start.
    """

    def __init__(self, run_dir: Path) -> None:
        handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
        self._path = run_dir.absolute() / (Path(handlers[0].baseFilename).name if handlers else FILE)

    def write(self, text: str) -> None:
        """Appends a line as Hydra writes it; not through its handlers, which print it in the terminal again."""
        now = datetime.now()
        stamp = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03}"
        # A full disk is named by the files that matter.
        with suppress(OSError), self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"[{stamp}][grpo_rl.run][INFO] - {text}\n")
