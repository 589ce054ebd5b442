"""Weights from the trainer to the engine, and the proof that they arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_rl.engines.base import Engine
from grpo_rl.fingerprint import fingerprint


class WeightDeliveryError(RuntimeError):
    """The engine does not hold what was sent."""


class WeightSync:
    """Pushes a model's parameters into an engine under ever higher versions; every push is proven.

    Args:
        model: the trainer's, whose parameter names are the checkpoint's. Tied weights travel once.
        engine: that samples.
        version: of the weights the model has now.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, version: int = 0) -> None:
        self._model, self._engine = model, engine
        self.version = version

    def push(self) -> int:
        """Sends all weights under the next version, proves that they arrived, and returns that version.

        Raises:
            WeightDeliveryError: the engine computes with something else than what was sent.
        """
        self.version += 1
        self._engine.update_weights(self._sent().items(), self.version)
        self.verify()
        return self.version

    def _sent(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to(self._engine.dtype) for name, tensor in self._model.named_parameters()}

    def verify(self) -> None:
        """Compares what the engine holds with what the trainer holds, by fingerprints of every tensor.

        Raises:
            WeightDeliveryError: they differ; names the tensors.
        """
        weights = self._sent()
        held = self._engine.fingerprints({name: tensor.shape for name, tensor in weights.items()})
        wrong = [name for name, tensor in weights.items() if held[name] != fingerprint(tensor)]
        if wrong or self._engine.version != self.version:
            shown = ", ".join(wrong[:5]) + (", …" if len(wrong) > 5 else "")
            raise WeightDeliveryError(
                f"weight version {self.version} did not arrive: the engine says version {self._engine.version}, and "
                f"{len(wrong)} of {len(weights)} tensors differ from what was sent ({shown or 'none'}). "
                "Samples from it would be off-policy without a sign, so the run stops here."
            )
