"""Steps of an engine that can only sample whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_rl.engines.base import Samples, Sampling


class StepByGenerate:
    """The calls `submit` and `step` of an engine that can only sample whole batches."""

    generate: Callable[..., list[Samples]]

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Sequence[int], Sampling]] = {}

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.submit`."""
        self._waiting[request] = (prompt, sampling)

    def step(self) -> list[tuple[int, Samples]]:
        """See :meth:`grpo_rl.engines.base.Engine.step`."""
        finished: list[tuple[int, Samples]] = []
        while self._waiting:
            # A call has one `Sampling`: prompts that share the first one's.
            sampling = next(iter(self._waiting.values()))[1]
            batch = [request for request, (_, s) in self._waiting.items() if s == sampling]
            prompts = [self._waiting.pop(request)[0] for request in batch]
            finished += zip(batch, self.generate(prompts, 1, sampling), strict=True)
        return finished

    def abort(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.abort`."""
        self._waiting.clear()
