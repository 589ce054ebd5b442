"""transformers' own generation as an engine: the fallback where vLLM cannot be installed, and the one that resumes
bit for bit, since all its randomness is torch's."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from grpo_rl.engines.base import Samples, Sampling, StepByGenerate, check_request
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.policies.checkpoint_names import CheckpointNames
from grpo_rl.policies.text_part import from_folder


class TransformersEngine(StepByGenerate):
    """A copy of the model that samples by ``model.generate``.

    Args:
        model: a local model folder.
        max_model_len: of prompt and response, in tokens.
        dtype: of the weights and the computation.
        device: where it runs.
        max_batch: responses sampled at the same time.
    """

    def __init__(
        self,
        model: str | Path,
        max_model_len: int,
        dtype: str = "bfloat16",
        device: torch.device | str = "cpu",
        max_batch: int = 64,
    ) -> None:
        super().__init__()
        self.version = 0
        self.max_model_len = max_model_len
        self.dtype = getattr(torch, dtype)
        self.takes_adapters = self.proves_bytes = False
        self._device = torch.device(device)
        self._max_batch = max_batch
        self._model: Any = from_folder(model, dtype=self.dtype).to(self._device).eval()
        self._model.requires_grad_(False)
        ends = self._model.generation_config.eos_token_id
        self._ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        # `generate` fills in what a call leaves open from here: a model's own temperature or repetition penalty would
        # bend the distribution behind the recorder's back.
        self._model.generation_config = GenerationConfig()

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """See :meth:`grpo_rl.engines.base.Engine.generate`."""
        assert self._model.device.type == self._device.type, "wake() the engine before it generates"
        check_request(prompts, n, sampling, self.max_model_len)
        at_once = max(1, self._max_batch // n)
        samples = []
        for start in range(0, len(prompts), at_once):
            samples += self._generate(prompts[start : start + at_once], n, sampling)
        return samples

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        longest = max(map(len, prompts))
        pad = self._ends[0] if self._ends else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        room = [min(sampling.max_new_tokens, self.max_model_len - len(p)) for p in prompts]
        recorder = _Recorder(longest)
        warpers = LogitsProcessorList()
        if sampling.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.temperature and sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        warpers.append(recorder)
        sequences = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=warpers,
            generation_config=GenerationConfig(
                do_sample=sampling.temperature > 0,
                top_k=0,
                num_return_sequences=n,
                max_new_tokens=max(room),
                min_new_tokens=sampling.min_new_tokens or None,
                eos_token_id=self._ends or None,
                pad_token_id=pad,
            ),
        )
        log_probs = recorder.log_probs(sequences).tolist()
        responses = sequences[:, longest:].tolist()
        kept = [self._cut(response, room[i // n], sampling.min_new_tokens) for i, response in enumerate(responses)]
        return [
            Samples.from_lists(
                [ids for ids, _ in kept[i : i + n]],
                [log_probs[j][: len(kept[j][0])] for j in range(i, i + n)],
                [truncated for _, truncated in kept[i : i + n]],
                self.version,
            )
            for i in range(0, len(kept), n)
        ]

    def _cut(self, response: list[int], room: int, at_least: int) -> tuple[list[int], bool]:
        """The response up to and with its end of sequence, and whether it was cut at ``room`` tokens instead."""
        for i, token in enumerate(response[:room]):
            if token in self._ends and i >= at_least:
                return response[: i + 1], False
        return response[:room], True

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.update_weights`."""
        held = self._held()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in held:
                    raise LookupError(f"{type(self._model).__name__} has no parameter {name!r}")
                held[name].copy_(tensor)
        self.version = version

    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = False) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.base.Engine.fingerprints`."""
        held = self._held()
        return {name: fingerprint(held[name]) for name in shapes}

    def _held(self) -> dict[str, Tensor]:
        """The model's parameters, or the parts of them that the checkpoint names."""
        names = CheckpointNames(self._model)
        return dict(view for named in self._model.named_parameters() for view in names.views(*named))

    def sleep(self) -> None:
        """Moves the weights to host memory."""
        self._model.to("cpu")

    def wake(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.wake`."""
        self._model.to(self._device)

    def close(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.close`."""
        self._model = None
        gc.collect()


class _Recorder(LogitsProcessor):
    """Records the log-probability of each sampled token; last in the list, it sees the final distribution.

    Only one step's [B, V] is held: its token is known when the next one is sampled.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._last: Tensor | None = None
        self._taken: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._last = scores.float().log_softmax(-1)
        return scores

    def _take(self, sequences: Tensor) -> None:
        position = self._prompt_length + len(self._taken)
        if self._last is not None and sequences.shape[1] > position:
            self._taken.append(self._last.gather(-1, sequences[:, position, None])[:, 0])

    def log_probs(self, sequences: Tensor) -> Tensor:
        """[B, steps] once generation has ended."""
        self._take(sequences)
        return torch.stack(self._taken, dim=1)
