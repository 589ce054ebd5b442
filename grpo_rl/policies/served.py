"""ServedTeacher: a teacher behind an OpenAI-compatible endpoint that scores token ids, as `vllm serve` does."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from grpo_rl.data.group import Group
from grpo_rl.envs.rewards.json_client import EndpointError, JsonClient
from grpo_rl.policies.divergence import TopTeacher
from grpo_rl.policies.policy import Peers, Reference
from grpo_rl.waits import waiting

Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of a prompt and of a response."""
CONCURRENCY, DEADLINE_S = 8, 300.0
"""Requests at a time, and seconds for one of them, its further tries included."""
LEAST = -1e4
"""The lowest log-probability that is taken; vLLM writes -9999 for minus infinity."""


class ServedTeacher(Reference):
    """A reference on a server: the log-probabilities of token ids, and each token's likeliest tokens.

    A request scores one response, by vLLM's ``prompt_logprobs``; equal responses are sent once. Log-probabilities are
    those of temperature 1.

    Args:
        url: of the endpoint, such as ``http://127.0.0.1:8000/v1``.
        tokenizer: the policy's; the server's must read the same tokens out of ids.
        vocabulary: number of ids that the policy's head has.
        top: likeliest tokens that come along with each token, for a KL over the full vocabulary; 0: none. vLLM's
            ``--max-logprobs`` limits them.
        key: sent as bearer token.
        peers: the processes that train together; each asks about its share of the groups.

    Raises:
        ValueError: the server can't be reached, refuses, serves not one model, or gives no such log-probabilities.
        EndpointError: of :meth:`add_log_probs`: a request failed in all tries, or its reply can't be read.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        top: int = 0,
        key: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._client, self._tokenizer, self._peers = JsonClient(url, key, deadline_s=DEADLINE_S), tokenizer, peers
        self._vocabulary, self._top = vocabulary, top
        try:
            self._name = self._client.only_model("give an endpoint with one")
            self._scored(((0,), (1,)))
        except EndpointError as error:
            raise ValueError(str(error)) from None

    @override
    def add_log_probs(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        try:
            found = self._asked(groups[self._peers.rank :: self._peers.size] if self._peers else groups)
        except EndpointError as error:  # the other ranks wait for this one
            found = error
        by_id: dict[int, list[Tensor]] = {}
        for of_rank in self._peers.gather(found) if self._peers else [found]:
            if isinstance(of_rank, EndpointError):
                raise of_rank
            by_id |= of_rank
        fields = ("ref_log_probs", "teacher_ids", "teacher_log_probs")[: 3 if self._top else 1]
        return [replace(group, **dict(zip(fields, by_id[group.group_id], strict=False))) for group in groups]

    @override
    def distributions(self, groups: Sequence[Group], device: torch.device) -> TopTeacher:
        found = [(group.teacher_ids, group.teacher_log_probs) for group in groups]
        return TopTeacher(*(torch.cat(part).to(device) for part in zip(*found, strict=True)))

    def _asked(self, groups: Sequence[Group]) -> dict[int, list[Tensor]]:
        """The log-probabilities [R], likeliest tokens [R, W] and their log-probabilities of each group, by its id."""
        of_groups = {
            group.group_id: [((*group.prompt_ids.tolist(),), (*ids.tolist(),)) for ids in group.responses]
            for group in groups
        }
        asked = list(dict.fromkeys(each for of_group in of_groups.values() for each in of_group))
        with waiting("the served teacher", self._client.url), ThreadPoolExecutor(CONCURRENCY) as pool:
            found = dict(zip(asked, pool.map(self._scored, asked), strict=True))
        return {
            group_id: [torch.cat(parts) for parts in zip(*(found[each] for each in of_group), strict=True)]
            for group_id, of_group in of_groups.items()
        }

    def _scored(self, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
        prompt, response = asked
        rows: list[tuple[float, list[tuple[int, float]]]] = []
        if response:
            ids = [*prompt, *response]
            body = {"model": self._name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._top}
            try:
                answer = self._client.ask("/completions", body, time.monotonic() + DEADLINE_S)
            except ValueError as error:
                raise EndpointError(str(error)) from None
            try:
                reply = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
                if len(reply) != len(response):
                    raise ValueError(f"{len(reply)} tokens in the place of {len(response)}")
                rows = [self._row(row, own) for row, own in zip(reply, response, strict=True)]
            except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
                what = f"{self._client.url}/completions gave no prompt_logprobs that can be read"
                why = " ".join(self._client.without_key(str(error)).split())
                raise EndpointError(f"{what}: {type(error).__name__}: {why:.200}") from None
        size = (len(rows), self._top)
        return (
            torch.tensor([own for own, _ in rows]),
            torch.tensor([[token for token, _ in top] for _, top in rows], dtype=torch.long).reshape(size),
            torch.tensor([[value for _, value in top] for _, top in rows]).reshape(size),
        )

    def _row(self, row: Any, own: int) -> tuple[float, list[tuple[int, float]]]:
        """The log-probability of the token itself, and the likeliest tokens that came with it."""
        found = {int(token): entry["logprob"] for token, entry in row.items() if token.isdecimal()}
        if not all(type(value) in (int, float) and LEAST <= value < 1e-3 for value in found.values()):
            raise ValueError(f"a log-probability is no number from {LEAST:g} to 0")
        text, ours = row[str(own)].get("decoded_token"), str(self._tokenizer.decode([own]))
        # Pieces of characters are shown in several ways.
        readable = isinstance(text, str) and text.strip() and text.isascii() and text.isprintable() and ours.isascii()
        if readable and text.strip() != ours.strip():
            raise ValueError(f"id {own} is {text!r} to the teacher and {ours!r} to the policy: other vocabularies")
        # A head may be padded beyond the tokenizer, and the teacher's further than the policy's.
        of_policy = ((token, value) for token, value in found.items() if 0 <= token < self._vocabulary)
        top = sorted(of_policy, key=lambda each: -each[1])[: self._top]
        if len(top) < self._top:
            raise ValueError(f"{len(top)} likeliest tokens, and {self._top} were asked for")
        return found[own], top
