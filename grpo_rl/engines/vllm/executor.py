"""vLLM's executor of one worker, without named semaphores."""

from __future__ import annotations

import multiprocessing

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class NamelessExecutor(UniProcExecutor):
    """Runs one worker in a process that leaves nothing in /dev/shm, however it ends.

    Named semaphores would stay there when the engine is killed together with vLLM's resource tracker.
    """

    def _init_executor(self) -> None:
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("fork", force=True)  # whose semaphores have no names; nothing is started by it
        try:
            super()._init_executor()
        finally:
            multiprocessing.set_start_method(before, force=True)
