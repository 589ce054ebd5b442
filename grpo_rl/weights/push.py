"""Weights from the trainer to the engine, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_rl.engines.base import Engine
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.policies.lora import base_weights, has_adapters
from grpo_rl.policies.shards import whole
from grpo_rl.weights.sources import source_of
from grpo_rl.weights.transport import Held, InProcess, Transport, WeightDeliveryError

if TYPE_CHECKING:
    from grpo_rl.distributed.ranks import Ranks

__all__ = ["WeightDeliveryError", "WeightSync"]


class WeightSync:
    """Pushes a model's parameters into engines under ever higher versions; every push is proven.

    A model with adapters is sent as the engine takes it: merged, a tensor at a time, or the adapters alone, beside a
    base that travels with the first push. No second copy of the weights is made here; vLLM, which fuses some layers,
    holds the tensors of each until they are all there.

    Args:
        model: the trainer's, whose parameter names are the checkpoint's. Tied weights travel once.
        engine: that samples; or a transport to engines in other processes, which are paused in the meantime.
        version: of the weights the model has now.
        ranks: the processes that train the model together; all of them push, and rank 0 has the engine.
    """

    def __init__(
        self, model: torch.nn.Module, engine: Engine | Transport, version: int = 0, ranks: Ranks | None = None
    ) -> None:
        self._model, self._ranks = model, ranks
        self._transport: Transport = engine if isinstance(engine, Transport) else InProcess(engine)
        self._source = source_of(model, engine.takes_adapters)
        self._base: dict[str, int] | None = None
        self.version = version

    def push(self) -> int:
        """Sends the weights under the next version, proves that they arrived, and returns that version.

        Raises:
            WeightDeliveryError: an engine computes with something else than what was sent.
            EngineDeadError: an engine died, or did not answer within the transport's deadline, and nobody replaces it.
        """
        self.version += 1
        self._deliver()
        return self.version

    def deliver(self) -> None:
        """Sends the weights under their present version to engines that have been sent none, with the same proof."""
        self._deliver(newcomers=True)

    def _deliver(self, newcomers: bool = False) -> None:
        sent: dict[str, tuple[torch.Size, int]] = {}
        with self._transport.paused(newcomers) as frozen:
            frozen = self._ranks.broadcast(frozen) if self._ranks else frozen
            weights = self._weights(frozen, sent, self._transport.fingerprint)
            self._check(sent, self._transport.send(weights, self.version))

    def _weights(
        self, frozen: bool, seen: dict[str, tuple[torch.Size, int]], mark: Callable[[str, Tensor], int]
    ) -> Iterator[tuple[str, Tensor]]:
        """What is to be sent; the shape of what was taken, and what ``mark`` says of it, are put into ``seen``."""
        weights = chain(self._source.frozen(), self._source.moving()) if frozen else self._source.moving()
        for name, tensor in weights:
            tensor = whole(tensor.to(self._transport.dtype))  # of a sharded one every rank asks for all
            seen[name] = tensor.shape, mark(name, tensor)
            yield name, tensor
            del tensor  # before the next one is made

    def verify(self) -> None:
        """Compares what the engines compute with, all of it read back, with what the trainer holds.

        A push believes an engine's note of what it has put into a form that only products read; this does not.

        Raises:
            WeightDeliveryError: they differ; names the tensors.
        """
        expected: dict[str, tuple[torch.Size, int]] = {}
        for _ in self._weights(True, expected, lambda _, tensor: fingerprint(tensor)):
            pass
        self._check(expected, self._transport.held({name: shape for name, (shape, _) in expected.items()}))

    def _check(self, sent: Mapping[str, tuple[torch.Size, int]], engines: Mapping[str, Held]) -> None:
        for engine, held in engines.items():
            wrong = [name for name, (_, expected) in sent.items() if held.fingerprints.get(name) != expected]
            if wrong or held.version != self.version:
                shown = ", ".join(wrong[:5]) + (", …" if len(wrong) > 5 else "")
                raise WeightDeliveryError(
                    f"weight version {self.version} did not arrive: {engine} says version {held.version}, and "
                    f"{len(wrong)} of {len(sent)} tensors differ from what was sent ({shown or 'none'}). "
                    "Samples from it would be off-policy without a sign, so the run stops here."
                )

    def base_fingerprints(self) -> dict[str, int]:
        """Fingerprints of the weights under the adapters, by name, which a checkpoint of adapters does not hold.

        Empty for a model without adapters, all of which is in the checkpoint.
        """
        if self._base is None:
            weights = base_weights(self._model) if has_adapters(self._model) else ()
            self._base = {name: fingerprint(whole(tensor)) for name, tensor in weights}
        return self._base

    def check_base(self, saved: Mapping[str, int]) -> None:
        """Refuses adapters that were trained on another base.

        Args:
            saved: :meth:`base_fingerprints` of the run that saved them.

        Raises:
            ValueError: names the tensors.
        """
        ours = self.base_fingerprints()
        differ = [name for name in sorted(ours.keys() | saved.keys()) if ours.get(name) != saved.get(name)]
        if differ:
            raise ValueError(
                f"the checkpoint's adapters belong to another base: {len(differ)} of {len(ours)} tensors of the model "
                f"have changed since ({differ[0]}, …); put back the one that the run began with. If the model's files "
                "are those and its base is quantised, bitsandbytes has quantised it otherwise: resume on the same kind "
                "of device with the same version"
            )
