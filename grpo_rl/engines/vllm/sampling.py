"""Sampling in vLLM's terms: what a request asks for, and what its output becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from grpo_rl.engines.base import Samples, Sampling


def sampling_params(n: int, sampling: Sampling) -> SamplingParams:
    """vLLM's parameters: ids and the log-probability of each, once a response is complete."""
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def samples_of(output: RequestOutput, version: int) -> Samples:
    """The responses of a finished request, all sampled by weights of one version."""
    return Samples.from_lists(
        [response.token_ids for response in output.outputs],
        [cast(FlatLogprobs, response.logprobs).logprobs for response in output.outputs],
        [response.finish_reason == "length" for response in output.outputs],
        version,
    )


def samples_with_versions(output: RequestOutput) -> Samples:
    """The responses of a finished request, each token with the version of its weights."""
    spans = [span for response in output.outputs for span in response.weight_versions or ()]
    versions = [version_number(span.version) for span in spans]
    lengths = torch.tensor([span.end - span.start for span in spans], dtype=torch.long)
    samples = samples_of(output, max(versions))
    token_versions = torch.tensor(versions).repeat_interleave(lengths)
    assert len(token_versions) == len(samples.response_ids), "vLLM did not say which weights sampled each token"
    return replace(samples, token_versions=token_versions)


def version_number(version: str) -> int:
    """Policy version by vLLM's name for it, which is "default" until the first update."""
    return 0 if version == "default" else int(version)
