"""Kept sets from vLLM on a CPU, whose runner does not return them. For vLLM 0.32.

On a GPU vLLM does so by itself (``return_sampling_mask``). Here the same fields of its outputs are filled in, so that
all behind the runner is vLLM's own.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@functools.cache
def record_kept() -> None:
    """Has vLLM return the kept sets of this process's samples, in every step in which a request cuts anything off.

    They are read off the log-probabilities that it samples from, behind temperature, min-p, top-k and top-p: what was
    cut off has -inf.
    """
    sampler, runner, scheduler = cast(Any, Sampler), cast(Any, GPUModelRunner), cast(Any, Scheduler)
    sample, sample_tokens, update = sampler.sample, runner.sample_tokens, scheduler.update_from_output

    def sample_and_record(self: Any, logits: Tensor, sampling_metadata: Any, *more: Any, **settings: Any) -> Any:
        sampled, log_probs = sample(self, logits, sampling_metadata, *more, **settings)
        processors = sampling_metadata.logitsprocs.argmax_invariant
        cuts = sampling_metadata.top_k is not None or sampling_metadata.top_p is not None
        cuts = cuts or any(isinstance(p, MinPLogitsProcessor) and p.min_p_count for p in processors)
        self.cut_log_probs = log_probs if cuts else None
        return sampled, log_probs

    def sample_tokens_and_return(self: Any, *arguments: Any) -> Any:
        self.sampler.cut_log_probs = None
        output = sample_tokens(self, *arguments)
        if self.sampler.cut_log_probs is not None:
            whole = getattr(output, "_model_runner_output", output)  # of an output that is still on its way
            whole.sampling_masks = kept_sets(self.sampler.cut_log_probs)
            self.sampler.cut_log_probs = None
        return output

    def update_with_kept(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Not by vLLM's own setting, which it refuses for this runner.
        self.return_sampling_mask = model_runner_output.sampling_masks is not None
        return update(self, scheduler_output, model_runner_output)

    sampler.sample, runner.sample_tokens = sample_and_record, sample_tokens_and_return
    scheduler.update_from_output = update_with_kept


def kept_sets(log_probs: Float[Tensor, "n V"]) -> SamplingMaskLists:
    """The ids that are not at -inf, row by row; none in rows where nothing is.

    >>> kept_sets(torch.tensor([[-1.0, -torch.inf, -2.0], [-1.0, -1.0, -1.0]])).slice_request(0, 1).to_nested_list()
    [[0, 2]]
    """
    kept = log_probs > -torch.inf
    kept &= ~kept.all(-1, keepdim=True)
    ids = kept.nonzero()[:, 1].to(torch.int32).numpy()
    return SamplingMaskLists(ids, np.concatenate([[0], kept.sum(-1).numpy()]).cumsum())
