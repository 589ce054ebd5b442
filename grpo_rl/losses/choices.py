"""The choices in a config's section ``loss``, and the checks of its numbers.

Nothing here imports torch: a wrong setting is reported before the seconds that its import takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

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


def check_loss(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    *,
    surrogate: str | Callable[..., object] = "clipped",
    ratio: str = "token",
    dual_clip: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    kl: str | Callable[..., object] = "k3",
    correction: str = "none",
    correction_level: str = "token",
    correction_low: float = 0.5,
    correction_high: float = 2.0,
) -> None:
    """Refuses arguments of `grpo_rl.losses.grpo.GRPOLoss` that give no loss, but for those of functions.

    Raises:
        ValueError: a choice is unknown, a bound is on the wrong side, the KL estimate would have no effect, or there is
            no term at all.
    """
    for name, value, choices in (
        ("surrogate", surrogate, Surrogate),
        ("ratio", ratio, Ratio),
        ("kl", kl, KL),
        ("correction", correction, Correction),
        ("correction_level", correction_level, Level),
    ):
        if value not in get_args(choices) and not callable(value):
            raise ValueError(f"loss.{name} is {value!r}; it can be {', '.join(get_args(choices))}")
    if surrogate == "none" and not kl_coef:
        raise ValueError(
            "loss.surrogate=none trains on the KL to the reference alone, which is off; set policy.kl_coef=1 and "
            "ref_model.name=TEACHER, with loss.kl_in=loss"
        )
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"loss.clip_low is {clip_low} and loss.clip_high {clip_high}; need clip_low in [0, 1], clip_high >= 0"
        )
    if dual_clip is not None and not dual_clip >= 1 + clip_high:
        raise ValueError(f"loss.dual_clip is {dual_clip}; use at least 1 + loss.clip_high (3 is usual), or null")
    if dual_clip is not None and surrogate != "clipped" and not callable(surrogate):
        raise ValueError(f"loss.dual_clip is {dual_clip}, and loss.surrogate={surrogate} has none; set it to null")
    if not min(tau_pos, tau_neg) > 0:
        raise ValueError(f"loss.tau_pos is {tau_pos} and loss.tau_neg {tau_neg}; temperatures are above 0")
    if not correction_low <= 1 <= correction_high:
        raise ValueError(
            f"loss.correction_low is {correction_low} and loss.correction_high {correction_high}; a weight of 1 must "
            "lie between them"
        )
    if kl_coef and kl == "k1":
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
