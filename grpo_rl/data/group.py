"""A group: one prompt and the G responses sampled for it, ragged and without padding; a trajectory becomes one of them.

Dimension letters: P prompt tokens, R response tokens of the whole group, G responses, N tokens, K ids of their kept
sets, L decoder layers, X experts of a token, W likeliest tokens of a teacher's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor

from grpo_rl.data import keys


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept sets of N tokens, flat: ids that the sampler could draw, where top-k, top-p or min-p cut others off.

    Args:
        ids: [K] int32, token after token.
        counts: [N] int64, ids of each token's set; 0: nothing was cut off, or nothing was sampled (a tool's output).
    """

    ids: Int[Tensor, " K"]
    counts: Int[Tensor, " N"]

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[int]]) -> Kept:
        """The kept sets from one list per token.

        >>> kept = Kept.from_lists([[4, 7], [], [1]])
        >>> kept.ids.tolist(), kept.counts.tolist()
        ([4, 7, 1], [2, 0, 1])
        """
        ids = torch.from_numpy(np.fromiter(chain.from_iterable(sets), np.int32))
        return cls(ids, torch.tensor([len(of_token) for of_token in sets], dtype=torch.long))

    @classmethod
    def joined(cls, parts: Iterable[tuple[Kept | None, int]]) -> Kept | None:
        """The kept sets of several pieces, one after the other; None where no piece has any.

        Args:
            parts: the kept sets of each piece, if it has any, and its number of tokens.
        """
        parts = list(parts)
        if all(kept is None for kept, _ in parts):
            return None
        counts = [torch.zeros(tokens, dtype=torch.long) if kept is None else kept.counts for kept, tokens in parts]
        return cls(torch.cat([kept.ids for kept, _ in parts if kept is not None]), torch.cat(counts))

    def where(self, tokens: Bool[Tensor, " N"]) -> Kept:
        """The kept sets of the chosen tokens alone.

        >>> Kept.from_lists([[4, 7], [], [1]]).where(torch.tensor([False, True, True])).ids.tolist()
        [1]
        """
        return Kept(self.ids[tokens.repeat_interleave(self.counts)], self.counts[tokens])

    def to(self, device: torch.device | str) -> Kept:
        """The same on a device."""
        return Kept(self.ids.to(device), self.counts.to(device))


NO_ROUTE = -1
"""Stands for the experts of a token that the sampler's routers never saw, like the last one of a response."""


