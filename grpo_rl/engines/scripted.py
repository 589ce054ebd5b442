"""An engine that plays given responses: for tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.base import Engine, Samples, Sampling, StepByGenerate
from grpo_rl.engines.fingerprint import fingerprint


class ScriptedEngine(StepByGenerate, Engine):
    """Gives the responses that ``script(prompt_ids, g)`` returns, log-probability 0 each; holds weights as others do.

    >>> engine = ScriptedEngine(lambda prompt, g: [g] * g)
    >>> engine.generate([[7]], n=3, sampling=Sampling(max_new_tokens=2))[0].offsets.tolist()
    [0, 0, 1, 3]
    """

    in_rounds = False  # a script does not know the batch

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]], max_model_len: int = 1 << 20) -> None:
        super().__init__()
        self.version, self.max_model_len, self.dtype = 0, max_model_len, torch.bfloat16
        self.takes_adapters = self.proves_bytes = False
        self.weights: dict[str, Tensor] = {}
        self._script = script

    @override
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        samples = []
        for prompt in prompts:
            responses = [list(self._script(prompt, g)) for g in range(n)]
            cut = [response[: sampling.max_new_tokens] for response in responses]
            log_probs = [[0.0] * len(response) for response in cut]
            truncated = [len(response) > sampling.max_new_tokens for response in responses]
            samples.append(Samples.from_lists(cut, log_probs, truncated, self.version))
        return samples

    @override
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weights |= {name: tensor.detach().to(self.dtype, copy=True) for name, tensor in weights}
        self.version = version

    @override
    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = False) -> dict[str, int]:
        return {name: fingerprint(self.weights[name]) for name in shapes}

    def sleep(self) -> None:
        """Does nothing: there is nothing to free."""

    def wake(self) -> None:
        """Does nothing: the engine never sleeps."""

    def close(self) -> None:
        """Drops the weights."""
        self.weights = {}
