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
    base that travels with the first push. No second copy of the weights is made here; vLLM, which fuses some layers,
    holds the tensors of each until they are all there.

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
        sent: dict[str, tuple[torch.Size, int]] = {}
        weights = self._weights(not self._has_base, sent)
        self._engine.update_weights(weights, self.version)
        for _ in weights:
            pass  # an engine that stopped early lacks what is left
        self._check(sent)
        self._has_base = True
        return self.version

    def _weights(self, frozen: bool, seen: dict[str, tuple[torch.Size, int]]) -> Iterator[tuple[str, Tensor]]:
        """What is to be sent; shape and fingerprint of what was taken are put into ``seen``."""
        weights = chain(self._source.frozen(), self._source.moving()) if frozen else self._source.moving()
        for name, tensor in weights:
            tensor = tensor.to(self._engine.dtype)
            seen[name] = tensor.shape, fingerprint(tensor)
            yield name, tensor
            del tensor  # before the next one is made

    def verify(self) -> None:
        """Compares all that the engine holds with what the trainer holds, by fingerprints of every tensor.

        Raises:
            WeightDeliveryError: they differ; names the tensors.
        """
        expected: dict[str, tuple[torch.Size, int]] = {}
        for _ in self._weights(True, expected):
            pass
        self._check(expected)

    def _check(self, sent: Mapping[str, tuple[torch.Size, int]]) -> None:
        held = self._engine.fingerprints({name: shape for name, (shape, _) in sent.items()})
        wrong = [name for name, (_, expected) in sent.items() if held[name] != expected]
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
                f"have changed since ({differ[0]}, …); put back the one that the run began with. If the model's files "
                "are those and its base is quantised, bitsandbytes has quantised it otherwise: resume on the same kind "
                "of device with the same version"
            )
