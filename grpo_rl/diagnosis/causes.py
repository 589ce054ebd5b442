"""Causes of a mismatch of sampler and trainer: each is tried by computation, and the one that explains most is named.

Letters: R response tokens of a group, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import linear

from grpo_rl.collectors.groups import group_of_samples
from grpo_rl.data.batching import micro_batches
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampler, Sampling, forked_random_state
from grpo_rl.envs.base import Prompt
from grpo_rl.policies.attention import forward_hidden
from grpo_rl.policies.packing import pack
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.weights.push import WeightDeliveryError, WeightSync

WORST_GROUPS, RESPONSES, TOKENS = 2, 4, 256
"""Explanations are tried on so many groups, responses of each, and tokens where whole distributions are needed."""
EXPLAINS = 0.7
"""An explanation leaves at most this share of the difference: by squares it accounts for half of it."""
STANDARD_ERRORS, LEAST_TOKENS = 5.0, 16
"""An explanation takes away so many of its standard errors, over so many tokens: of a handful chance explains a lot.
The errors are over responses, as tokens of one response are alike."""
CLOSEST_TEMPERATURE = 0.01
"""Temperatures nearer than this share are the same: rounding can prefer either."""
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98)
TOP_K = (1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 64, 80, 100, 128, 200, 256, 500)


@dataclass(frozen=True)
class Explanation:
    """The explanation of a mismatch.

    Args:
        name: ``failed_sync``, ``stale_weights``, ``shifted``, ``temperature``, ``swapped_groups``, ``truncation`` or
            ``unexplained``.
        left: share of the difference that it leaves unexplained.
    """

    name: str
    text: str
    left: float = 0.0


@dataclass(frozen=True)
class DiagnosisContext:
    """The parts of a run that a diagnosis works with.

    Args:
        policy: the trainer's, with the weights that it scored the tokens with.
        weights: what pushed those weights into the engine.
        describe: names a group in messages, by its prompt.
    """

    policy: TrainPolicy
    weights: WeightSync
    engine: Sampler
    sampling: Sampling
    max_tokens: int
    describe: Callable[[Group], str]
    decode: Callable[[Tensor], str]


@dataclass(frozen=True)
class Scored:
    """A group with the trainer's log-probabilities of its R response tokens."""

    group: Group
    log_probs: Float[Tensor, " R"]

    @property
    def gaps(self) -> Float[Tensor, " C"]:
        """|sampler - trainer| of the tokens that the policy chose."""
        return (self.log_probs - self.group.log_probs).abs()[self.group.trainable]

    @property
    def gap(self) -> float:
        """The mean of :attr:`gaps`, 0 where the policy chose nothing."""
        return self.gaps.mean().item() if len(self.gaps) else 0.0

    def first_responses(self, count: int) -> Scored:
        """The group with its first responses alone."""
        count = min(count, self.group.size)
        return Scored(self.group.with_only(range(count)), self.log_probs[: int(self.group.offsets[count])])


def diagnose(context: DiagnosisContext, scored: Sequence[Scored], thorough: bool = True) -> Explanation:
    """The best explanation of why sampler and trainer differ on these groups; leaves the random state as it was.

    Whether the engine holds the trainer's weights, and whether kept sets came with what it cut, are facts, and come
    first. Then what can be tried on the tokens at hand: an explanation counts if it takes the difference away, and that
    with the least left is named.

    Args:
        scored: groups with the trainer's log-probabilities, under the weights that the engine was given last.
        thorough: samples anew, too, to see whether the engine agrees with the trainer now.
    """
    context.engine.wake()  # it may sleep while the policy trains
    try:
        context.weights.verify()
    except WeightDeliveryError as error:
        text = "failed sync: the engine samples from other weights than those that are trained, as after a push "
        return Explanation("failed_sync", f"{text}that was left out: {str(error).rstrip('.')}")
    if context.sampling.cuts and (lost := [s for s in scored if s.group.kept is None]):
        text = "truncated sampling, and the kept sets are lost: the engine was set to cut tokens off, and "
        text += f"{len(lost)} of {len(scored)} groups come without the sets that theirs were drawn from. The trainer "
        text += f"scores the whole distribution, of which the sampler kept {100 * mass_kept(lost):.0f} %. Look for "
        where = "where kept_ids and kept_counts are left out between engine.generate and the groups"
        return Explanation("truncation", text + where)
    with forked_random_state():  # dropout and sampling draw from it
        return _best(context, scored, thorough)


