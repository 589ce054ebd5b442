"""The terms of the loss, which are settings of a config's section ``loss``, and the checks of what goes together.

Nothing here imports torch: a wrong setting is reported before the seconds that its import takes.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import WrapValidator

from grpo_rl.section import Named, Section, setting

Surrogate = Literal["clipped", "cispo", "sapo", "plain", "none"]
"""The values of ``loss.surrogate``."""
Ratio = Literal["token", "sequence", "sequence_token"]
"""The values of ``loss.ratio``: the ratio of each token, or of its response."""
Aggregation = Literal["sequence_mean", "token_mean", "constant", "prompt_mean"]
"""The values of ``loss.aggregate``."""
Correction = Literal["none", "truncate", "mask"]
"""The values of ``loss.correction``."""
Level = Literal["token", "sequence"]
"""The values of ``loss.correction_level``: a weight per token, or per response."""
KL = Literal["k1", "k2", "k3", "k3+", "k3_is"]
"""The values of ``loss.kl``."""
REWARD_KL = ("k1", "k2", "k3")
"""The kinds with different values, for a KL in the reward; the others differ only in their gradient."""
Advantage = Literal["zscore", "no_std", "leave_one_out", "batch_std", "batch_zscore", "multi_reward"]
"""The values of ``loss.advantage``."""
_OR_A_FUNCTION = WrapValidator(lambda value, check: value if callable(value) else check(value))


class LossTerms(Section):
    """The terms of `grpo_rl.losses.grpo.GRPOLoss`: settings of ``loss``, and coefficients of ``policy``.

    In the place of a surrogate's or KL estimate's name there can be a function, see `grpo_rl.losses.grpo.Term`.
    """

    surrogate: Annotated[Surrogate | Named, _OR_A_FUNCTION] = setting(
        "clipped",
        "clipped: PPO's | cispo: a clipped weight, no gradient lost | sapo: a soft gate | plain: r A | "
        "none: only the KL | package.module:function: your own (docs/losses.md)",
    )
    ratio: Ratio = setting(
        "token",
        "r of each token | sequence: its response's geometric mean, so that all its tokens share one gradient | "
        "sequence_token: that value with the token's own gradient",
    )
    clip_low: float = setting(0.2, "r is clipped below at 1 - clip_low", ge=0, le=1)
    clip_high: float = setting(0.2, "r is clipped above at 1 + clip_high", ge=0)
    dual_clip: float | None = setting(
        None, "for surrogate=clipped: for negative advantages, r is capped at this; null: no cap", ge=0
    )
    tau_pos: float = setting(1.0, "for surrogate=sapo: temperature for positive advantages", gt=0)
    tau_neg: float = setting(1.05, "for surrogate=sapo: temperature for other advantages", gt=0)
    kl: Annotated[KL | Named, _OR_A_FUNCTION] = setting(
        "k3",
        "k1: only in the reward | k2 | k3 | k3+: value of k3, gradient of k2 | k3_is: k3 weighted by importance, "
        "unbiased off-policy too | package.module:function: your own, in the loss (docs/losses.md)",
    )
    correction: Correction = setting(
        "none",
        "sampler against trainer, rho = pi_old(trainer) / pi_old(sampler). none: r = pi / pi_sampler, which also "
        "absorbs the mismatch | truncate: a weight min(rho, high) | mask: rho, and 0 outside [low, high]",
    )
    correction_level: Level = setting("token", "rho of each token | sequence: the product over its response")
    correction_low: float = setting(0.5, "low, the lower bound of rho", ge=0)
    correction_high: float = setting(2.0, "high, the upper bound of rho", ge=0)
    kl_coef: float = 0.0
    """Weight of the estimate of KL(policy || reference)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


def check_loss(terms: LossTerms) -> None:
    """Refuses terms that give no loss together.

    Raises:
        ValueError: a bound is on the wrong side, the KL estimate would have no effect, or there is no term at all.
    """
    if terms.surrogate == "none" and not terms.kl_coef:
        raise ValueError(
            "loss.surrogate=none trains on the KL to the reference alone, which is off; set policy.kl_coef=1 and "
            "ref_model.name=TEACHER, with loss.kl_in=loss"
        )
    dual_clip = terms.dual_clip
    if dual_clip is not None and not dual_clip >= 1 + terms.clip_high:
        raise ValueError(f"loss.dual_clip is {dual_clip}; use at least 1 + loss.clip_high (3 is usual), or null")
    if dual_clip is not None and terms.surrogate != "clipped" and not callable(terms.surrogate):
        raise ValueError(
            f"loss.dual_clip is {dual_clip}, and loss.surrogate={terms.surrogate} has none; set it to null"
        )
    if not terms.correction_low <= 1 <= terms.correction_high:
        raise ValueError(
            f"loss.correction_low is {terms.correction_low} and loss.correction_high {terms.correction_high}; a weight "
            "of 1 must lie between them"
        )
    if terms.kl_coef and terms.kl == "k1":
        raise ValueError(
            "loss.kl=k1 in the loss has a gradient of mean zero, so it would have no effect; use k2, k3, k3+ or "
            "k3_is, or loss.kl_in=reward"
        )


def check_advantage(kind: str, kl_coef: float = 0.0, kl: str = "k1", reward_clip: float | None = None) -> None:
    """Refuses settings of `grpo_rl.data.advantages.AdvantageEstimator` that give no advantage.

    Raises:
        ValueError: names the setting and its valid values.
    """
    if kind not in get_args(Advantage):
        raise ValueError(f"unknown advantage {kind!r}; choose one of {', '.join(get_args(Advantage))}")
    if kl_coef and kl not in REWARD_KL:
        raise ValueError(f"loss.kl={kl} differs by its gradient, and a reward has none; use {', '.join(REWARD_KL)}")
    if kind == "multi_reward" and (kl_coef or reward_clip is not None):
        raise ValueError(
            "loss.advantage=multi_reward looks at parts of the reward, not at their sum; use loss.kl_in=loss and leave "
            "train.reward_clip at null"
        )
