"""An engine that plays given answers: for tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_rl.engines.base import Samples, Sampling, StepByGenerate
from grpo_rl.engines.fingerprint import fingerprint


class ScriptedEngine(StepByGenerate):
    """Answers with what ``script(prompt_ids, g)`` returns, log-probability 0 each; holds weights like a real engine.

    >>> engine = ScriptedEngine(lambda prompt, g: [g] * g)
    >>> engine.generate([[7]], n=3, sampling=Sampling(max_new_tokens=2))[0].offsets.tolist()
    [0, 0, 1, 3]
    """

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]], max_model_len: int = 1 << 20) -> None:
        super().__init__()
        self.version, self.max_model_len = 0, max_model_len
        self.dtype = torch.bfloat16
        self.takes_adapters = False
        self.weights: dict[str, Tensor] = {}
        self._script = script

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """See :meth:`grpo_rl.engines.base.Engine.generate`."""
        samples = []
        for prompt in prompts:
            answers = [list(self._script(prompt, g)) for g in range(n)]
            cut = [answer[: sampling.max_new_tokens] for answer in answers]
            samples.append(
                Samples.from_lists(
                    cut,
                    [[0.0] * len(answer) for answer in cut],
                    [len(answer) > sampling.max_new_tokens for answer in answers],
                    self.version,
                )
            )
        return samples

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.update_weights`."""
        self.weights |= {name: tensor.detach().to(self.dtype, copy=True) for name, tensor in weights}
        self.version = version

    def fingerprints(self, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.base.Engine.fingerprints`."""
        return {name: fingerprint(self.weights[name]) for name in shapes}

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Drops the weights."""
        self.weights = {}
