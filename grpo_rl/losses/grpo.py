"""The GRPO loss as a TorchRL loss module: surrogate, KL and entropy, each summed with the weights of the whole step.

Letters: N response tokens of a micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule

from grpo_rl.losses.aggregate import per_token
from grpo_rl.losses.correction import correction_weight
from grpo_rl.losses.factors import CORRECTION, COVARIANCE, KL, SURROGATE, Loss, asks_for, call, check_loss, loss_section
from grpo_rl.losses.kl import k3
from grpo_rl.losses.surrogate import clipped_tokens, leveled_log_ratio, near_sampler
from grpo_rl.section import read_section

CLIPS = ("clip_low", "clip_high", "clip_dual", "clip_off_policy")
"""Counts of trained tokens that a bound has changed or left out."""
LOSSES = ("loss_objective", "loss_kl", "loss_entropy")
"""The terms of the loss; their sum is the entry ``loss``, which is minimised."""
METRIC_SUMS = ("tokens", "clip_low", "clip_high", "kl_sampler", "entropy", "ratio", "ratio_squared")
"""Sums over trained tokens that the loss always returns; divide by ``tokens`` for the mean."""


class GRPOLoss(LossModule):
    r"""$\sum_t w_t \left[c_t\, s(r_t, A) + \beta\, \mathrm{KL}_t - \gamma H_t\right]$, each factor configurable.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4, is the default; ``config/loss`` has the others.
    The weights ``w`` come from `grpo_rl.losses.aggregate.token_weights`, which counts over the whole optimizer step:
    losses of micro-batches add up to the step's loss, and the gradient does not depend on how the step is split.

    Args:
        loss: the section, see `grpo_rl.losses.factors.Loss`; None: its defaults. ``settings`` replace some by name. In
            the place of a factor's name there can be a function.
        kl_coef: weight of the estimate of KL(policy || reference).
        entropy_coef: weight of the entropy bonus.

    With a correction the ratio is to the trainer's own log-probabilities before the update, without one to the sampler.

    Raises:
        ValueError: a setting is unknown or out of range, or the KL estimate would have no effect.

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
    class _AcceptedKeys(LossModule._AcceptedKeys):
        log_prob: NestedKey = "log_prob"
        """[N] log pi_theta of the sampled token, with gradient."""
        entropy: NestedKey = "entropy"
        """[N] entropy of the policy's distribution at the token."""
        sampler_log_prob: NestedKey = "sampler_log_prob"
        """[N] the sampler's log-probability."""
        old_log_prob: NestedKey = "old_log_prob"
        """[N] the trainer's log-probability before the update; read only with a correction."""
        ref_log_prob: NestedKey = "ref_log_prob"
        """[N] the reference's log-probability; required if kl_coef is not 0."""
        advantage: NestedKey = "advantage"
        """[N] the advantage of each token, without turns its response's; 0 on tokens without a policy gradient."""
        trainable: NestedKey = "trainable"
        """[N] False on tokens that are not trained on, such as those that the policy did not sample."""
        weight: NestedKey = "weight"
        """[N] from `token_weights`; 0 on tokens that are not trained on."""
        response: NestedKey = "response"
        """[N] index of each token's response; read only if something is per response."""
        teacher_kl: NestedKey = "teacher_kl"
        """[N] divergence from the reference over the full vocabulary, with gradient; read only by such a KL."""
        covariance_rank: NestedKey = "covariance_rank"
        """[N] from `grpo_rl.losses.covariance.Covariance`, like the draw; read only by surrogates that ask for one."""
        covariance_draw: NestedKey = "covariance_draw"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    out_keys = ("loss", *LOSSES, *METRIC_SUMS)  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(
        self, loss: Loss | None = None, kl_coef: float = 0.0, entropy_coef: float = 0.0, **settings: Any
    ) -> None:
        super().__init__()
        values = {**(loss or {}), **settings}
        loss = read_section(loss_section(values), values, "loss")
        check_loss(loss, kl_coef)
        self.kl_coef, self.entropy_coef = kl_coef, entropy_coef
        self.settings = loss
        self._surrogate, self._kl, self._correction = (factor.chosen(loss) for factor in (SURROGATE, KL, CORRECTION))
        self._corrects = loss.correction != "none"
        self._level = loss.correction_level if self._corrects else "token"
        per_response = asks_for(self._surrogate.func, "response") or loss.off_policy_bound is not None
        self._per_response = per_response or self._level != "token" or loss.ratio != "token"
        self._full_vocabulary = bool(kl_coef) and asks_for(self._kl.func, "teacher_kl")
        self._by_covariance = asks_for(self._surrogate.func, *COVARIANCE)

    @property
    def in_keys(self) -> list[NestedKey]:  # pyrefly: ignore[bad-override]
        """The entries that :meth:`forward` reads."""
        keys = self.tensor_keys
        names = [keys.log_prob, keys.entropy, keys.sampler_log_prob, keys.advantage, keys.trainable, keys.weight]
        optional = {
            keys.ref_log_prob: self.kl_coef and not self._full_vocabulary,
            keys.teacher_kl: self._full_vocabulary,
            keys.old_log_prob: self._corrects,
            keys.response: self._per_response,
            keys.covariance_rank: self._by_covariance,
            keys.covariance_draw: self._by_covariance,
        }
        return names + [name for name, read in optional.items() if read]

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """GRPO has no value estimator."""

    def terms(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss terms of each token, not yet weighted; :meth:`forward` sums them.

        [N] each: ``objective``, ``kl`` and ``entropy``, with gradient and without their coefficients; ``log_ratio`` to
        the sampler or, with a correction, to the trainer before the update; ``ratio``, as used by the surrogate;
        ``correction``, the importance weight in ``objective``, and ``corrected``, whether it reached a bound; and the
        flags of :func:`clipped_tokens`, and ``clip_off_policy``. Values on untrained tokens mean nothing; their
        ``weight`` is 0.

        Raises:
            ValueError: an entry is missing.
        """
        keys, settings = self.tensor_keys, self.settings
        trainable = _entry(tensordict, keys.trainable)
        log_prob, sampler = self._read(tensordict, keys.log_prob), self._read(tensordict, keys.sampler_log_prob)
        advantage = self._read(tensordict, keys.advantage)
        response = _entry(tensordict, keys.response) if self._per_response else None
        old = self._read(tensordict, keys.old_log_prob) if self._corrects else sampler
        log_ratio = log_prob - old
        trained = trainable.to(log_prob)
        leveled = leveled_log_ratio(log_ratio, settings.ratio, trainable, response)
        weight, corrected = correction_weight(old - sampler, self._correction, self._level, response, trained)
        kept = None
        if settings.off_policy_bound is not None:
            kept = near_sampler(log_prob - sampler, advantage, trained, response, settings.off_policy_bound)
            # Before the surrogate: its value may overflow where it is left out.
            advantage, leveled = (torch.where(kept, values, 0.0) for values in (advantage, leveled))
        of_token = {"log_prob": log_prob, "trained": trained, "response": response}
        if self._by_covariance:
            of_token |= {name: self._read(tensordict, getattr(keys, name)) for name in COVARIANCE}
        objective = call(self._surrogate, log_ratio=leveled, advantage=advantage, **of_token)
        terms = TensorDict(
            objective=weight * per_token(objective, log_prob, self._surrogate),
            entropy=self._read(tensordict, keys.entropy),
            kl=torch.zeros_like(log_prob),
            log_ratio=log_ratio,
            ratio=leveled.exp(),
            correction=weight,
            corrected=corrected,
            batch_size=log_ratio.shape,
        )
        clips = {"log_prob": log_prob.detach(), **self._surrogate.keywords}
        terms.update(clipped_tokens(self._surrogate.func, leveled.detach(), advantage, **clips))
        if kept is not None:
            terms["clip_off_policy"] = ~kept
        if self.kl_coef:
            name = "teacher_kl" if self._full_vocabulary else "ref_log_prob"
            given = {name: self._read(tensordict, getattr(keys, name))}
            # The ratio is to the sampler, also if the surrogate's is to the trainer.
            estimate = call(self._kl, log_prob=log_prob, log_ratio=log_prob - sampler, **given)
            terms["kl"] = per_token(estimate, log_prob, self._kl)
        return terms

    def _read(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        """The entry in fp32 or more; 0 on tokens that are not trained on, where it may be undefined."""
        value = _entry(tensordict, key)
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.where(tensordict[self.tensor_keys.trainable], wide, 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """``loss``, which is minimised, its terms :data:`LOSSES`, and sums over trained tokens without gradient.

        TorchRL's ``Trainer`` adds up all entries that begin with "loss"; tell it ``loss_components=["loss"]``.

        The sums are :data:`METRIC_SUMS`, with a reference ``kl_ref``, with a dual clip ``clip_dual``, with a bound
        ``clip_off_policy``, and with a correction ``correction``, ``correction_squared`` and ``corrected``.
        """
        keys = self.tensor_keys
        terms, weight = self.terms(tensordict), tensordict[keys.weight]
        out = TensorDict(
            loss_objective=(weight * terms["objective"]).sum(),
            loss_kl=self.kl_coef * (weight * terms["kl"]).sum(),
            loss_entropy=-self.entropy_coef * (weight * terms["entropy"]).sum(),
        )
        out["loss"] = torch.stack([out[name] for name in LOSSES]).sum()
        with torch.no_grad():
            log_prob, sampler = self._read(tensordict, keys.log_prob), self._read(tensordict, keys.sampler_log_prob)
            trainable, ratio = tensordict[keys.trainable], (log_prob - sampler).exp()
            sums = {
                "tokens": trainable,
                "kl_sampler": k3(sampler, log_prob),
                "entropy": terms["entropy"],
                "ratio": ratio,
                "ratio_squared": ratio.square(),
            } | {name: terms[name] for name in CLIPS if name in terms.keys()}
            if tensordict.get(keys.ref_log_prob, None) is not None:
                sums["kl_ref"] = k3(log_prob, self._read(tensordict, keys.ref_log_prob))
            if self._corrects:
                sums |= {"correction": terms["correction"], "corrected": terms["corrected"]}
                sums["correction_squared"] = torch.square(terms["correction"])
            for name, value in sums.items():
                out[name] = torch.where(trainable, value.to(log_prob.dtype), 0.0).sum()
        return out


_WRITTEN_BY = {
    **dict.fromkeys(COVARIANCE, "training_tensordict writes it with MicroBatching(covariance=...)"),
    "teacher_kl": "TrainPolicy.score computes it where the policy has a teacher (TrainPolicy.distillation)",
    "old_log_prob": "write it with TrainPolicy.add_log_probs before the first optimizer step",
    "ref_log_prob": "write it with ReferencePolicy.add_log_probs",
}


def _entry(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    value = tensordict.get(key, None)
    if value is None:
        hint = _WRITTEN_BY.get(str(key), "grpo_rl.training.micro_batches.training_tensordict writes it")
        raise ValueError(f"the loss reads {key}, which is missing; {hint}")
    return value


def clipped_at_all(terms: TensorDictBase) -> Bool[Tensor, " N"]:
    """Mask of the tokens that reached a bound of the surrogate, from the output of `GRPOLoss.terms`."""
    return torch.stack([value for name, value in terms.items() if name.startswith("clip_")]).any(0)
