"""The trainer's end of vLLM's own transfer between GPUs, NCCL. For vLLM 0.32."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory


class OneStream(WeightSource):
    """One push's weights, as vLLM's own transfers read them: shapes in the order of sending, then tensors."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._metadata = [ParamMeta(name, dtype, tuple(shape)) for name, shape in shapes.items()]
        self.weights: Iterator[tuple[str, Tensor]] = iter(())
        """Tensors that the next pass yields."""

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes of all tensors, before any is sent."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        # vLLM reads in streams of its own; the weights are made, and their fingerprints taken, in the trainer's.
        while True:
            with torch.cuda.stream(own := torch.cuda.default_stream()):
                named = next(self.weights, None)
            if named is None:
                return
            reads = torch.cuda.current_stream()
            reads.wait_stream(own)
            named[1].record_stream(reads)
            yield named


def native_trainer(
    client: VLLMWeightSyncClient, source: WeightSource, settings: Mapping[str, Any]
) -> TrainerWeightTransferEngine[Any]:
    """The trainer's end of vLLM's NCCL transfer; blocks until the engines, which ``client`` notifies, are connected."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(rank=0, **settings)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
