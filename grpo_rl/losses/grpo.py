"""The GRPO loss as a TorchRL loss module: surrogate, KL and entropy, each summed with the weights of the whole step.

Letters: N response tokens of a micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule

from grpo_rl.losses.choices import LossTerms, check_loss
from grpo_rl.losses.correction import correction_weight
from grpo_rl.losses.kl import k3, kl_estimate
from grpo_rl.losses.surrogate import SURROGATES, clipped_tokens, leveled_log_ratio
from grpo_rl.section import read_section

SURROGATE_TAKES = (
    "log_ratio", "advantage", "log_prob", "clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg",
)  # fmt: skip
"""The parameters that a surrogate of the user's own may have; see `grpo_rl.losses.surrogate`."""
KL_TAKES = ("log_prob", "ref_log_prob", "log_ratio")
"""The parameters that a KL estimate of the user's own may have; see `grpo_rl.losses.kl.kl_estimate`."""


class Term:
    """A function of the project's or the user's that gives one value per token, from the arguments that it names.

    The value of a token must follow from what is known of this token: a function that looks at the others, as one that
    divides by their mean does, would give another gradient with other micro-batches. For what concerns several tokens
    there are ``loss.ratio`` (a response's ratio), ``loss.aggregate`` (means) and ``loss.advantage``.

    Args:
        function: returns [N] from tensors of [N] and numbers.
        key: the setting, for messages.
        takes: names of what it may take.

    Raises:
        ValueError: it asks for something else.

    >>> Term(lambda log_ratio, advantage: -log_ratio.exp() * advantage, "loss.surrogate", SURROGATE_TAKES).takes
    ('log_ratio', 'advantage')
    """

    def __init__(self, function: Callable[..., Tensor], key: str, takes: tuple[str, ...]) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.function, self.where = function, f"{key}={getattr(function, '__module__', '?')}:{name}"
        parameters = inspect.signature(function).parameters
        asked = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if other := [p.name for p in asked if p.default is p.empty and p.name not in takes]:
            raise ValueError(f"{self.where} asks for {', '.join(other)}; it can have {', '.join(takes)}")
        self.takes = tuple(name for name in takes if name in parameters)

    def __call__(self, **given: Any) -> Tensor:
        """The value of each token; the arguments are those of the project's own functions, by name.

        Raises:
            ValueError: it returns something else, which would be spread over all tokens.
        """
        values, tokens = self.function(**{name: given[name] for name in self.takes}), given["log_prob"]
        if not isinstance(values, Tensor) or values.shape != tokens.shape:
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
            raise ValueError(f"{self.where} returned {got} for {len(tokens)} tokens; return a value per token")
        return values


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
        terms: see `grpo_rl.losses.choices.LossTerms`; None: those that ``settings`` give by name, and its defaults.

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
        """[N] the advantage of each token's response; 0 on tokens without a policy gradient."""
        trainable: NestedKey = "trainable"
        """[N] False on tokens that are not trained on, such as those that the policy did not sample."""
        weight: NestedKey = "weight"
        """[N] from `token_weights`; 0 on tokens that are not trained on."""
        response: NestedKey = "response"
        """[N] index of each token's response; read only if ratios or corrections are per response."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    out_keys = ("loss", *LOSSES, *METRIC_SUMS)  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, terms: LossTerms | None = None, **settings: Any) -> None:
        super().__init__()
        terms = read_section(LossTerms, settings, "loss") if terms is None else terms
        check_loss(terms)
        surrogate = terms.surrogate if callable(terms.surrogate) else SURROGATES[terms.surrogate]
        self._surrogate = Term(surrogate, "loss.surrogate", SURROGATE_TAKES)
        if terms.dual_clip is not None and "dual_clip" not in self._surrogate.takes:
            raise ValueError(
                f"loss.dual_clip is {terms.dual_clip}, and {self._surrogate.where} takes none; set it to null"
            )
        self.kl: Any = Term(terms.kl, "loss.kl", KL_TAKES) if callable(terms.kl) else terms.kl
        self.kl_coef, self.entropy_coef = terms.kl_coef, terms.entropy_coef
        self.ratio, self.correction = terms.ratio, terms.correction
        self.settings = terms
        by_response = terms.correction != "none" and terms.correction_level == "sequence"
        self._per_response = terms.ratio != "token" or by_response

    @property
    def in_keys(self) -> list[NestedKey]:  # pyrefly: ignore[bad-override]
        """The entries that :meth:`forward` reads."""
        keys = self.tensor_keys
        names = [keys.log_prob, keys.entropy, keys.sampler_log_prob, keys.advantage, keys.trainable, keys.weight]
        optional = {
            keys.ref_log_prob: self.kl_coef,
            keys.old_log_prob: self.correction != "none",
            keys.response: self._per_response,
        }
        return names + [name for name, read in optional.items() if read]

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """GRPO has no value estimator."""

    def terms(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss terms of each token, not yet weighted; :meth:`forward` sums them.

        [N] each: ``objective``, ``kl`` and ``entropy``, with gradient and without their coefficients; ``log_ratio`` to
        the sampler or, with a correction, to the trainer before the update; ``ratio``, as used by the surrogate;
        ``correction``, the importance weight in ``objective``, and ``corrected``, whether it reached a bound; and the
        flags of :func:`clipped_tokens`. Values on untrained tokens mean nothing; their ``weight`` is 0.

        Raises:
            ValueError: an entry is missing.
        """
        keys, settings = self.tensor_keys, self.settings
        trainable = tensordict[keys.trainable]
        log_prob, sampler = self._read(tensordict, keys.log_prob), self._read(tensordict, keys.sampler_log_prob)
        advantage = self._read(tensordict, keys.advantage)
        response = _entry(tensordict, keys.response) if self._per_response else None
        old = self._read(tensordict, keys.old_log_prob) if self.correction != "none" else sampler
        log_ratio = log_prob - old
        leveled = leveled_log_ratio(log_ratio, self.ratio, trainable, response)
        how = settings.correction, settings.correction_level, settings.correction_low, settings.correction_high
        weight, corrected = correction_weight(old - sampler, *how, response)
        terms = TensorDict(
            objective=weight * self._surrogate(
                log_ratio=leveled, advantage=advantage, log_prob=log_prob, **settings
            ),
            entropy=self._read(tensordict, keys.entropy),
            kl=torch.zeros_like(log_prob),
            log_ratio=log_ratio,
            ratio=leveled.exp(),
            correction=weight,
            corrected=corrected,
            batch_size=log_ratio.shape,
        )  # fmt: skip
        clips = settings.clip_low, settings.clip_high, settings.dual_clip
        terms.update(clipped_tokens(settings.surrogate, leveled.detach(), advantage, *clips))
        if self.kl_coef:
            # The ratio is to the sampler, also if the surrogate's is to the trainer.
            terms["kl"] = kl_estimate(self.kl, log_prob, self._read(tensordict, keys.ref_log_prob), log_prob - sampler)
        return terms

    def _read(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        """The entry in fp32 or more; 0 on tokens that are not trained on, where it may be undefined."""
        value = _entry(tensordict, key)
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.where(tensordict[self.tensor_keys.trainable], wide, 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """``loss``, which is minimised, its terms :data:`LOSSES`, and sums over trained tokens without gradient.

        TorchRL's ``Trainer`` adds up all entries that begin with "loss"; tell it ``loss_components=["loss"]``.

        The sums are :data:`METRIC_SUMS`, with a reference ``kl_ref``, with a dual clip ``clip_dual``, and with a
        correction ``correction``, ``correction_squared`` and ``corrected``.
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
            } | {name: terms[name] for name in ("clip_low", "clip_high", "clip_dual") if name in terms.keys()}
            if tensordict.get(keys.ref_log_prob, None) is not None:
                sums["kl_ref"] = k3(log_prob, self._read(tensordict, keys.ref_log_prob))
            if self.correction != "none":
                sums |= {"correction": terms["correction"], "corrected": terms["corrected"]}
                sums["correction_squared"] = torch.square(terms["correction"])
            for name, value in sums.items():
                out[name] = torch.where(trainable, value.to(log_prob.dtype), 0.0).sum()
        return out


_WRITTEN_BY = {
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
