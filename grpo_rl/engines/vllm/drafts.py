"""Drafts of the next tokens, which vLLM checks in one forward (speculative decoding). For vLLM 0.32."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig

CONTEXT = 4
"""Tokens behind which a continuation is looked up."""
MOST_CONTINUATIONS = 200_000
"""Continuations that are remembered, in about 60 MB; the oldest are forgotten."""
ENOUGH = 1_000
"""Drafted tokens from which on the share that was kept counts."""


class Drafts:
    """vLLM's proposer of drafts: what other responses, of the group and earlier, went on with.

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
            tail = np.asarray(token_ids_cpu[i, max(0, end - len(new) - CONTEXT) : end]).tolist()
            for at in range(CONTEXT, len(tail)):
                before = tuple(tail[at - CONTEXT : at])
                self._next[before] = tail[at]
                self._next.move_to_end(before)
            drafts[i] = self._continued(tuple(tail[-CONTEXT:]))
        while len(self._next) > MOST_CONTINUATIONS:
            self._next.popitem(last=False)
        return drafts

    def _continued(self, before: tuple[int, ...]) -> list[int]:
        draft: list[int] = []
        while len(draft) < self._length and (token := self._next.get(before)) is not None:
            draft.append(token)
            before = (*before[1:], token)
        return draft


class DraftMeter:
    """Counts vLLM's drafts and what was kept of them, and has none made where they don't pay.

    They pay while a forward of full drafts takes less time than its sequences would take one token at a time. The times
    are measured here, by forwards without attention, for powers of two of sequences; of a draft half is taken to be
    kept, and from :data:`ENOUGH` drafted tokens on what was kept; where none pay by then, none are made again.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self.drafted, self.kept = runner, 0, 0
        self._propose, runner.propose_draft_token_ids = runner.propose_draft_token_ids, self.propose
        self._length = runner.speculative_config.num_speculative_tokens
        most = min(runner.max_num_reqs, runner.max_num_tokens // (self._length + 1))
        self._times = {}
        """The time with full drafts over that without, by the number of sequences."""
        for live in (2**i for i in range(most.bit_length())):
            self._times[live] = self._forward_s(live * (self._length + 1)) / self._forward_s(live)
            if self._times[live] >= 1 + self._length:
                break

    def _forward_s(self, tokens: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            hidden, _ = self._runner._dummy_run(tokens)
            self._runner.model.compute_logits(hidden).sum().item()
            return time.perf_counter() - start

        return min(once() for _ in range(3))

    @property
    def most_live(self) -> int:
        """The most sequences for which drafts pay."""
        kept = self.kept / self.drafted if self.drafted >= ENOUGH else 0.5
        return max((live for live, times in self._times.items() if times < 1 + kept * self._length), default=0)

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
        """Counts since the engine's start, by the names of a step's metrics."""
        kept = self.kept / self.drafted if self.drafted else 0.0
        return {"drafts/tokens": self.drafted, "drafts/accepted_fraction": kept, "drafts/most_live": self.most_live}


def draft_arguments(kind: str, tokens: int) -> dict[str, Any]:
    """Further arguments of `vllm.LLM`; for ``kind`` see ``inference_model.speculative``."""
    own = {"method": "custom_class", "model": f"{Drafts.__module__}.{Drafts.__name__}"}
    more = own if kind == "responses" else {"prompt_lookup_max": CONTEXT}
    return {"speculative_config": {"method": kind, "num_speculative_tokens": tokens} | more}
