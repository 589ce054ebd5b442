"""The trainer's end of vLLM's own transfers between GPUs: NCCL, and CUDA IPC. For vLLM 0.32."""

from __future__ import annotations

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
    """One push's weights, as vLLM's own transfers read them: shapes first, then tensors.

    Args:
        shapes: of all tensors, in the order in which they are sent.
        dtype: of all tensors.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._metadata = [ParamMeta(name, dtype, tuple(shape)) for name, shape in shapes.items()]
        self.weights: Iterator[tuple[str, Tensor]] = iter(())
        """Tensors that the next pass yields."""

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes of all tensors, before any is sent."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights


def native_trainer(
    backend: str, client: VLLMWeightSyncClient, source: WeightSource, settings: Mapping[str, Any]
) -> TrainerWeightTransferEngine[Any]:
    """The trainer's end of one of vLLM's own transfers; blocks until the engines are connected.

    Args:
        backend: ``nccl`` or ``ipc``.
        client: the way to tell the engines; this process has all weights or gathers them.
        settings: settings of the transfer: ``master_address``, ``master_port`` and ``world_size`` for ``nccl``.

    Raises:
        ValueError: there is no such transfer.
    """
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(rank=0, **settings)
    elif backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0, packed=True, **settings)
    else:
        raise ValueError(f"transfer {backend!r}; choose nccl or ipc")
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