def _best(context: DiagnosisContext, scored: Sequence[Scored], thorough: bool) -> Explanation:
    worst = sorted((s for s in scored if len(s.gaps)), key=lambda s: -s.gap)
    tried = [s.first_responses(RESPONSES) for s in worst[:WORST_GROUPS]]
    # A shift asks nothing of the model: all groups are tried, too, as it may be found in the worst ones alone.
    shifts = [_shifted(tried), _shifted(scored)]
    found = [*shifts, _temperature(context, tried), _swapped(context, tried[0], scored), _truncation(context, tried)]
    explanations = [e for e in found if e and e.left <= EXPLAINS]
    if thorough and (anew := _stale(context, scored, tried)).left <= EXPLAINS:
        # Responses that are sampled anew agree whatever was done to the old ones after the engine: what explains the
        # tokens at hand nearly as well is more informative.
        explanations.append(replace(anew, left=3 * anew.left))
    return min(explanations, key=lambda e: e.left, default=_unexplained(context, worst[0]))


def score(context: DiagnosisContext, groups: Sequence[Group]) -> list[Scored]:
    """The groups as the trainer scores them now.

    Gradients are switched on, although they are unused: kernels compiled for training are the ones that were used.
    """
    by_id: dict[int, Tensor] = {}
    for micro in micro_batches(groups, context.max_tokens):
        pieces = context.policy.score(micro)[0].detach().cpu().split([len(group.response_ids) for group in micro])
        by_id |= {id(group): piece for group, piece in zip(micro, pieces, strict=True)}
    return [Scored(group, by_id[id(group)]) for group in groups]


def all_gaps(scored: Iterable[Scored]) -> Float[Tensor, " C"]:
    """|sampler - trainer| of the tokens that the policy chose, of all groups."""
    return torch.cat([s.gaps for s in scored])


def _shifted(tried: Sequence[Scored]) -> Explanation:
    """The sampler's log-probability of a token against the trainer's of the one before or after it."""
    found = []
    for by in (-1, 1):
        pairs = [_beside(s, by) for s in tried]
        before, after, sizes = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        text = f"log-probabilities shifted by one token: the sampler's fit the token {'before' if by < 0 else 'after'} "
        text += f"({_from_to(before, after)}). Look at what is cut off or put in front where the engine's "
        text += "log-probabilities are joined to its tokens"
        found.append(Explanation("shifted", text, _left(before, after, sizes)))
    return min(found, key=lambda e: e.left)


def _beside(s: Scored, by: int) -> tuple[Tensor, Tensor, Tensor]:
    """|sampler - trainer| of each token with itself, and with the one that stands ``by`` places on in its response.

    Also returns the number of such tokens in each response.
    """
    group, place = s.group, torch.arange(len(s.log_probs))
    response, other = torch.repeat_interleave(group.lengths), (place + by).clamp(0, max(len(place) - 1, 0))
    pairs = (other != place) & (response[other] == response) & group.trainable & group.trainable[other]
    same, shifted = (group.log_probs - log_probs for log_probs in (s.log_probs, s.log_probs[other]))
    return same.abs()[pairs], shifted.abs()[pairs], response[pairs].bincount()


def _temperature(context: DiagnosisContext, tried: Sequence[Scored]) -> Explanation | None:
    """The temperature at which the trainer's log-probabilities fit the sampler's best."""
    policy, asked, groups = context.policy, context.policy.temperature, [s.group for s in tried]

    def gaps_at(temperature: float) -> Tensor:
        policy.temperature = temperature
        try:
            return all_gaps(score(context, groups))
        finally:
            policy.temperature = asked

    before = all_gaps(tried)
    if min(gaps_at(asked * 1.03).mean(), gaps_at(asked / 1.03).mean()) > 0.99 * before.mean():
        return None  # a fit could only be worse, and costs a dozen forward passes
    fit = minimize_scalar(
        lambda x: gaps_at(asked * math.exp(x)).mean().item(),
        bounds=(-1.5, 1.5),
        method="bounded",
        options={"xatol": 3e-3},
    )
    if abs(fit.x) < CLOSEST_TEMPERATURE:
        return None
    fitting = asked * math.exp(fit.x)
    after = gaps_at(fitting)
    text = f"wrong temperature: the responses were sampled at about {fitting:.3g} and are scored at {asked:g} "
    text += f"({_from_to(before, after)}). Both must be sampling.temperature; look for one that the engine takes from "
    return Explanation("temperature", f"{text}elsewhere", _left(before, after, _sizes(tried)))


