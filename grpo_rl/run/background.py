"""Background: one piece of work at a time in a thread of its own, while the run goes on."""

from collections.abc import Callable
from concurrent import futures

from grpo_rl.waits import waiting


class Background:
    """Does one piece of work at a time in a thread.

    >>> done = []
    >>> background = Background(); background.start(lambda: done.append(1)); background.wait(); done
    [1]
    """

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._work: futures.Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begins the work, once the one before has ended, whose failure is raised."""
        self.wait()
        self._work = self._thread.submit(work)

    def wait(self) -> None:
        """Returns when nothing is under way; the failure of what was is raised once."""
        if work := self._work:
            with waiting("a checkpoint on the disk"):
                futures.wait([work])  # Ctrl-C may break this off: the work is then still known
            self._work = None
            work.result()

    def close(self) -> None:
        """Waits, and ends the thread; the next :meth:`wait` raises a failure."""
        with waiting("a checkpoint on the disk"):
            self._thread.shutdown()