@dataclass(frozen=True, eq=False)
class Group:
    """One prompt, stored once, and its G responses, stored flat with offsets.

    Response ``g`` owns ``response_ids[offsets[g]:offsets[g + 1]]``; every per-token field is cut the same way.
    A group is identified by ``group_id``, never by the text of its prompt: two rows may have the same prompt.

    Args:
        group_id: unique in the run.
        row: index of the dataset row.
        prompt_ids: [P] the prompt as the engine got it.
        response_ids: [R] sampled tokens, including the end-of-sequence token if there was one.
        log_probs: [R] the sampler's log-probabilities at the sampling temperature, in nats.
        versions: [R] the policy version that sampled each token.
        trainable: [R] False for tokens that the policy did not sample (a tool's output).
        offsets: [G + 1] where each response starts; ``offsets[-1] == R``.
        rewards: [G] total reward.
        reward_parts: named parts of the reward, [G] each, NaN for a response without one.
        measures: numbers logged next to the reward, [G] each, NaN for a response without one.
        truncated: [G] True if the response reached the length limit.
        advantages: [G], once they are computed.
        token_advantages: [R] those of the tokens, where the turns of a response have several.
        ref_log_probs: [R] the frozen reference's log-probabilities, if there is a reference.
        teacher_ids: [R, W] the likeliest tokens of a served teacher at each token, if it gave any.
        teacher_log_probs: [R, W] their log-probabilities, in nats.
        old_log_probs: [R] the trainer's own log-probabilities before it trains on the group, if they are needed.
        old_entropies: [R] the trainer's entropies, computed with ``old_log_probs``.
        routes: [R, L, X] the experts that the sampler's routers chose, by decoder layer, or :data:`NO_ROUTE`, if they
            are replayed; 0 in layers without experts.
        prompt_routes: [P, L, X] likewise, if there are ``routes``.
        kept_ids: [K] int32, the ids that the sampler could draw from, token after token, where it cut others off; then
            all log-probabilities are those of the distribution restricted to them (`grpo_rl.data.group.Kept`).
        kept_counts: [R] how many of them belong to each token; 0: nothing was cut off. Given with ``kept_ids``.
        sessions: [G] the session that each response is of, where an agent's session may give several, which share its
            reward; None: each response is compared for itself.

    >>> group = Group(
    ...     0, 0, torch.tensor([5, 6]), torch.tensor([7, 8, 9]), torch.zeros(3), torch.zeros(3, dtype=torch.long),
    ...     torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3]), torch.tensor([0.0, 1.0]), {},
    ...     torch.zeros(2, dtype=torch.bool))
    >>> group.size, [ids.tolist() for ids in group.responses]
    (2, [[7], [8, 9]])
    """

    group_id: int
    row: int
    prompt_ids: Int[Tensor, " P"]
    response_ids: Int[Tensor, " R"]
    log_probs: Float[Tensor, " R"]
    versions: Int[Tensor, " R"]
    trainable: Bool[Tensor, " R"]
    offsets: Int[Tensor, " G1"]
    rewards: Float[Tensor, " G"]
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    measures: dict[str, Tensor] = field(default_factory=dict)
    truncated: Bool[Tensor, " G"] | None = None
    advantages: Float[Tensor, " G"] | None = None
    token_advantages: Float[Tensor, " R"] | None = None
    ref_log_probs: Float[Tensor, " R"] | None = None
    teacher_ids: Int[Tensor, "R W"] | None = None
    teacher_log_probs: Float[Tensor, "R W"] | None = None
    old_log_probs: Float[Tensor, " R"] | None = None
    old_entropies: Float[Tensor, " R"] | None = None
    routes: Int[Tensor, "R L X"] | None = None
    prompt_routes: Int[Tensor, "P L X"] | None = None
    kept_ids: Int[Tensor, " K"] | None = None
    kept_counts: Int[Tensor, " R"] | None = None
    sessions: Int[Tensor, " G"] | None = None

    def __post_init__(self) -> None:
        tokens = int(self.offsets[-1])
        assert len(self.rewards) == self.size, (len(self.rewards), self.size)
        for name in ("response_ids", "log_probs", "versions", "trainable"):
            assert len(getattr(self, name)) == tokens, (name, len(getattr(self, name)), tokens)
        assert (self.kept_ids is None) == (self.kept_counts is None), "kept sets are ids with their counts"
        if self.kept_ids is not None and self.kept_counts is not None:
            assert len(self.kept_counts) == tokens, (len(self.kept_counts), tokens)
            assert int(self.kept_counts.sum()) == len(self.kept_ids), (int(self.kept_counts.sum()), len(self.kept_ids))
        assert self.routes is None or len(self.routes) == tokens, (len(self.routes), tokens)
        if self.prompt_routes is not None:
            assert len(self.prompt_routes) == len(self.prompt_ids), (len(self.prompt_routes), len(self.prompt_ids))

    @property
    def size(self) -> int:
        """Number of responses, G."""
        return self.offsets.numel() - 1  # len() of a tensor takes four times as long

    @property
    def lengths(self) -> Int[Tensor, " G"]:
        """Tokens of each response."""
        return self.offsets.diff()

    @property
    def chosen_lengths(self) -> Int[Tensor, " G"]:
        """Tokens of each response that the policy sampled: all but those of tools."""
        chosen = torch.cat([self.offsets[:1], self.trainable.cumsum(0)])
        return chosen[self.offsets].diff()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of every response; a forward pass computes fewer where they begin alike."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def responses(self) -> tuple[Tensor, ...]:
        """Ids of each response."""
        return self.response_ids.split(self.lengths.tolist())

    @property
    def kept(self) -> Kept | None:
        """The kept sets of the response tokens; None where nothing was cut off."""
        return None if self.kept_ids is None or self.kept_counts is None else Kept(self.kept_ids, self.kept_counts)

    def with_advantages(self, advantages: Float[Tensor, " G"], of_tokens: Float[Tensor, " R"] | None = None) -> Group:
        """The same group with advantages, and those of the tokens where they differ."""
        assert len(advantages) == self.size, (len(advantages), self.size)
        # Not `replace`, which checks every other field again.
        group = object.__new__(Group)
        group.__dict__.update(self.__dict__, advantages=advantages, token_advantages=of_tokens)
        return group

    def with_old_log_probs(self, log_probs: Float[Tensor, " R"], entropies: Float[Tensor, " R"]) -> Group:
        """The same group with the trainer's log-probabilities and entropies before it trains on the group."""
        return replace(self, old_log_probs=log_probs, old_entropies=entropies)

    def trained_tokens(self, mask_truncated: bool) -> Bool[Tensor, " R"]:
        """Mask of the tokens that are trained on: those that the policy sampled.

        Args:
            mask_truncated: leave out responses that reached the length limit; the group has to say which did.

        >>> from grpo_rl.testing import random_group
        >>> group = replace(random_group(lengths=[1, 2]), truncated=torch.tensor([True, False]))
        >>> group.trained_tokens(mask_truncated=True)
        tensor([False,  True,  True])
        """
        if not mask_truncated:
            return self.trainable
        assert self.truncated is not None, "set Group.truncated, or loss.mask_truncated=false"
        return self.trainable & ~self.truncated.repeat_interleave(self.lengths)

    def with_only(self, responses: Sequence[int]) -> Group:
        """The same group with only these responses.

        >>> from grpo_rl.testing import random_group
        >>> group = random_group(lengths=[1, 3, 2]).with_only([0, 2])
        >>> group.lengths.tolist(), len(group.log_probs)
        ([1, 2], 3)
        """
        chosen = torch.tensor(responses, dtype=torch.long)
        keep = torch.zeros(self.size, dtype=torch.bool).index_fill_(0, chosen, True)
        tokens = keep.repeat_interleave(self.lengths)
        masks = dict.fromkeys(("rewards", "truncated", "advantages", "sessions"), keep)
        masks |= dict.fromkeys(("response_ids", "log_probs", "versions", "trainable"), tokens)
        masks |= dict.fromkeys(("token_advantages", "ref_log_probs", "teacher_ids", "teacher_log_probs"), tokens)
        masks |= dict.fromkeys(("old_log_probs", "old_entropies", "routes"), tokens)
        kept = self.kept and self.kept.where(tokens)
        return replace(
            self,
            kept_ids=kept and kept.ids,
            kept_counts=kept and kept.counts,
            offsets=torch.cat([self.offsets[:1], self.lengths[keep].cumsum(0)]),
            reward_parts={name: part[keep] for name, part in self.reward_parts.items()},
            measures={name: values[keep] for name, values in self.measures.items()},
            **{name: value[mask] for name, mask in masks.items() if (value := getattr(self, name)) is not None},
        )

    def to_tensordict(self) -> TensorDictBase:
        """G trajectories in TorchRL's ragged LLM layout (see `grpo_rl.data.keys`), lazily stacked, one per response.

        TorchRL's own losses accept groups stacked with ``lazy_stack``, and give the same values as ours. They pad
        advantages on the right and all else on the left, so nothing here depends on the side: a response has one
        advantage for all its tokens. Tokens that the policy did not sample have NaN for the sampler's log-probability,
        which excludes them from the loss.

        ``old_log_probs``, ``old_entropies``, ``token_advantages`` and a served teacher's tokens are left out.

        Source: ``torchrl.objectives.llm.GRPOLoss`` and ``MCAdvantage``, TorchRL 0.14.
        """
        rows = []
        kept_ids = kept_counts = ()
        if kept := self.kept:
            kept_counts = kept.counts.split(self.lengths.tolist())
            kept_ids = kept.ids.split([int(counts.sum()) for counts in kept_counts])
        for g, ids in enumerate(self.responses):
            span = slice(int(self.offsets[g]), int(self.offsets[g + 1]))
            prompt = len(self.prompt_ids)
            full = torch.cat([self.prompt_ids, ids])
            row = TensorDict(batch_size=[])
            row[keys.TOKENS_PROMPT] = self.prompt_ids
            row[keys.TOKENS_RESPONSE] = ids
            row[keys.TOKENS_FULL] = full
            chosen = torch.where(self.trainable[span], self.log_probs[span], torch.nan)
            row[keys.LOG_PROBS_RESPONSE] = self.log_probs[span]
            row[keys.LOG_PROBS_FULL] = torch.cat([torch.full((prompt,), torch.nan), chosen])
            row[keys.ASSISTANT_MASK] = torch.cat([torch.zeros(prompt, dtype=torch.bool), self.trainable[span]])
            row[keys.ATTENTION_MASK] = torch.ones_like(full, dtype=torch.bool)
            row[keys.REWARD] = self.rewards[g].reshape(1, 1)
            row[keys.GROUP_ID] = torch.tensor(self.group_id)
            row[keys.ROW] = torch.tensor(self.row)
            row[keys.VERSIONS] = self.versions[span]
            if kept:
                row[keys.KEPT_IDS], row[keys.KEPT_COUNTS] = kept_ids[g], kept_counts[g]
            if self.truncated is not None:
                row[keys.TRUNCATED] = self.truncated[g].reshape(1)
            if self.sessions is not None:
                row[keys.SESSION] = self.sessions[g].reshape(1)
            for name, part in self.reward_parts.items():
                row[keys.REWARD_PARTS + (name,)] = part[g]
            for name, values in self.measures.items():
                row[keys.MEASURES + (name,)] = values[g]
            if self.routes is not None and self.prompt_routes is not None:
                row[keys.ROUTES_FULL] = torch.cat([self.prompt_routes, self.routes[span]])
            if self.ref_log_probs is not None:
                row[keys.REF_LOG_PROBS_FULL] = torch.cat([torch.zeros(prompt), self.ref_log_probs[span]])
            if self.advantages is not None:
                row[keys.ADVANTAGE] = self.advantages[g].reshape(1, 1)
            rows.append(row)
        return lazy_stack(rows)

    @classmethod
    def from_tensordict(cls, td: TensorDictBase) -> Group:
        """The group from its G trajectories: the inverse of :meth:`to_tensordict`.

        Raises:
            ValueError: the rows belong to different groups or prompts.
        """
        rows = list(td.unbind(0))
        group_ids = {int(row[keys.GROUP_ID]) for row in rows}
        prompt_ids = rows[0][keys.TOKENS_PROMPT]
        if len(group_ids) != 1 or any(not torch.equal(row[keys.TOKENS_PROMPT], prompt_ids) for row in rows):
            raise ValueError(f"these {len(rows)} rows belong to groups {sorted(group_ids)}; give one group's rows")
        prompt = len(prompt_ids)
        lengths = torch.tensor([0] + [len(row[keys.TOKENS_RESPONSE]) for row in rows])

        def by_name(prefix: tuple[str]) -> dict[str, Tensor]:
            named = rows[0].get(prefix, None)
            return {} if named is None else {n: torch.stack([row[prefix + (n,)] for row in rows]) for n in named.keys()}

        def joined(key: NestedKey, first: int = 0) -> Tensor | None:
            return None if rows[0].get(key, None) is None else torch.cat([row[key][first:] for row in rows])

        advantages, routes = joined(keys.ADVANTAGE), rows[0].get(keys.ROUTES_FULL, None)
        return cls(
            group_id=group_ids.pop(),
            row=int(rows[0][keys.ROW]),
            prompt_ids=prompt_ids,
            response_ids=torch.cat([row[keys.TOKENS_RESPONSE] for row in rows]),
            log_probs=torch.cat([row[keys.LOG_PROBS_RESPONSE] for row in rows]),
            versions=torch.cat([row[keys.VERSIONS] for row in rows]),
            trainable=torch.cat([row[keys.ASSISTANT_MASK][prompt:] for row in rows]),
            offsets=lengths.cumsum(0),
            rewards=torch.stack([row[keys.REWARD].reshape(()) for row in rows]),
            reward_parts=by_name(keys.REWARD_PARTS),
            measures=by_name(keys.MEASURES),
            truncated=joined(keys.TRUNCATED),
            advantages=None if advantages is None else advantages.flatten(),
            ref_log_probs=joined(keys.REF_LOG_PROBS_FULL, prompt),
            routes=joined(keys.ROUTES_FULL, prompt),
            prompt_routes=None if routes is None else routes[:prompt],
            kept_ids=joined(keys.KEPT_IDS),
            kept_counts=joined(keys.KEPT_COUNTS),
            sessions=joined(keys.SESSION),
        )


