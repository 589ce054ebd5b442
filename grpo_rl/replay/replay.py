"""A stored step under another loss, without a model: each token's gradient as it was, and as it would have been.

The training code itself runs again, over a policy that repeats what the trainer computed. In the first optimizer step
of a collection that is what the other loss would have seen; before later ones it would have moved the weights
elsewhere, and what is compared are two losses at the same weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from grpo_rl.assembly.training import make_advantages, make_loss
from grpo_rl.data.batching import by_group, groups_to_score
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import LOSSES
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.monitor.stored_tokens import StoredStep
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.settings.derived import compares_full_vocabulary, micro_batching
from grpo_rl.settings.schema import Settings
from grpo_rl.training.micro_batches import scored_micro_batches, step_totals
from grpo_rl.training.optimizer import StepResult

_METRICS = ("loss/", "clip/", "kl/", "correction/", "ess", "entropy")
"""Beginnings of the metrics of a step that depend on its tokens and its loss alone."""
_COLUMNS = ("gradient", "advantage", "ratio", "trained")
_CONTEXT = 8
"""Ids that are shown before a token."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stored step under some settings. Letter: T response tokens of all its optimizer steps, in order.

    Args:
        numbers: metrics, named and computed as in metrics.jsonl, and counts; ``not_scored_groups`` are those that these
            settings would have scored, and the run didn't.
        losses: the loss of each optimizer step.
        columns: ``gradient`` of the optimizer step's loss by each token's log-probability, ``advantage``, ``ratio``,
            and whether it was ``trained`` on; [T] each, 0 on groups that are not scored.
    """

    numbers: dict[str, float]
    losses: list[float]
    columns: dict[str, Float[Tensor, " T"]]


def replay(stored: StoredStep, run: Settings, other: Settings, top: int = 10) -> dict[str, Any]:
    """The step under the run's own settings and under those of another loss, as plain numbers.

    ``run`` and ``other`` have the numbers of each. ``recorded_gap`` is the largest difference between a recorded loss
    of an optimizer step and the same loss now: more than rounding means that the code has changed since.
    ``changed_fraction`` is the share of trained tokens whose gradient differs by more than 1e-5 of itself, ``cosine``
    the similarity of the two gradients by the tokens' log-probabilities; None where one is zero. ``tokens`` are those
    that differ the most, with pairs of what the run's loss and the other made of them.

    Raises:
        ValueError: the other loss needs what the run did not compute.
    """
    first, second = recompute(stored, run), recompute(stored, other)
    recorded = [sum(update.recorded[name] for name in LOSSES) for update in stored.updates]
    ours, theirs = first.columns["gradient"].double(), second.columns["gradient"].double()
    difference = (theirs - ours).abs()
    trained = (first.columns["trained"] + second.columns["trained"]).bool()
    changed = (difference > 1e-5 * torch.maximum(ours.abs(), theirs.abs()))[trained]
    norms = ours.norm() * theirs.norm()
    largest = [i for i in difference.argsort(descending=True)[:top].tolist() if difference[i] > 0]
    return {
        "step": stored.step,
        "recorded_gap": max((abs(a - b) for a, b in zip(recorded, first.losses, strict=True)), default=0.0),
        "changed_fraction": changed.double().mean().item() if len(changed) else 0.0,
        "cosine": (ours @ theirs / norms).item() if norms else None,
        "tokens": [_token(stored, place, first, second) for place in largest],
        "run": first.numbers,
        "other": second.numbers,
    }


def _token(stored: StoredStep, place: int, run: Outcome, other: Outcome) -> dict[str, Any]:
    """The token at this place among all T."""
    names = ["optimizer_step", "group_id", "row", "response", "position", "token_id"]
    (token,) = stored.tokens.select(names).slice(place, 1).to_pylist()
    before = min(token["position"], _CONTEXT)
    token["before"] = stored.tokens["token_id"].slice(place - before, before).to_pylist()
    for name in ("advantage", "ratio", "gradient"):
        token[name] = run.columns[name][place].item(), other.columns[name][place].item()
    return token


def recompute(stored: StoredStep, settings: Settings) -> Outcome:
    """Computes a stored step with the loss of these settings.

    Raises:
        ValueError: it needs what the run did not compute.
    """
    if compares_full_vocabulary(settings):
        raise ValueError(f"loss.kl={settings.loss.kl} is over the full vocabulary, which no run stores; choose another")
    batching, loss, record = micro_batching(settings), make_loss(settings), StepRecord()
    compute_advantages = make_advantages(settings, [name for group in stored.groups for name in group.reward_parts])
    by_id = {group.group_id: group for group in compute_advantages(stored.groups)}
    losses, pieces, not_scored = [], [torch.zeros(len(_COLUMNS), 0)], 0
    for update in stored.updates:
        batch, total = [by_id[i] for i in update.groups], 0.0
        columns = {group.group_id: torch.zeros(len(_COLUMNS), len(group.response_ids)) for group in batch}
        to_score = groups_to_score(batch, batching.skip_zero_advantage, batching.mask_truncated)
        not_scored += sum(group.group_id not in update.scored for group in to_score)
        # Those that were not scored count in the means all the same.
        totals = step_totals(batch, batching)
        known = [group for group in batch if group.group_id in update.scored]
        for tokens in scored_micro_batches(_StoredPolicy(update.scored), known, batching, totals):
            out = loss(tokens)
            out["loss"].backward()
            total += out["loss"].item()
            record.add(tokens, out)
            values = (tokens["log_prob"].grad, tokens["advantage"], loss.terms(tokens)["ratio"], tokens["trainable"])
            columns |= by_group(tokens, torch.stack([value.float() for value in values]))  # pyrefly: ignore[missing-attribute]
        record.complete()
        record.add_result(StepResult(grad_norm=0.0, lr=0.0, skipped=False))
        losses.append(total)
        pieces += [columns[i] for i in update.groups]
    flat = dict(zip(_COLUMNS, torch.cat(pieces, dim=1), strict=True))
    gradient = flat["gradient"][flat["trained"].bool()]
    numbers = {name: value for name, value in record.metrics(0, 0.0).items() if name.startswith(_METRICS)} | {
        "trained_tokens": len(gradient),
        "tokens_without_gradient": int((gradient == 0).sum()),
        "gradient_norm": gradient.double().norm().item(),
        "not_scored_groups": not_scored,
    }
    return Outcome(numbers, losses, flat)


class _StoredPolicy(TrainPolicy):
    """A policy that repeats the trainer's log-probabilities and entropies of groups from when it trained on them."""

    def __init__(self, scored: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._stored = scored

    @override
    def score(self, groups: Sequence[Group], teacher: object = None) -> tuple[Float[Tensor, " N"], ...]:
        # The log-probabilities are a leaf, which keeps its gradient.
        log_probs, entropies = zip(*[self._stored[group.group_id] for group in groups], strict=True)
        return torch.cat(log_probs).requires_grad_(), torch.cat(entropies)
