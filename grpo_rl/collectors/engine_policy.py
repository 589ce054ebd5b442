"""EnginePolicy: an engine as a TorchRL policy."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from grpo_rl.data import keys
from grpo_rl.engines.base import Sampler, Samples, Sampling


class EnginePolicy(TensorDictModuleBase):
    """Samples for ``env.rollout`` and for TorchRL's own collectors.

    Rows of one group share one prompt: they are sampled in one call, so the engine computes the prompt once.
    """

    in_keys = [keys.TOKENS_PROMPT, keys.GROUP_ID]  # pyrefly: ignore[bad-override-mutable-attribute]
    out_keys = [  # pyrefly: ignore[bad-override-mutable-attribute]
        keys.TOKENS_RESPONSE,
        keys.LOG_PROBS_RESPONSE,
        keys.VERSIONS,
        keys.TRUNCATED,
    ]

    def __init__(self, engine: Sampler, sampling: Sampling) -> None:
        super().__init__()
        self._engine, self._sampling = engine, sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes a response, its log-probabilities, policy version and truncation into each row.

        Kept sets and the experts of each token, of prompt and response, come with them where the engine gives any.
        """
        rows = list(tensordict.unbind(0))
        groups: dict[int, list[TensorDictBase]] = {}
        for row in rows:
            groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
        by_size: dict[int, list[list[TensorDictBase]]] = {}
        for group in groups.values():
            by_size.setdefault(len(group), []).append(group)
        for size, members in by_size.items():
            prompts = [group[0][keys.TOKENS_PROMPT].tolist() for group in members]
            for group, samples in zip(members, self._engine.generate(prompts, size, self._sampling), strict=True):
                self._write(group, samples)
        return lazy_stack(rows)

    @staticmethod
    def _write(group: list[TensorDictBase], samples: Samples) -> None:
        lengths = samples.offsets.diff().tolist()
        log_probs, versions = samples.log_probs.split(lengths), samples.versions.split(lengths)
        bounds = samples.offsets.tolist()
        for g, (row, ids) in enumerate(zip(group, samples.responses, strict=True)):
            row[keys.TOKENS_RESPONSE] = ids
            row[keys.LOG_PROBS_RESPONSE] = log_probs[g]
            row[keys.VERSIONS] = versions[g]
            row[keys.TRUNCATED] = samples.truncated[g : g + 1]
            if samples.kept:
                place = torch.arange(len(samples.response_ids))
                kept = samples.kept.where((place >= bounds[g]) & (place < bounds[g + 1]))
                row[keys.KEPT_IDS], row[keys.KEPT_COUNTS] = kept.ids, kept.counts
            if samples.routes is not None and samples.prompt_routes is not None:
                row[keys.ROUTES_FULL] = torch.cat([samples.prompt_routes, samples.routes.split(lengths)[g]])