@dataclass(eq=False)
class Trajectory:
    """The tokens of one response or conversation behind the prompt, and what training needs to know of them.

    Args:
        ids, log_probs, versions, trainable: pieces, one after the other; the policy chose the trainable ones. Of
            tokens that several sequences of a session share, those of one sequence alone are trainable.
        kept: the kept sets of each piece, if it has any, and its number of tokens.
        routes: experts of all tokens, the prompt's too, as far as the sampler has read them.
        truncated: a limit was met before the policy was done.
        prompt_ids: of an agent's session, whose sequences have prompts of their own.
    """

    ids: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)
    trainable: list[Tensor] = field(default_factory=list)
    kept: list[tuple[Kept | None, int]] = field(default_factory=list)
    routes: Tensor | None = None
    truncated: bool = False
    prompt_ids: Sequence[int] = ()

    def sampled(
        self, ids: Tensor, log_probs: Tensor, versions: Tensor, kept: Kept | None = None, trainable: bool = True
    ) -> None:
        """Appends what the policy sampled; not trainable where another sequence trains on it."""
        self.ids.append(ids)
        self.log_probs.append(log_probs)
        self.versions.append(versions)
        self.trainable.append(torch.full_like(ids, trainable, dtype=torch.bool))
        self.kept.append((kept, len(ids)))

    def read(self, ids: Tensor, version: int | None = None) -> None:
        """Appends what the policy read and did not choose; without a version it gets that of the token before."""
        if version is None:
            version = int(self.versions[-1][-1]) if self.versions and len(self.versions[-1]) else 0
        self.sampled(ids, torch.zeros(len(ids)), torch.full_like(ids, version), trainable=False)
