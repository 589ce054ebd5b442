"""Weights from the trainer to the engine, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from grpo_rl.engines.base import Engine
from grpo_rl.fingerprint import fingerprint
from grpo_rl.policies.lora import base_weights, has_adapters
from grpo_rl.weights.sources import source_of


class WeightDeliveryError(RuntimeError):
    """The engine does not hold what was sent."""


class WeightSync:
    """Pushes a model's parameters into an engine under ever higher versions; every push is proven.

    A model with adapters is sent as the engine takes it: merged, a tensor at a time, or the adapters alone, beside a
    base that travels with the first push. No second copy of the weights is made.

    Args:
        model: the trainer's, whose parameter names are the checkpoint's. Tied weights travel once.
        engine: that samples.
        version: of the weights the model has now.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, version: int = 0) -> None:
        self._model, self._engine = model, engine
        self._source = source_of(model, engine.takes_adapters)
        self._has_base = False
        self._base: dict[str, int] | None = None
        self.version = version

    def push(self) -> int:
        """Sends the weights under the next version, proves that they arrived, and returns that version.

        Raises:
            WeightDeliveryError: the engine computes with something else than what was sent.
        """
        self.version += 1
        self._engine.update_weights(self._weights(frozen=not self._has_base), self.version)
        self._verify(frozen=not self._has_base)
        self._has_base = True
        return self.version

    def _weights(self, frozen: bool) -> Iterator[tuple[str, Tensor]]:
        weights = chain(self._source.frozen(), self._source.moving()) if frozen else self._source.moving()
        return ((name, tensor.to(self._engine.dtype)) for name, tensor in weights)

    def verify(self) -> None:
        """Compares all that the engine holds with what the trainer holds, by fingerprints of every tensor.

        Raises:
            WeightDeliveryError: they differ; names the tensors.
        """
        self._verify(frozen=True)

    def _verify(self, frozen: bool) -> None:
        shapes, sent = {}, {}
        for name, tensor in self._weights(frozen):
            shapes[name], sent[name] = tensor.shape, fingerprint(tensor)
        held = self._engine.fingerprints(shapes)
        wrong = [name for name in sent if held[name] != sent[name]]
        if wrong or self._engine.version != self.version:
            shown = ", ".join(wrong[:5]) + (", …" if len(wrong) > 5 else "")
            raise WeightDeliveryError(
                f"weight version {self.version} did not arrive: the engine says version {self._engine.version}, and "
                f"{len(wrong)} of {len(sent)} tensors differ from what was sent ({shown or 'none'}). "
                "Samples from it would be off-policy without a sign, so the run stops here."
            )

    def base_fingerprints(self) -> dict[str, int]:
        """Fingerprints of the weights under the adapters, by name, which a checkpoint of adapters does not hold.

        Empty for a model without adapters, all of which is in the checkpoint.
        """
        if self._base is None:
            weights = base_weights(self._model) if has_adapters(self._model) else ()
            self._base = {name: fingerprint(tensor) for name, tensor in weights}
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
                f"have changed since ({differ[0]}, …); put back the one that the run began with"
            )
