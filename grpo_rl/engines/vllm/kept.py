"""Kept sets as vLLM 0.32's runner for GPUs returns them."""

from typing import Any

from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors


def leave_out_whole_sets() -> None:
    """Has vLLM return an empty set where nothing was cut off, as on a CPU, and not the ids of all tokens.

    In an engine that is started to return kept sets, requests that cut nothing off would otherwise hold the whole
    vocabulary for each of their tokens: 0.6 MB of 152,000 ids.
    """
    lists = SamplingMaskTensors.tolists

    def without_whole(self: Any, *given: Any) -> Any:
        counts = self.counts.cpu()
        return lists(self._replace(counts=counts.masked_fill(counts == self.vocab_size, 0)), *given)

    SamplingMaskTensors.tolists = without_whole  # pyrefly: ignore[bad-assignment]
