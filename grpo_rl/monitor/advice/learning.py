"""Conditions under which nothing is learned, or what was learned is lost.

Each function returns what it finds, or None. Bounds say when a run is told; the statistic that they are applied to, a
mean, a median or the end of an interval over ``WINDOW`` steps, keeps single steps from raising anything.
"""

from __future__ import annotations

import itertools
import math
from statistics import fmean

from grpo_rl.monitor.advice.history import (
    EARLY,
    FEW_GROUPS,
    WINDOW,
    Facts,
    Finding,
    History,
    change,
    falling,
    groups_of,
    in_float32,
    mean,
    mean_reward,
    middle,
    rises,
    share_interval,
    share_steps,
    span,
    times,
)

NEARLY_ALL, MOSTLY, HALF, QUARTER = 0.9, 0.8, 0.5, 0.25
"""Shares above which a condition is extreme, and told after ``EARLY`` steps, and above which it is told if it stays.
Above 0.9 hardly a group teaches anything, even where the reward of ten steps is above that of the ten before, as it was
with SmolLM2 on Countdown, whose groups had variance until the ninth step. Above 0.8 more than four of five
samples are wasted. A healthy quickstart begins with 0.59 of its responses cut off, but is below 0.5 at the third step,
and its mean over ten steps is 0.21."""
COLLAPSED, OF_FIRST = 0.1, 0.2
"""Entropy, in nats a token and as a part of that of the first steps, that together are a collapse once the reward no
longer rises. The quickstart ends at 0.07 nats, 0.1 of its first ten steps', while its reward still rises."""
LONGER, SHORTER = 1.25, 0.4
"""Mean length as a part of that of the first steps. Responses of the quickstart go to 0.62 of theirs, and earn more."""
ERRORS, SPREADS = 4.0, 0.5
"""Standard errors, and standard deviations of a response's reward, by which the reward has to fall. The best five of
many steps are chosen for being high: by about 3 standard errors over 1,000 steps of noise, so two would not do."""
UNSTABLE = 3.0
"""Growth of the gradient's norm, or change of the entropy either way, that shows that the weights came off course."""
LOSS_ROSE = 1.05
"""The held-out loss of demonstrations as a multiple of its lowest. The same rows are scored each time, so that sampling
adds no noise. The bound is reasoned; it has not been measured on many runs."""
BAD_STEPS = 3
"""Optimizer steps left out, of the last ``WINDOW``. One is told when it happens, and may be a single overflow."""


def cut_off(history: History, facts: Facts) -> Finding | None:
    """Most responses meet the length limit, and it does not get better."""
    if facts.get("sampling.ignore_eos"):
        return None  # then each response is meant to have the limit's length
    extreme = _share(history, facts, "response/truncated_fraction", EARLY, MOSTLY)
    steps = extreme or _share(history, facts, "response/truncated_fraction", WINDOW, HALF)
    if not steps or falling([value for _, value in steps]):
        return None
    share, zero = mean([v for _, v in steps]), mean(history.values("reward/zero_std_fraction", len(steps)))
    limit = facts.get("sampling.max_new_tokens")
    seen = f"{share:.0%} of the responses of the last {len(steps)} steps are cut off"
    seen += f" at {limit} tokens" if limit else ""
    seen += f", and in {zero:.0%} of the groups all have the same reward" if zero >= HALF else ""
    remedy = times(facts, "sampling.max_new_tokens", 2)
    if limit and 4 * limit > (facts.get("inference_model.max_model_len") or math.inf):
        remedy += f" with room for it, {times(facts, 'inference_model.max_model_len', 2)}"
    first, last = span(history.last("response/truncated_fraction", 2 * WINDOW), lambda value: value >= HALF)
    return Finding(seen, f"{remedy}, or ask for shorter responses (env.system_prompt, env.examples)", first, last)


def zero_rewards(history: History, facts: Facts) -> Finding | None:
    """Every reward is 0."""
    # A hard task that has paid before may well have five steps without a reward.
    wanted = share_steps(facts, WINDOW if history.paid else EARLY)
    steps, spread = history.last("reward/mean", wanted), history.values("reward/std", wanted)
    if len(steps) < wanted or any(value for _, value in steps) or any(spread):
        return None
    if share_interval(1.0, wanted * groups_of(facts))[0] < MOSTLY:
        return None
    seen = f"every reward of the last {len(steps)} steps is 0, so that nothing is learned"
    remedy = "read responses in completions.parquet; show the form in the prompt (env.examples), add a reward for it"
    return Finding(seen, f"{remedy} (env.rewards), or take easier rows (env.path)", steps[0][0], steps[-1][0])


