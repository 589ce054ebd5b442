"""transformers' own generation as an engine: the fallback where vLLM cannot be installed, and the one that resumes
bit for bit, since all its randomness is torch's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typing_extensions import override

from grpo_rl.engines.base import (
    Engine,
    OutOfMemoryError,
    Samples,
    Sampling,
    StepByGenerate,
    check_request,
    free_memory,
    is_out_of_memory,
    reason,
    seeded,
)
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.policies.generation import end_ids
from grpo_rl.policies.loading import CheckpointNames, from_folder
from grpo_rl.policies.lora import base_weights


class TransformersEngine(StepByGenerate, Engine):
    """A copy of the model that samples by ``model.generate``.

    Args:
        model: a local model folder.
        max_model_len: longest prompt and response together, in tokens.
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
        self.version, self.max_model_len, self.dtype = 0, max_model_len, getattr(torch, dtype)
        self.takes_adapters = self.proves_bytes = False
        self._device = torch.device(device)
        self._max_batch = max_batch
        self.out_of_memory = 0
        """Times that memory ran out, and fewer responses were sampled at a time from then on."""
        self._model: Any = from_folder(model, dtype=self.dtype).to(self._device).eval()
        self._model.requires_grad_(False)
        self._ends, self._folder = list(end_ids(model)), model
        self._decoder: Tokenizer | None = None  # read once stop strings are asked for
        # `generate` fills in what a call leaves open from here: a model's own temperature or repetition penalty would
        # change the distribution without the recorder's knowledge.
        self._model.generation_config = GenerationConfig()

    @override
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        assert self._model.device.type == self._device.type, "wake() the engine before it generates"
        check_request(prompts, n, sampling, self.max_model_len)
        samples: list[Samples] = []
        while len(samples) < len(prompts):
            # A response with a seed must not depend on the others in its batch.
            size = max(1, self._max_batch // n) if sampling.seed is None else 1
            at_once = prompts[len(samples) :][:size]
            with seeded(sampling.seed):
                found = self._within_memory(at_once, n, sampling)
            samples += found or []
        return samples

    @override
    def metrics(self) -> dict[str, float]:
        return {"engine/out_of_memory": self.out_of_memory}

    def state(self) -> dict[str, int]:
        """The number of responses at the same time, and how often memory ran out, for a checkpoint."""
        return {"max_batch": self._max_batch, "out_of_memory": self.out_of_memory}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on with a checkpoint's number: its responses depend on it."""
        self._max_batch, self.out_of_memory = state["max_batch"], state["out_of_memory"]

    def _within_memory(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples] | None:
        """The samples; None where memory ran out, after which fewer are sampled at a time."""
        try:
            return self._generate(prompts, n, sampling)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            why = reason(error)
        if len(prompts) == 1:
            raise OutOfMemoryError(
                f"{n} responses of at most {sampling.max_new_tokens} tokens to a prompt of {len(prompts[0])} do not "
                f"fit into memory ({why}); start a new run with a lower env.repeats or sampling.max_new_tokens"
            )
        self._max_batch = len(prompts) * n // 2
        self.out_of_memory += 1
        what = f"The engine's memory ran out with {len(prompts) * n} responses at the same time ({why}); it goes on "
        print(f"{what}with {self._max_batch}, and samples these prompts again", file=sys.stderr, flush=True)
        free_memory()
        return None

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        longest = max(map(len, prompts))
        pad = self._ends[0] if self._ends else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        room = [min(sampling.max_new_tokens, self.max_model_len - len(p)) for p in prompts]
        recorder = _Recorder(longest, sampling.cuts)
        warpers = LogitsProcessorList()
        if sampling.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.cuts:
            if sampling.min_p:
                warpers.append(MinPLogitsWarper(sampling.min_p))
            if sampling.top_k:
                warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                warpers.append(TopPLogitsWarper(sampling.top_p))
        warpers.append(recorder)
        ends = [] if sampling.ignore_eos else self._ends
        stopping = None
        if sampling.stop:
            decoder = self._decoder = self._decoder or text_decoder(self._folder)
            stopping = _AtStopString([StopString(decoder, p, sampling.stop) for p in prompts for _ in range(n)])
        sequences = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=warpers,
            stopping_criteria=StoppingCriteriaList([stopping] if stopping else []),
            generation_config=GenerationConfig(
                do_sample=sampling.temperature > 0,
                top_k=0,
                num_return_sequences=n,
                max_new_tokens=max(room),
                min_new_tokens=sampling.min_new_tokens or None,
                eos_token_id=ends or None,
                pad_token_id=pad,
            ),
        )
        log_probs = recorder.log_probs(sequences).tolist()
        responses = sequences[:, longest:].tolist()
        stops = stopping.lengths if stopping else [None] * len(responses)
        whole = [
            _until_end(response, room[i // n], ends, sampling.min_new_tokens, stops[i])
            for i, response in enumerate(responses)
        ]
        kept = [recorder.kept(i, len(ids)) for i, (ids, _) in enumerate(whole)] if sampling.cuts else None
        return [
            Samples.from_lists(
                [ids for ids, _ in whole[i : i + n]],
                [log_probs[j][: len(whole[j][0])] for j in range(i, i + n)],
                [truncated for _, truncated in whole[i : i + n]],
                self.version,
                kept and kept[i : i + n],
            )
            for i in range(0, len(whole), n)
        ]

    @override
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        held = self._held()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in held:
                    raise LookupError(f"{type(self._model).__name__} has no parameter {name!r}")
                held[name].copy_(tensor)
        self.version = version

    @override
    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = False) -> dict[str, int]:
        held = self._held()
        return {name: fingerprint(held[name].to(self.dtype)) for name in shapes}

    def _held(self) -> dict[str, Tensor]:
        """The model's tensors, or the parts of them that the checkpoint names."""
        names = CheckpointNames(self._model)
        return dict(view for named in base_weights(self._model) for view in names.views(*named))

    def sleep(self) -> None:
        """Moves the weights to host memory."""
        self._model.to("cpu")

    @override
    def wake(self) -> None:
        self._model.to(self._device)

    @override
    def close(self) -> None:
        self._model = None
        gc.collect()


def _until_end(
    response: list[int], room: int, ends: Sequence[int], at_least: int, stop: int | None
) -> tuple[list[int], bool]:
    """The response up to the token that ended it or completed a stop string, and whether it was cut at ``room``.

    >>> _until_end([5, 6, 2, 9], 4, ends=[2], at_least=0, stop=None), _until_end([5, 6, 7], 3, [2], 0, stop=3)
    (([5, 6, 2], False), ([5, 6, 7], False))
    """
    for i, token in enumerate(response[:room]):
        if (token in ends and i >= at_least) or i + 1 == stop:
            return response[: i + 1], False
    return response[:room], True


class _AtStopString(StoppingCriteria):
    """Ends each response with the token that completes a stop string."""

    def __init__(self, texts: Sequence[StopString]) -> None:
        self._texts, self._steps = texts, 0
        self.lengths: list[int | None] = [None] * len(texts)
        """Tokens of each response that a stop string has ended."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._steps += 1
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.lengths[i] is None and self._texts[i].completed_by(token):
                self.lengths[i] = self._steps
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


class _Recorder(LogitsProcessor):
    """Records the log-probability of each sampled token; last in the list, it sees the final distribution.

    Only one step's [B, V] is held: its token is known when the next one is sampled. With ``cuts`` it also records kept
    sets: the ids that are not at -inf.
    """

    def __init__(self, prompt_length: int, cuts: bool) -> None:
        self._prompt_length, self._cuts = prompt_length, cuts
        self._last: Tensor | None = None
        self._taken: list[Tensor] = []
        self._kept: list[tuple[Tensor, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._last = scores.float().log_softmax(-1)
        if self._cuts:
            kept = (scores > -torch.inf).cpu()
            kept &= ~kept.all(-1, keepdim=True)  # no set where nothing was cut off
            self._kept.append(kept.nonzero()[:, 1].split(kept.sum(-1).tolist()))
        return scores

    def _take(self, sequences: Tensor) -> None:
        position = self._prompt_length + len(self._taken)
        if self._last is not None and sequences.shape[1] > position:
            self._taken.append(self._last.gather(-1, sequences[:, position, None])[:, 0])

    def log_probs(self, sequences: Tensor) -> Tensor:
        """[B, steps] once generation has ended."""
        self._take(sequences)
        return torch.stack(self._taken, dim=1)

    def kept(self, row: int, tokens: int) -> list[list[int]]:
        """The kept sets of a row's first tokens."""
        return [step[row].tolist() for step in self._kept[:tokens]]


def text_decoder(model: str | Path) -> Tokenizer:
    """The decoder of a model folder's ids, as stop strings need one.

    Raises:
        ValueError: the folder has no fast tokenizer.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if not tokenizer.is_fast:
        raise ValueError(f"sampling.stop looks for text, and {model} has no fast tokenizer; use an end-of-sequence id")
    return tokenizer.backend_tokenizer


class StopString:
    """Finds the token of a response that completes a stop string, as vLLM's detokenizer does.

    Text is decoded a token at a time behind the prompt, special tokens too.
    """

    def __init__(self, decoder: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder, self._stop, self._text = decoder, stop, ""
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)

    def completed_by(self, token: int) -> bool:
        """True if a stop string is in the text, with the response's next token."""
        self._text += self._step(token) or ""
        return any(stop in self._text for stop in self._stop)

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._decoder, token)
        except Exception as error:  # the library has no narrower one for bytes that are no UTF-8
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._decoder, token)
