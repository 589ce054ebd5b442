"""Sampling in vLLM's terms: what a request asks for, and what its output becomes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import vllm
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from grpo_rl.engines.base import Samples, Sampling

ALL = 1 << 30
"""A top-k of more tokens than a vocabulary has, where vLLM asks for one."""
ROUTES_KEY = "grpo_rl_routes"
"""Entry of a request's further arguments under which its driver asks for its routes."""


def sampling_params(
    n: int,
    sampling: Sampling,
    end_ids: Sequence[int],
    return_sampling_mask: bool = False,
    routes_key: str | None = None,
) -> SamplingParams:
    """vLLM's parameters: ids and the log-probability of each, once a response is complete.

    Args:
        end_ids: the model's end-of-sequence ids.
        return_sampling_mask: the engine was started to return kept sets by itself. It then takes neither a temperature
            of 0 nor requests without a top-k: a greedy response is drawn from the likeliest token alone, its
            log-probabilities are 0, and a seed decides between equals.
        routes_key: under which the routes will be asked for; None: they aren't.
    """
    greedy = sampling.temperature == 0
    native = {"top_k": sampling.top_k or ALL} if return_sampling_mask else {}
    if return_sampling_mask and greedy:
        native = {"top_k": 1, "temperature": 1.0}
    seed = 0 if greedy else sampling.seed  # vLLM would draw one on a GPU
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": seed, **native}
    return SamplingParams(
        n=n,
        **settings,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        # Not left to vLLM, which adds the tokenizer's own id where it has a tokenizer.
        ignore_eos=True,
        stop_token_ids=[] if sampling.ignore_eos else list(end_ids),
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be one
        include_stop_str_in_output=True,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=None if routes_key is None else {ROUTES_KEY: [routes_key, n]},
    )


def token_counts(output: RequestOutput) -> list[int]:
    """Tokens of each response of a finished request with its prompt."""
    return [len(output.prompt_token_ids or ()) + len(response.token_ids) for response in output.outputs]


def with_routes(samples: Samples, taken: Sequence[tuple[bytes, str, list[int]]]) -> Samples:
    """The samples with the experts of each token, from `WorkerExtension.take_routes`; the prompt's are the first's."""
    arrays = (np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in taken)
    routes = [torch.from_numpy(array.copy()) for array in arrays]  # bytes can't be written to
    prompt = len(routes[0]) - int(samples.offsets[1])
    return replace(samples, prompt_routes=routes[0][:prompt], routes=torch.cat([own[prompt:] for own in routes]))


def cuts_among(sampling: Sampling, vocabulary: int) -> bool:
    """True if any of a vocabulary's tokens can be cut off: a top-k of them all is none.

    >>> cuts_among(Sampling(top_k=4), 5), cuts_among(Sampling(top_k=5), 5), cuts_among(Sampling(top_k=5, min_p=0.1), 5)
    (True, False, True)
    """
    return replace(sampling, top_k=0 if sampling.top_k >= vocabulary else sampling.top_k).cuts


def samples_of(output: RequestOutput, version: int, sampling: Sampling, vocabulary: int) -> Samples:
    """The responses of a finished request, all sampled by weights of one version.

    Raises:
        RuntimeError: tokens were cut off, and vLLM does not say which.
    """
    kept = None
    if sampling.cuts:
        kept = [[[]] * len(response.token_ids) for response in output.outputs]
        if cuts_among(sampling, vocabulary):  # vLLM drops a top-k of all tokens, and returns no sets then
            masks = [response.sampling_mask for response in output.outputs]
            kept = [mask.token_ids if mask else [] for mask in masks]
        if any(len(sets) != len(of.token_ids) for sets, of in zip(kept, output.outputs, strict=True)):
            raise RuntimeError(
                f"vLLM {vllm.__version__} did not return the kept sets of sampling.top_p={sampling.top_p}, "
                f"top_k={sampling.top_k} and min_p={sampling.min_p} which training needs; start the engine for them "
                "with vLLM 0.32, or set sampling.top_p=1, top_k=0 and min_p=0"
            )
    return Samples.from_lists(
        [response.token_ids for response in output.outputs],
        [cast(FlatLogprobs, response.logprobs).logprobs for response in output.outputs],
        [response.finish_reason == "length" for response in output.outputs],
        version,
        kept,
    )


def samples_with_versions(output: RequestOutput, sampling: Sampling, vocabulary: int) -> Samples:
    """The responses of a finished request, each token with the version of its weights."""
    spans = [span for response in output.outputs for span in response.weight_versions or ()]
    versions = [version_number(span.version) for span in spans]
    lengths = torch.tensor([span.end - span.start for span in spans], dtype=torch.long)
    samples = samples_of(output, max(versions), sampling, vocabulary)
    token_versions = torch.tensor(versions).repeat_interleave(lengths)
    assert len(token_versions) == len(samples.response_ids), "vLLM did not say which weights sampled each token"
    return replace(samples, token_versions=token_versions)


def version_number(version: str) -> int:
    """Policy version by vLLM's name for it, which is "default" until the first update."""
    return 0 if version == "default" else int(version)