def no_variance(history: History, facts: Facts) -> Finding | None:
    """Nearly all groups are zero-variance groups, and their rewards are not 0."""
    # One reward for all is judged soon; else collapsed entropy may be the cause, which takes longer to tell.
    constant = history.alike[1] >= EARLY
    nearly_all = _share(history, facts, "reward/zero_std_fraction", EARLY, NEARLY_ALL)
    steps = nearly_all or _share(history, facts, "reward/zero_std_fraction", EARLY if constant else WINDOW, MOSTLY)
    rewards = history.values("reward/mean", len(steps))
    if not steps or falling([value for _, value in steps]) or not any(rewards):
        return None
    share = mean([value for _, value in steps])
    first, last = span(steps, lambda value: value >= HALF)
    if constant and len(set(rewards)) == 1:
        seen = f"every response of the last {len(steps)} steps earns the same, {rewards[-1]:.3g}"
        return Finding(seen, "env.reward and env.rewards: a reward that tells responses apart", first, last)
    earlier, later = history.halves("reward/mean")
    if not nearly_all and earlier and rises(earlier, later):
        return None  # few groups are enough as long as the reward rises by them
    seen = f"in {share:.0%} of the groups of the last {len(steps)} steps all responses earn the same"
    seen += f" (mean reward {mean(rewards):.3g})"
    remedies = [change(facts, "train.max_resamples", 5)] if not facts.get("train.max_resamples") else []
    remedies.append(times(facts, "env.repeats", 2))
    entropies = history.values("entropy", EARLY)
    if entropies and mean(entropies) <= COLLAPSED:
        seen += f", at an entropy of {mean(entropies):.2g} nats a token"
        remedies = [*_more_entropy(facts), *remedies]
    if (facts.get("sampling.temperature") or 1.0) < HALF:
        remedies.insert(0, change(facts, "sampling.temperature", 1.0))
    return Finding(seen, f"{', '.join(remedies)}, or rows of another difficulty (env.path)", first, last)


def no_gradient(history: History, facts: Facts) -> Finding | None:
    """The gradient is 0 though rewards differ inside groups."""
    norms, shares = history.last("grad_norm", EARLY), history.values("reward/zero_std_fraction", EARLY)
    if len(norms) < EARLY or any(norm for _, norm in norms) or min(shares, default=1.0) == 1.0:
        return None
    seen = f"the gradient of the last {EARLY} steps is 0, though rewards differ in {1 - mean(shares):.0%} of the groups"
    if facts.get("loss.mask_truncated") and mean(history.values("response/truncated_fraction", EARLY)) >= HALF:
        remedy = f"{change(facts, 'loss.mask_truncated', False)}, {times(facts, 'sampling.max_new_tokens', 2)}"
    elif facts.get("train.reward_clip"):
        remedy = f"{change(facts, 'train.reward_clip', None)}: clipped rewards may all be equal"
    else:
        remedy = "loss: look at what leaves tokens or advantages out"
    return Finding(seen, remedy, norms[0][0], norms[-1][0])


def entropy_collapse(history: History, facts: Facts) -> Finding | None:
    """The policy hardly varies, groups have no variance, and the reward no longer rises."""
    first, last = history.ends("entropy")
    before, after = history.halves("reward/mean")
    bound = min(COLLAPSED, OF_FIRST * mean(first)) if first else 0.0
    alike = mean(history.values("reward/zero_std_fraction"))
    if not last or mean(last) > bound or not before or rises(before, after) or not alike >= HALF:
        return None
    # Where responses to all prompts earn the same, the task is solved, or its reward constant: no case of entropy.
    if middle(history.values("reward/std")) < 0.1 * (abs(mean(after)) or 1.0):
        return None
    seen = f"entropy fell from {mean(first):.2g} to {mean(last):.2g} nats a token, {alike:.0%} of the groups have no "
    seen += f"variance, and the reward stays at {mean(after):.3g}"
    remedies = [*_more_entropy(facts), times(facts, "optimizer.lr", 0.5)]
    begin, end = span(history.last("entropy", 2 * WINDOW), lambda value: value <= bound)
    return Finding(seen, ", or ".join(remedies), begin, end)


