"""The GRPO loss as a TorchRL loss module: surrogate, KL and entropy, each summed with the weights of the whole step.

Letters: N response tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule

from grpo_rl.losses.correction import Correction, Level, check_correction, correction_weight
from grpo_rl.losses.kl import KL, k3, kl_estimate
from grpo_rl.losses.surrogate import Ratio, Surrogate, check_clips, clipped_tokens, leveled_log_ratio, surrogate_loss

LOSSES = ("loss_objective", "loss_kl", "loss_entropy")
"""Their sum is what is minimised."""
METRIC_SUMS = ("tokens", "clip_low", "clip_high", "kl_sampler", "entropy", "ratio", "ratio_squared")
"""Sums over trained tokens that the loss always reports; divide by ``tokens``."""


class GRPOLoss(LossModule):
    r"""$\sum_t w_t \left[c_t\, s(r_t, A) + \beta\, \mathrm{KL}_t - \gamma H_t\right]$ of tokens, each factor of choice.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4, is the default; ``config/loss`` names others.
    The weights ``w`` come from `grpo_rl.losses.aggregate.token_weights`, which counts over the whole optimizer step:
    losses of micro-batches add up to the step's loss, and splitting it differently never changes the gradient.

    Args:
        clip_low: ratios below ``1 - clip_low`` are clipped.
        clip_high: ratios above ``1 + clip_high`` are clipped.
        kl_coef: weight of the estimate of KL(policy || reference).
        entropy_coef: weight of the entropy bonus.
        surrogate: the loss ``s`` of a ratio and an advantage, see `grpo_rl.losses.surrogate`.
        ratio: the ratio ``r`` is each token's own, or its answer's.
        dual_clip: what a bad answer's ratio counts up to, for ``surrogate=clipped``; None: however large.
        tau_pos: temperature of good answers, for ``surrogate=sapo``.
        tau_neg: and that of bad ones.
        kl: the estimate, see `grpo_rl.losses.kl.kl_estimate`.
        correction: the weight ``c`` of sampler against trainer, see `grpo_rl.losses.correction`. Without one the ratio
            is to the sampler, with one to the trainer's own log-probabilities before the update.
        correction_level: that weight is each token's own, or its answer's.
        correction_low: lower bound, for ``correction=mask``.
        correction_high: upper bound.

    Raises:
        ValueError: a setting that is unknown or out of range, or a KL estimate that would hold nothing.

    A fresh policy has ratios of 1, so its loss is minus the weighted advantage:

    >>> loss = GRPOLoss()
    >>> tokens = TensorDict(
    ...     log_prob=torch.tensor([-1.0, -2.0]), entropy=torch.ones(2), sampler_log_prob=torch.tensor([-1.0, -2.0]),
    ...     advantage=torch.tensor([1.0, -0.5]), trainable=torch.tensor([True, True]), weight=torch.tensor([0.5, 0.5]),
    ...     batch_size=[2])
    >>> loss(tokens)["loss_objective"]
    tensor(-0.2500)
    """

    @dataclass
    class _AcceptedKeys:
        log_prob: NestedKey = "log_prob"
        """[N] log pi_theta of the sampled tokens, with gradient."""
        entropy: NestedKey = "entropy"
        """[N] entropy of the distribution each was drawn from."""
        sampler_log_prob: NestedKey = "sampler_log_prob"
        """[N] log-probability that the sampler gave."""
        old_log_prob: NestedKey = "old_log_prob"
        """[N] log-probability that the trainer gave before the update; read only with a correction."""
        ref_log_prob: NestedKey = "ref_log_prob"
        """[N] under the reference; must be there when kl_coef is not 0."""
        advantage: NestedKey = "advantage"
        """[N] the advantage of each token's answer; 0 where a token shall have no policy gradient."""
        trainable: NestedKey = "trainable"
        """[N] False on tokens that are not trained on, as those that the policy did not choose."""
        weight: NestedKey = "weight"
        """[N] from `token_weights`; 0 where not trainable."""
        answer: NestedKey = "answer"
        """[N] number of each token's answer; read only where answers have ratios or corrections of their own."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    out_keys = (*LOSSES, *METRIC_SUMS)  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        *,
        surrogate: Surrogate = "clipped",
        ratio: Ratio = "token",
        dual_clip: float | None = None,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        kl: KL = "k3",
        correction: Correction = "none",
        correction_level: Level = "token",
        correction_low: float = 0.5,
        correction_high: float = 2.0,
    ) -> None:
        super().__init__()
        for name, value, choices in (("surrogate", surrogate, Surrogate), ("ratio", ratio, Ratio), ("kl", kl, KL)):
            if value not in get_args(choices):
                raise ValueError(f"loss.{name} is {value!r}; it can be {', '.join(get_args(choices))}")
        check_clips(clip_low, clip_high, dual_clip)
        check_correction(correction, correction_level, correction_low, correction_high)
        if dual_clip is not None and surrogate != "clipped":
            raise ValueError(f"loss.dual_clip is {dual_clip}, and loss.surrogate={surrogate} has none; set it to null")
        if not (tau_pos > 0 and tau_neg > 0):
            raise ValueError(f"loss.tau_pos is {tau_pos} and loss.tau_neg {tau_neg}; both must be more than 0")
        if kl_coef and kl == "k1":
            raise ValueError(
                "loss.kl=k1 in the loss has a gradient of mean zero, so it would hold nothing; use k2, k3, k3+ or "
                "k3_is, or loss.kl_in=reward"
            )
        self.kl_coef, self.entropy_coef, self.kl = kl_coef, entropy_coef, kl
        self.ratio, self.correction = ratio, correction
        self._surrogate = {"kind": surrogate, "clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        self._taus = {"tau_pos": tau_pos, "tau_neg": tau_neg}
        self._correction = {
            "how": correction, "level": correction_level, "low": correction_low, "high": correction_high,
        }  # fmt: skip
        self._by_answer = ratio != "token" or (correction != "none" and correction_level == "sequence")

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` reads."""
        keys = self.tensor_keys
        names = [keys.log_prob, keys.entropy, keys.sampler_log_prob, keys.advantage, keys.trainable, keys.weight]
        optional = {
            keys.ref_log_prob: self.kl_coef,
            keys.old_log_prob: self.correction != "none",
            keys.answer: self._by_answer,
        }
        return names + [name for name, read in optional.items() if read]

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """GRPO has no value estimator."""

    def terms(self, tensordict: TensorDictBase) -> TensorDict:
        """What each token has in the loss, not yet weighted: :meth:`forward` sums it.

        [N] each: ``objective``, ``kl`` and ``entropy``, with gradient and without their coefficients; ``log_ratio`` to
        the sampler or, with a correction, to the trainer before the update; ``ratio``, as the surrogate saw it;
        ``correction``, the weight in ``objective``, and ``corrected``, where it met a bound; where the surrogate was
        clipped, ``clip_low``, ``clip_high`` and with a dual clip ``clip_dual``. Only ``weight`` in ``tensordict`` says
        how much of it counts: on tokens that are not trained on it is 0.

        Raises:
            ValueError: an entry is missing.
        """
        keys = self.tensor_keys
        trainable = tensordict[keys.trainable]
        log_prob, sampler = self._read(tensordict, keys.log_prob), self._read(tensordict, keys.sampler_log_prob)
        advantage = self._read(tensordict, keys.advantage)
        answer = _entry(tensordict, keys.answer) if self._by_answer else None
        old = self._read(tensordict, keys.old_log_prob) if self.correction != "none" else sampler
        log_ratio = log_prob - old
        leveled = leveled_log_ratio(log_ratio, self.ratio, trainable, answer)
        weight, corrected = correction_weight(old - sampler, **self._correction, answer=answer)
        terms = TensorDict(
            objective=weight * surrogate_loss(**self._surrogate, **self._taus, log_ratio=leveled,
                                              advantage=advantage, log_prob=log_prob),
            entropy=self._read(tensordict, keys.entropy),
            kl=torch.zeros_like(log_prob),
            log_ratio=log_ratio,
            ratio=leveled.exp(),
            correction=weight,
            corrected=corrected,
            batch_size=log_ratio.shape,
        )  # fmt: skip
        terms.update(clipped_tokens(**self._surrogate, log_ratio=leveled.detach(), advantage=advantage))
        if self.kl_coef:
            # Of the sampled distribution, whatever the surrogate's ratio is to.
            terms["kl"] = kl_estimate(self.kl, log_prob, self._read(tensordict, keys.ref_log_prob), log_prob - sampler)
        return terms

    def _read(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        """The entry in fp32 or more; 0 on tokens that are not trained on, for which nothing may be known."""
        value = _entry(tensordict, key)
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.where(tensordict[self.tensor_keys.trainable], wide, 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The three losses, whose sum is to be minimised, and sums over trained tokens without gradient.

        These are :data:`METRIC_SUMS`, ``kl_ref`` where there is a reference, ``clip_dual`` with a dual clip, and with a
        correction ``correction``, ``correction_squared`` and ``corrected``.
        """
        keys = self.tensor_keys
        terms, weight = self.terms(tensordict), tensordict[keys.weight]
        out = TensorDict(
            loss_objective=(weight * terms["objective"]).sum(),
            loss_kl=self.kl_coef * (weight * terms["kl"]).sum(),
            loss_entropy=-self.entropy_coef * (weight * terms["entropy"]).sum(),
        )
        with torch.no_grad():
            log_prob, sampler = self._read(tensordict, keys.log_prob), self._read(tensordict, keys.sampler_log_prob)
            trainable, ratio = tensordict[keys.trainable], (log_prob - sampler).exp()
            sums = {
                "tokens": trainable,
                "kl_sampler": k3(sampler, log_prob),
                "entropy": terms["entropy"],
                "ratio": ratio,
                "ratio_squared": ratio.square(),
            } | {name: terms[name] for name in ("clip_low", "clip_high", "clip_dual") if name in terms.keys()}
            if tensordict.get(keys.ref_log_prob, None) is not None:
                sums["kl_ref"] = k3(log_prob, self._read(tensordict, keys.ref_log_prob))
            if self.correction != "none":
                sums |= {"correction": terms["correction"], "corrected": terms["corrected"]}
                sums["correction_squared"] = terms["correction"].square()
            for name, value in sums.items():
                out[name] = torch.where(trainable, value.to(log_prob.dtype), 0.0).sum()
        return out


_WRITTEN_BY = {
    "old_log_prob": "write it with TrainPolicy.annotate before the first optimizer step, or say on_policy=True where "
    "there is only one",
    "ref_log_prob": "write it with ReferencePolicy.annotate, or set policy.kl_coef to 0",
    "sampler_log_prob": "it is what the engine returned, Group.log_probs",
}


def _entry(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    value = tensordict.get(key, None)
    if value is None:
        hint = _WRITTEN_BY.get(str(key), "grpo_rl.policies.policy.training_tensordict writes it")
        raise ValueError(f"the loss reads {key}, which is not there; {hint}")
    return value
