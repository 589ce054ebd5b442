"""EnginePolicy: an engine as a TorchRL policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from grpo_rl.data import keys
from grpo_rl.engines.base import Sampler, Samples, Sampling, StepByGenerate
from grpo_rl.envs.rows import Row, stacked

Sample = Callable[[Sequence[int], int, Sampling], Awaitable[Samples]]
"""Samples so many responses to a prompt, on an engine that is awaited."""

WRITTEN = [keys.TOKENS_RESPONSE, keys.LOG_PROBS_RESPONSE, keys.VERSIONS, keys.TRUNCATED, keys.MAX_TOKENS]
"""Entries that a policy writes into each row."""
OPTIONAL = [keys.KEPT_IDS, keys.KEPT_COUNTS, keys.ROUTES_FULL]
"""Entries that it writes as well where its engine records them."""


class EnginePolicy(TensorDictModuleBase):
    """Samples a response for each row: for ``env.rollout``, TorchRL's collectors and ours.

    All rows that have as many tokens left are sampled in one call. If each prompt is that of as many rows of its group,
    the engine computes it once. A row that is done gets an empty response.

    Args:
        engine: in this process, or a fleet that looks like one engine.
        sampling: of each turn; shortened to the tokens that are left in the context.
    """

    in_keys = [keys.TOKENS_PROMPT, keys.GROUP_ID]  # pyrefly: ignore[bad-override-mutable-attribute]
    out_keys = WRITTEN  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, engine: Sampler, sampling: Sampling) -> None:
        super().__init__()
        self.engine, self.sampling = engine, sampling

    @property
    def in_rounds(self) -> bool:
        """True if a response depends on those of its batch, so that all turns of a round are sampled together."""
        return isinstance(self.engine, StepByGenerate) and self.engine.in_rounds

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes a response, its log-probabilities, policy version and truncation into each row.

        Kept sets and the experts of each token, of prompt and response, come with them where the engine gives any.
        """
        rows = list(tensordict.unbind(0))
        self.respond(rows)
        return stacked(rows)

    def respond(self, rows: Sequence[Row]) -> None:
        """Writes what :meth:`forward` writes into rows that are not stacked."""
        calls: dict[Sampling, list[Row]] = {}
        for row in rows:
            if row.get("done", False):
                write([row], _NOTHING, self.engine.max_model_len)
                continue
            sampling = turn_sampling(len(row[keys.TOKENS_PROMPT]), self.sampling, self.engine.max_model_len)
            calls.setdefault(sampling, []).append(row)
        for sampling, asked in calls.items():
            groups = list(by_prompt(asked).values())
            if len({len(members) for members in groups}) > 1:  # one call all the same: responses depend on their batch
                groups = [[row] for row in asked]
            prompts = [members[0][keys.TOKENS_PROMPT].tolist() for members in groups]
            sampled = self.engine.generate(prompts, len(groups[0]), sampling)
            for members, samples in zip(groups, sampled, strict=True):
                write(members, samples, self.engine.max_model_len)


async def act(rows: Sequence[Row], sample: Sample, sampling: Sampling, max_model_len: int) -> None:
    """Writes a response into each row, as :class:`EnginePolicy` does, for an engine that is awaited."""

    async def of_prompt(prompt: tuple[int, ...], members: Sequence[Row]) -> None:
        settings = turn_sampling(len(prompt), sampling, max_model_len)
        write(members, await sample(prompt, len(members), settings), max_model_len)

    first, *others = [of_prompt(prompt, members) for (_, prompt), members in by_prompt(rows).items()]
    await (asyncio.gather(first, *others) if others else first)  # a single one at once


def by_prompt(rows: Iterable[Row]) -> dict[tuple[int, tuple[int, ...]], list[Row]]:
    """The rows of each group that go on from the same tokens, by the group's id and these tokens."""
    found: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        found.setdefault((int(row[keys.GROUP_ID]), tuple(row[keys.TOKENS_PROMPT].tolist())), []).append(row)
    return found


def turn_sampling(prompt_tokens: int, sampling: Sampling, max_model_len: int) -> Sampling:
    """The sampling settings of a turn, shortened to the tokens that are left in the context."""
    limit = min(sampling.max_new_tokens, max_model_len - prompt_tokens)
    if limit == sampling.max_new_tokens or limit < 1:  # the engine refuses a prompt that leaves no room
        return sampling
    return replace(sampling, max_new_tokens=limit, min_new_tokens=min(sampling.min_new_tokens, limit))


def write(rows: Sequence[Row], samples: Samples, max_model_len: int) -> None:
    """Writes the responses to one prompt into the rows that ask for them."""
    lengths = samples.offsets.diff().tolist()
    log_probs, versions = samples.log_probs.split_with_sizes(lengths), samples.versions.split_with_sizes(lengths)
    longest = torch.tensor([max_model_len])
    for g, (row, ids) in enumerate(zip(rows, samples.response_ids.split_with_sizes(lengths), strict=True)):
        row[keys.TOKENS_RESPONSE] = ids
        row[keys.LOG_PROBS_RESPONSE] = log_probs[g]
        row[keys.VERSIONS] = versions[g]
        row[keys.TRUNCATED] = samples.truncated[g : g + 1]
        row[keys.MAX_TOKENS] = longest
    if samples.kept:
        counts = samples.kept.counts.split(lengths)
        ids_of = samples.kept.ids.split([int(own.sum()) for own in counts])
        for g, row in enumerate(rows):
            row[keys.KEPT_IDS], row[keys.KEPT_COUNTS] = ids_of[g], counts[g]
    if samples.routes is not None and samples.prompt_routes is not None:
        for row, routes in zip(rows, samples.routes.split(lengths), strict=True):
            row[keys.ROUTES_FULL] = torch.cat([samples.prompt_routes, routes])


_NOTHING = Samples.from_lists([[]], [[]], [False], 0)