def _more_entropy(facts: Facts) -> list[str]:
    """The settings that keep the policy from collapsing, where they are off."""
    remedies = [change(facts, "policy.entropy_coef", 0.001)] if not facts.get("policy.entropy_coef") else []
    return remedies + ([change(facts, "policy.kl_coef", 0.01)] if not facts.get("policy.kl_coef") else [])


def length_limit(history: History, facts: Facts) -> Finding | None:
    """Responses grew until many of them meet the length limit."""
    length = history.ends("response/mean_length")
    first, last = history.ends("response/truncated_fraction")
    if facts.get("sampling.ignore_eos") or not first or not length[0] or mean(length[1]) < LONGER * mean(length[0]):
        return None
    count = WINDOW * groups_of(facts)
    least = share_interval(mean(last), count)[0]
    # Beyond noise, and at least one response in five: clipped lengths then say little about what was wanted.
    if least <= share_interval(mean(first), count)[1] or mean(last) < 1 - MOSTLY:
        return None
    limit = facts.get("sampling.max_new_tokens")
    seen = f"responses grew from {mean(length[0]):.0f} to {mean(length[1]):.0f} tokens, and {mean(last):.0%} are cut "
    seen += f"off{f' at {limit}' if limit else ''}, {mean(first):.0%} at first"
    remedy = f"{times(facts, 'sampling.max_new_tokens', 2)} if the length is of use, else "
    remedy += "env.rewards.soft_overlong_punishment or loss=dr_grpo"
    begin, end = span(history.last("response/truncated_fraction", 2 * WINDOW), lambda value: value >= mean(last) / 2)
    return Finding(seen, remedy, begin, end)


def length_collapse(history: History, facts: Facts) -> Finding | None:
    """Responses became much shorter, and earn no more for it."""
    first, last = history.ends("response/mean_length")
    rewards = history.ends("reward/mean")
    if not first or mean(last) > SHORTER * mean(first) or rises(*rewards):
        return None
    seen = f"responses shrank from {mean(first):.0f} to {mean(last):.1f} tokens, while the reward went from "
    seen += f"{mean(rewards[0]):.3g} to {mean(rewards[1]):.3g}"
    remedies = [change(facts, "policy.kl_coef", 0.01)] if not facts.get("policy.kl_coef") else []
    remedies = [times(facts, "optimizer.lr", 0.5), *remedies, "a reward that a short response can't earn (env.rewards)"]
    begin, end = span(history.last("response/mean_length", 2 * WINDOW), lambda value: value <= SHORTER * mean(first))
    return Finding(seen, ", or ".join(remedies), begin, end)


def unstable(history: History, facts: Facts) -> Finding | None:
    """The reward fell far below its best and stays there, or all responses became alike at once."""
    return _collapses(history, facts) or _falls(history, facts)


def _collapses(history: History, facts: Facts) -> Finding | None:
    """No prompt's responses differ in reward any more from one step to the next, where most did before."""
    since, steps, before = history.alike
    # Learning takes variance away bit by bit: the quickstart needs ten steps from none to half of its groups.
    if steps < EARLY or steps * groups_of(facts) < FEW_GROUPS or not before or max(before) > QUARTER:
        return None
    seen = (
        f"since then all responses to all prompts earn {history.row['reward/mean']:.3g}, where {1 - mean(before):.0%} "
    )
    seen += "of the groups had variance just before: the policy collapsed within a step"
    return Finding(seen, _smaller_steps(facts), since, int(history.row["step"]))


