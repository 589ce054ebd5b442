"""Drafts of the next tokens, which vLLM checks in one forward (speculative decoding). For vLLM 0.32."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from vllm.config import VllmConfig

WORDS = 4
"""Tokens after which a continuation is looked up."""
MOST = 1_000_000
"""Continuations that are remembered; the oldest are forgotten."""


class Drafts:
    """vLLM's proposer of drafts: what the group's other responses, and earlier ones, have said behind the last words.

    Drafts change no distribution: vLLM keeps of them what the policy would have sampled (speculative decoding,
    https://arxiv.org/abs/2302.01318), with the policy's own log-probabilities.
    """

    def __init__(self, config: VllmConfig) -> None:
        assert config.speculative_config is not None
        self._length = config.speculative_config.num_speculative_tokens
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def load_model(self, *_: Any) -> None:
        """Nothing: there is no draft model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """A draft for each sequence that has just got tokens; empty for others."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for i, new in enumerate(sampled_token_ids):
            if not len(new):
                continue
            end = int(num_tokens_no_spec[i])
            tail = np.asarray(token_ids_cpu[i, max(0, end - len(new) - WORDS) : end]).tolist()
            for at in range(WORDS, len(tail)):
                words = tuple(tail[at - WORDS : at])
                self._next[words] = tail[at]
                self._next.move_to_end(words)
            drafts[i] = self._continued(tuple(tail[-WORDS:]))
        while len(self._next) > MOST:
            self._next.popitem(last=False)
        return drafts

    def _continued(self, words: tuple[int, ...]) -> list[int]:
        draft: list[int] = []
        while len(draft) < self._length and (token := self._next.get(words)) is not None:
            draft.append(token)
            words = (*words[1:], token)
        return draft


class DraftMeter:
    """Counts vLLM's drafts and what was kept of them, and has none made where they don't pay.

    They pay while a forward of full drafts takes less time than its sequences would take one token at a time, if half
    of each draft is kept; up to how many sequences that holds is measured here, by forwards without attention.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self.drafted, self.kept = runner, 0, 0
        self._propose, runner.propose_draft_token_ids = runner.propose_draft_token_ids, self.propose
        length = runner.speculative_config.num_speculative_tokens
        most = min(runner.max_num_reqs, runner.max_num_tokens // (length + 1))

        def pays(live: int) -> bool:
            return self._forward_s(live * (length + 1)) < (1 + length / 2) * self._forward_s(live)

        self.most_live = max(takewhile(pays, (2**i for i in range(most.bit_length()))), default=0)
        """The most sequences for which drafts are made, a power of two."""

    def _forward_s(self, tokens: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            hidden, _ = self._runner._dummy_run(tokens)
            self._runner.model.compute_logits(hidden).sum().item()
            return time.perf_counter() - start

        return min(once() for _ in range(3))

    def propose(self, scheduled: Any, sampled: Sequence[Sequence[int]], *arguments: Any) -> list[list[int]]:
        """vLLM's drafts for the sequences that have just got tokens, or none."""
        drafts = self._propose(scheduled, sampled, *arguments)
        live = [len(new) for new in sampled if len(new)]
        self.kept += sum(live) - len(live)
        if len(live) > self.most_live:
            return [[] for _ in drafts]
        self.drafted += sum(map(len, drafts))
        return drafts

    def metrics(self) -> dict[str, float]:
        """Counts so far, by the names of a step's metrics."""
        kept = self.kept / self.drafted if self.drafted else 0.0
        return {"drafts/tokens": self.drafted, "drafts/accepted_fraction": kept, "drafts/most_live": self.most_live}


def draft_arguments(kind: str, tokens: int) -> dict[str, Any]:
    """Further arguments of `vllm.LLM`; for ``kind`` see ``inference_model.speculative``."""
    own = {"method": "custom_class", "model": f"{Drafts.__module__}.{Drafts.__name__}"}
    more = {"ngram": {"prompt_lookup_max": WORDS}, "responses": own}.get(kind, {})
    return {"speculative_config": {"method": kind, "num_speculative_tokens": tokens} | more}
