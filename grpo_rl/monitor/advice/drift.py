"""Conditions under which the policy moves away from what it is compared with: reference, sampler, sampling policy."""

from __future__ import annotations

from grpo_rl.monitor.advice.history import (
    WINDOW,
    Facts,
    Finding,
    History,
    change,
    in_float32,
    mean,
    middle,
    rises,
    span,
    times,
)

FAR_KL, RUNAWAY_KL, TARGETS = 0.2, 5.0, 3.0
"""KL to the reference in nats a token: bounds of what grows without raising the reward, and of what is too far at all;
multiples of ``policy.target_kl``. At 0.2 a response of 100 tokens is e^20 times as likely as under the reference."""
DOUBLED = 2.0
HIGH_MISMATCH = 0.1
"""Mean |sampler - trainer| in nats, once it has doubled: half of what stops a run by default. bfloat16 gives 0.04, and
healthy runs with adapters 0.06 in single steps."""
HALF = 0.5
"""``ess`` below which, and share of clipped tokens above which, more than half of what was sampled is lost.
Quickstarts have an ``ess`` above 0.97 and 4 % of clipped tokens or fewer, asynchronous ones 0.9 and up to 12 %."""


def kl_runaway(history: History, facts: Facts) -> Finding | None:
    """The policy moves ever further from the reference, and earns no more for it."""
    # Medians: the estimates of single tokens have heavy tails.
    before, after = history.halves("kl/ref")
    rewards = history.halves("reward/mean")
    target = facts.get("policy.target_kl")
    if not after or not rewards[1]:
        return None
    now, was = middle(after), middle(before)
    grows = now > FAR_KL and now > DOUBLED * was and not rises(*rewards)
    beyond = bool(target) and now > TARGETS * target and not was > now
    if not (grows or beyond or now > RUNAWAY_KL):
        return None
    seen = f"the KL to the reference went from {was:.2g} to {now:.2g} nats a token in {WINDOW} steps"
    seen += f", its target is {target:.2g}" if beyond else f", and the reward stays at {mean(rewards[1]):.3g}"
    remedy = f"{times(facts, 'policy.kl_coef', 4)}, or {times(facts, 'optimizer.lr', 0.5)}"
    first, last = span(history.last("kl/ref", 2 * WINDOW), lambda value: value > (was + now) / 2)
    return Finding(seen, remedy, first, last)


def mismatch_rises(history: History, facts: Facts) -> Finding | None:
    """Sampler and trainer disagree ever more on fresh weights."""
    first, last = history.ends("mismatch/mean")
    if not last or middle(last) < max(HIGH_MISMATCH, DOUBLED * middle(first)):
        return None
    seen = f"mismatch/mean, of sampler and trainer, went from {middle(first):.2g} to {middle(last):.2g} nats a token"
    remedies = ["loss.correction=truncate", times(facts, "optimizer.lr", 0.5)]
    if not in_float32(facts):
        remedies.append("train_model.dtype=float32 to find the cause")
    begin, end = span(history.last("mismatch/mean", 2 * WINDOW), lambda value: value >= HIGH_MISMATCH)
    return Finding(seen, ", or ".join(remedies), begin, end)


def off_policy(history: History, facts: Facts) -> Finding | None:
    """The policy moves too far away from the one that sampled what it trains on."""
    ess = history.last("ess")
    if len(ess) < WINDOW:
        return None
    low = dict(history.last("clip/low_fraction"))  # by step: a value that is not finite is left out
    clipped = [low[step] + high for step, high in history.last("clip/high_fraction") if step in low]
    now = middle([value for _, value in ess])
    if now >= HALF and not middle(clipped) > HALF:
        return None
    seen = (
        f"ess is {now:.2f} and {middle(clipped):.0%} of the tokens are clipped (medians of {WINDOW} steps): the policy "
    )
    seen += f"is far from the one that sampled (kl/sampler {middle(history.values('kl/sampler')):.2g} nats a token)"
    remedies = [times(facts, "optimizer.lr", 0.5)]
    if (facts.get("train.epochs") or 1) > 1:
        remedies.insert(0, change(facts, "train.epochs", 1))
    if "time/wait_s" in history.row and facts.get("train.max_staleness", 1):
        remedies.insert(0, change(facts, "train.max_staleness", max((facts.get("train.max_staleness") or 2) - 1, 0)))
    first, last = span(history.last("ess", 2 * WINDOW), lambda value: value < HALF)
    return Finding(seen, ", or ".join(remedies), first, last)