def _falls(history: History, facts: Facts) -> Finding | None:
    best, last = history.best_and_last()
    if not best:
        return None
    fall = mean_reward(best) - mean_reward(last)
    spread = max(mean([row.get("reward/std", 0.0) for row in rows]) for rows in (best, last))
    # Groups, not responses, count: the responses to one prompt resemble each other.
    errors = [
        row.get("reward/std", 0.0) ** 2 / groups_of(facts) / len(rows) ** 2 for rows in (best, last) for row in rows
    ]
    if fall <= max(ERRORS * math.sqrt(math.fsum(errors)), SPREADS * spread, 0.0):
        return None
    if not all(row["reward/mean"] < mean_reward(best) - fall / 2 for row in last):
        return None
    signs = _signs(best, last)
    if not signs:
        return None
    seen = f"the reward fell from {mean_reward(best):.3g} (step {int(best[-1]['step'])}) to {mean_reward(last):.3g}"
    return Finding(f"{seen}, and {signs[0]}", _smaller_steps(facts), int(last[0]["step"]), int(last[-1]["step"]))


def _smaller_steps(facts: Facts) -> str:
    kl = f", or {change(facts, 'policy.kl_coef', 0.01)}" if not facts.get("policy.kl_coef") else ""
    return times(facts, "optimizer.lr", 0.1) + kl + "; begin again, or from an earlier checkpoint"


def bad_steps(history: History, facts: Facts) -> Finding | None:
    """Optimizer steps are left out again and again, as something in them is not finite."""
    counts = history.last("optimizer/skipped_steps", WINDOW + 1)
    grown = [now for (_, was), (now, is_) in itertools.pairwise(counts) if is_ > was]
    left_out = counts[-1][1] - counts[0][1] if counts else 0
    if left_out < BAD_STEPS or len(grown) < BAD_STEPS:
        return None
    seen = f"{left_out:.0f} optimizer steps of the last {len(counts) - 1} steps were left out, as they are not finite"
    remedies = [times(facts, "optimizer.lr", 0.1), "a higher optimizer.warmup_steps"]
    if not in_float32(facts):
        remedies.append("train_model.dtype=float32")
    return Finding(seen, ", or ".join(remedies), grown[0], grown[-1])


def held_out_loss_rises(history: History, facts: Facts) -> Finding | None:
    """The loss of held-out demonstrations is above its lowest."""
    if len(history.held_out_losses) < 2:
        return None
    (lowest_at, lowest), (step, now) = history.held_out_losses
    if now <= LOSS_ROSE * lowest:
        return None
    seen = f"the loss of held-out demonstrations rose from {lowest:.3f} (step {lowest_at}, its lowest) to {now:.3f}"
    training = mean(history.values("loss/sft"))
    seen += f", where that in training is {training:.3f}" if math.isfinite(training) else ""
    remedies = [times(facts, "optimizer.lr", 0.5), "more rows (env.path)"]
    if (facts.get("train.epochs") or 1) > 1:
        remedies.insert(0, change(facts, "train.epochs", "lower"))
    return Finding(f"{seen}: rows are learned by heart, or steps are too large", ", or ".join(remedies), step, step)


def _share(history: History, facts: Facts, name: str, least: int, bound: float) -> list[tuple[int, float]]:
    """The last steps, ``least`` of them or more, if the share that a metric is lies surely above a bound in them."""
    steps = history.last(name, share_steps(facts, least))
    if len(steps) < share_steps(facts, least):
        return []
    share = min(fmean(value for _, value in steps), 1.0)
    return steps if share_interval(share, len(steps) * groups_of(facts))[0] >= bound else []


def _signs(best: list, last: list) -> list[str]:
    """Other signs that the weights came off course, in words."""
    found = []

    def both(name: str) -> tuple[float, float]:
        before, after = (
            middle([r[name] for r in rows if math.isfinite(r.get(name, math.nan))]) for rows in (best, last)
        )
        return before, after

    norm, entropy, ess = both("grad_norm"), both("entropy"), both("ess")
    if norm[1] > UNSTABLE * norm[0]:
        found.append(f"the gradient's norm went from {norm[0]:.2g} to {norm[1]:.2g}")
    if entropy[1] > UNSTABLE * entropy[0] or entropy[0] > UNSTABLE * entropy[1]:
        found.append(f"entropy went from {entropy[0]:.2g} to {entropy[1]:.2g} nats a token")
    if ess[1] < HALF:
        found.append(f"ess is {ess[1]:.2f}")
    alike = both("reward/zero_std_fraction")
    if alike[0] < HALF and alike[1] >= MOSTLY:
        found.append(f"in {alike[1]:.0%} of the groups all responses earn the same, {alike[0]:.0%} before")
    return found
