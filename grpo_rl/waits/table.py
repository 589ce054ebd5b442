"""The table of the waits of a process, and the stacks of its threads and of the coroutines that wait."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_rl.waits.record import shown_duration
from grpo_rl.waits.registry import Wait

COLUMNS = ("role", "waits for", "since", "deadline", "version", "where")
OWN_THREADS = "waits"
"""The name of all threads of the watcher."""
_ROOT = Path(__file__).resolve().parents[2]


def role_of(wait: Wait, main_role: str) -> str:
    """The role of the thread that waits: the main thread has the process's, another thread its own name."""
    if wait.thread == threading.main_thread().ident:
        return main_role
    return next((thread.name for thread in threading.enumerate() if thread.ident == wait.thread), "a thread that ended")


def words(wait: Wait) -> str:
    """The thing that is waited for, with its detail."""
    return f"{wait.what} ({wait.detail})" if wait.detail else wait.what


def table(waits: Sequence[Wait], role: str) -> str:
    """The waits, the longest first; those of one thread and name are one row.

    Args:
        role: the role of the main thread.
    """
    rows: dict[tuple[str, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        rows.setdefault((role_of(wait, role), wait.what), []).append(wait)
    cells = [COLUMNS]
    for (who, _), same in rows.items():
        oldest = same[0]
        late = " passed" if oldest.age_s() >= oldest.limit_s else ""
        cells.append(
            (
                who,
                words(oldest) + (f", and {len(same) - 1} more" if len(same) > 1 else ""),
                shown_duration(oldest.age_s()),
                shown_duration(oldest.limit_s) + late,
                "" if oldest.version is None else str(oldest.version),
                _place(oldest),
            )
        )
    if len(cells) == 1:
        return "Nothing waits in a place that has a name."
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _place(wait: Wait) -> str:
    """The line that asked for the wait; of a wait for a whole phase the package's line that its thread is at."""
    code, line = wait.asked_by, wait.line
    if code is None:
        frame = sys._current_frames().get(wait.thread)
        while frame and not Path(frame.f_code.co_filename).is_relative_to(_ROOT / "grpo_rl"):
            frame = frame.f_back
        if frame is None:
            return ""
        code, line = frame.f_code, frame.f_lineno
    path = Path(code.co_filename)
    name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"{name}:{line} {code.co_name}"


def stacks(waits: Sequence[Wait], role: str) -> str:
    """The Python stacks of all threads but the watcher's, and of the coroutines that wait; equal ones of those once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if (name := names.get(ident, f"thread {ident}")) != OWN_THREADS:
            lines = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)[::-1]
            parts.append((f"{name}, {role}" if ident == main else name, lines))
    coroutines: dict[str, int] = {}
    for wait in waits:
        task = wait.task  # read once: the wait may end meanwhile
        if task is not None:
            frames = ((frame, frame.f_lineno) for frame in _awaiting(task.get_coro()))
            shown = "".join(traceback.StackSummary.extract(frames).format())
            coroutines[shown] = coroutines.get(shown, 0) + 1
    said = [f"{name}\n{''.join(traceback.StackSummary.from_list(lines).format())}" for name, lines in parts]
    said += [f"{count} {'coroutine' if count == 1 else 'coroutines'}\n{shown}" for shown, count in coroutines.items()]
    return "\n".join(said)


def _awaiting(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of those that it awaits in turn."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
