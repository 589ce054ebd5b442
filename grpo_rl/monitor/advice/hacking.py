"""Conditions under which the reward is earned in a way that nobody wanted."""

from __future__ import annotations

import math

from grpo_rl.monitor.advice.history import WINDOW, Facts, Finding, History, mean, span

LONGER, BY_LENGTH = 1.5, 0.5
"""Growth of the mean length, and correlation of length and reward inside groups, that together are a warning."""
REPEATED, MORE_REPEATED = 0.3, 0.15
"""Share of repeated n-grams, and its growth, that together are a warning."""
ERRORS = 2.0
"""Standard errors of the difference by which the held-out reward has to fall."""
READ = "read responses in completions.parquet"


def held_out_falls(history: History, facts: Facts) -> Finding | None:
    """The training reward rose while the held-out reward fell."""
    if len(history.evaluations) < 2:
        return None
    best, now = history.evaluations
    fall = best["eval/reward"] - now["eval/reward"]
    error = math.hypot(*(row.get("eval/standard_error", 0.0) for row in (best, now)))
    then = best["reward/then"]
    before = mean(history.values("reward/mean", first=True)) if math.isnan(then) else then
    after = now["reward/then"]
    if fall <= ERRORS * error or fall <= 0 or not after > before:
        return None
    seen = (
        f"held-out reward fell from {best['eval/reward']:.3f} (step {int(best['step'])}) to {now['eval/reward']:.3f} "
        f"while the training reward rose from {before:.3f} to {after:.3f}: the policy learns what pays and not what is "
        "asked, or the training problems by heart"
    )
    remedy = f"env.reward, env.path: {READ}, and go back to that step's checkpoint"
    return Finding(seen, remedy, int(now["step"]), int(now["step"]))


def paid_for_length(history: History, facts: Facts) -> Finding | None:
    """Responses grew longer, and in their groups the longer ones earn more."""
    first, last = history.ends("response/mean_length")
    correlation = mean(history.values("response/length_correlation"))
    if not first or mean(last) < LONGER * mean(first) or not correlation >= BY_LENGTH:
        return None
    seen = (
        f"responses grew from {mean(first):.0f} to {mean(last):.0f} tokens, and inside a group the longer ones earn "
        f"more (correlation {correlation:.2f}): length may be what the reward pays for"
    )
    begin, end = span(history.last("response/mean_length", 2 * WINDOW), lambda value: value >= LONGER * mean(first))
    return Finding(seen, f"env.rewards.soft_overlong_punishment takes from long responses; {READ}", begin, end)


def repetition(history: History, facts: Facts) -> Finding | None:
    """Responses repeat themselves far more than at first."""
    first, last = history.ends("response/repetition")
    if not first or mean(last) < REPEATED or mean(last) < mean(first) + MORE_REPEATED:
        return None
    seen = (
        f"responses repeat themselves: {mean(last):.0%} of their 4-grams were there before, {mean(first):.0%} in the "
        f"first {WINDOW} steps"
    )
    begin, end = span(history.last("response/repetition", 2 * WINDOW), lambda value: value >= REPEATED)
    return Finding(seen, f"env.rewards.repetition_penalty takes from them; {READ}", begin, end)