def _swapped(context: DiagnosisContext, worst: Scored, scored: Sequence[Scored]) -> Explanation | None:
    """The prompt of another group that the responses of the worst one fit."""
    others = [s.group for s in scored if s.group.group_id != worst.group.group_id]
    if not others:
        return None
    own = replace(worst.group, routes=None, prompt_routes=None)  # the prompt's are of other tokens
    tried = [replace(own, group_id=other.group_id, prompt_ids=other.prompt_ids) for other in others]
    best, fitting = min(zip(score(context, tried), others, strict=True), key=lambda pair: pair[0].gap)
    text = f"swapped groups: the responses of {context.describe(worst.group)} fit the prompt of "
    text += f"{context.describe(fitting)} ({_from_to(worst.gaps, best.gaps)}). Look at how responses find back to "
    return Explanation("swapped_groups", f"{text}their prompts", _left(worst.gaps, best.gaps, _sizes([worst])))


def _truncation(context: DiagnosisContext, tried: Sequence[Scored]) -> Explanation | None:
    """The top-p or top-k under which the kept part of the trainer's distribution is what the sampler drew from.

    The trainer's distribution is that of the kept sets, where responses come with them.
    """
    share = mass_kept(tried)
    if share > 0.99:
        return None
    masses, differences, sizes = [], [], []
    for s in tried:
        ranked = ranked_mass(context.policy, s.group)
        chosen = s.group.trainable[: len(ranked)]
        masses.append(ranked[chosen])
        differences.append((s.group.log_probs - s.log_probs)[: len(ranked)][chosen])
        sizes.append(torch.repeat_interleave(s.group.lengths)[: len(ranked)][chosen].bincount())
    ranked, difference = torch.cat(masses), torch.cat(differences)
    kept = {f"top_k={k}": ranked[:, k - 1] for k in TOP_K if k < ranked.shape[1]}
    for p in TOP_P:
        last = (ranked < p).sum(1, keepdim=True).clamp(max=ranked.shape[1] - 1)
        kept[f"top_p={p}"] = ranked.gather(1, last)[:, 0]
    gaps = {name: (difference + mass.log()).abs() for name, mass in kept.items()}
    name = min(gaps, key=lambda n: gaps[n].mean().item())
    before, after = difference.abs(), gaps[name]
    cut = f"the engine cuts its distribution about as {name} does, to {100 * share:.0f} % of"
    if all(s.group.kept for s in tried):
        why = (
            f"{cut} the mass of the kept sets that come with its responses. Look for what is cut off after they were "
            "taken, or changes them on the way"
        )
    else:
        why = (
            f"{cut} its mass, and the trainer scores all of it. Turn off what cuts there, as a model's own "
            "generation_config may; or ask for it by sampling.top_p, top_k or min_p: then kept sets come with responses"
        )
    return Explanation(
        "truncation", f"truncated sampling ({_from_to(before, after)}): {why}", _left(before, after, torch.cat(sizes))
    )


def mass_kept(scored: Iterable[Scored]) -> float:
    """Share of the trainer's distribution that the sampler could have drawn from, over the chosen tokens.

    It is the mean of pi_trainer / pi_sampler, an importance ratio: its expectation is the trainer's mass on what the
    sampler can give, whatever else differs. Rounding leaves it at 1, top-p=0.9 takes it to 0.9 or a little more.
    """
    ratios = torch.cat([(s.log_probs - s.group.log_probs)[s.group.trainable] for s in scored]).double().exp()
    return ratios.mean().item()


@torch.no_grad()
def ranked_mass(policy: TrainPolicy, group: Group) -> Float[Tensor, "R V"]:
    """Mass of the likeliest token, of the two likeliest, and so on, at the first tokens of a group's responses.

    Of the tokens in kept sets alone, where the group has them.
    """
    packed = pack([group], policy.device)
    hidden = packed.by_token(forward_hidden(policy.model, packed))[:TOKENS]
    head: torch.nn.Linear = policy.model.get_output_embeddings()  # pyrefly: ignore[bad-assignment]
    logits = linear(hidden, head.weight, head.bias).float() * policy.logit_factor
    if policy.softcap is not None:
        logits = policy.softcap * (logits / policy.softcap).tanh()
    if group.kept:
        cut = group.kept.counts[:TOKENS, None] > 0
        sets = group.kept.where(torch.arange(len(group.response_ids)) < TOKENS)
        kept = torch.zeros(logits.shape, dtype=torch.bool)
        kept[torch.repeat_interleave(sets.counts), sets.ids.long()] = True
        logits = logits.masked_fill((cut & ~kept).to(logits.device), -torch.inf)
    return (logits / policy.temperature).softmax(-1).sort(descending=True).values.cumsum(-1).clamp(max=1).cpu()


