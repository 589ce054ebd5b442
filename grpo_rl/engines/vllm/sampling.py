"""Sampling in vLLM's terms: what a request asks for, and what its output becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from grpo_rl.engines.base import Samples, Sampling

ROUTES_KEY = "grpo_rl_routes"
"""Entry of a request's further arguments under which its driver asks for its routes."""


def sampling_params(n: int, sampling: Sampling, routes_key: str | None = None) -> SamplingParams:
    """vLLM's parameters: ids and the log-probability of each, once a response is complete.

    Args:
        routes_key: under which the routes will be asked for; None: they aren't.
    """
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
        extra_args=None if routes_key is None else {ROUTES_KEY: [routes_key, n]},
    )


def token_counts(output: RequestOutput) -> list[int]:
    """Tokens of each response of a finished request with its prompt."""
    return [len(output.prompt_token_ids or ()) + len(response.token_ids) for response in output.outputs]


def with_routes(samples: Samples, taken: Sequence[tuple[bytes, str, list[int]]]) -> Samples:
    """The samples with the experts of each token.

    Args:
        taken: bytes, dtype and shape of those of each response with its prompt, [P + tokens, L, K]. The prompt's are
            those of the first.
    """
    arrays = (np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in taken)
    routes = [torch.from_numpy(array.copy()) for array in arrays]  # bytes can't be written to
    prompt = len(routes[0]) - int(samples.offsets[1])
    return replace(samples, prompt_routes=routes[0][:prompt], routes=torch.cat([own[prompt:] for own in routes]))


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