def _stale(context: DiagnosisContext, scored: Sequence[Scored], tried: Sequence[Scored]) -> Explanation:
    """Responses sampled now agree with the trainer: those at hand came from other weights than recorded."""
    prompts = [s.group for s in tried]
    samples = context.engine.generate([g.prompt_ids.tolist() for g in prompts], RESPONSES, context.sampling)
    anew = [
        group_of_samples(Prompt(group.group_id, group.row, "", group.prompt_ids), sample)
        for group, sample in zip(prompts, samples, strict=True)
    ]
    # All groups at hand, not the worst: new responses are not chosen by how bad they are.
    now, then = score(context, anew), scored
    before, after = all_gaps(then), all_gaps(now)
    text = "stale weights, or responses changed behind the engine: new responses agree with the trainer "
    text += f"({after.mean():.3g} nats) and those at hand do not ({before.mean():.3g}), though they say version "
    text += f"{context.weights.version}. Look for groups that outlived a push, a prefix cache that was not dropped, a "
    text += "version that is written after sampling, and whatever touches ids or log-probabilities after it"
    return Explanation("stale_weights", text, _left(before, after, _sizes(then), _sizes(now)))


def _unexplained(context: DiagnosisContext, worst: Scored) -> Explanation:
    group = worst.group
    gaps = torch.where(group.trainable, (worst.log_probs - group.log_probs).abs(), -1.0)
    token = int(gaps.argmax())
    response = int(torch.repeat_interleave(group.lengths)[token])
    place = token - int(group.offsets[response])
    return Explanation(
        "unexplained",
        "unexplained: no other temperature, no shift, no other prompt of the batch and no truncation takes it away. "
        f"The worst is {context.describe(group)}, {worst.gap:.3g} nats a token; in its response {response} token "
        f"{place}, {context.decode(group.response_ids[token : token + 1])!r}, has {group.log_probs[token]:.4g} by the "
        f"sampler and {worst.log_probs[token]:.4g} by the trainer. Compare the two in float32 "
        "(train_model.dtype=float32): if the difference goes away it is rounding, and mismatch.bound may be raised",
        1.0,
    )


def _sizes(scored: Iterable[Scored]) -> Tensor:
    """The number of tokens the policy chose in each response."""
    return torch.cat([s.group.chosen_lengths for s in scored])


def _left(before: Tensor, after: Tensor, sizes: Tensor, new_sizes: Tensor | None = None) -> float:
    """Share of the mean difference that an explanation leaves; 1 where what it takes away may be chance.

    ``new_sizes`` are tokens of each response behind ``after``, where it is of others than ``before``.
    One odd response of two is chance, sixteen tokens or not:

    >>> before, odd = torch.tensor([0.9, 1.1] * 8), torch.tensor([2.0] * 8 + [0.1] * 8)
    >>> round(_left(before, before / 10, torch.tensor([8, 8])), 6), _left(odd, odd * 0 + 0.1, torch.tensor([8, 8]))
    (0.1, 1.0)
    """
    if min(len(before), len(after)) < LEAST_TOKENS:
        return 1.0
    if new_sizes is None:
        error = _standard_error(before - after, sizes)
    else:
        error = torch.hypot(_standard_error(before, sizes), _standard_error(after, new_sizes))
    gain = before.mean() - after.mean()
    return (after.mean() / before.mean()).item() if gain > STANDARD_ERRORS * error else 1.0


def _standard_error(values: Tensor, sizes: Tensor) -> Tensor:
    """Standard error of the mean over tokens, where responses are independent and their tokens are not; NaN of one.

    >>> round(_standard_error(torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([2, 2])).item(), 6)  # that of [1, 3]
    1.0
    """
    off = values.new_zeros(len(sizes)).index_add(0, torch.repeat_interleave(sizes), values - values.mean())
    responses = sizes.count_nonzero()
    return off.norm() / len(values) * (responses / (responses - 1)).sqrt()


def _from_to(before: Tensor, after: Tensor) -> str:
    return f"{before.mean():.3g} nats become {after.mean():.3g}"
