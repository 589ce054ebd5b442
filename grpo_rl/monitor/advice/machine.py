"""Conditions under which time, memory or responses are lost to the machine and to scorers."""

from __future__ import annotations

import itertools
import math

from grpo_rl.monitor.advice.history import (
    EARLY,
    FAILED,
    TIME,
    WINDOW,
    Facts,
    Finding,
    History,
    change,
    groups_of,
    mean,
    middle,
    span,
    times,
)

WAITS, SAMPLES = 0.5, 0.85
"""Parts of a step's time in which the trainer waits for engines, or nothing but sampling goes on. An asynchronous
quickstart waits 8 % of its time; a 0.6B model on an H100 samples 77 % of its synchronous step, and is well used."""
FEW_RESPONSES = 64
"""Responses of a collection up to which more of them take hardly any longer: each decoding step reads all weights."""
FEW_TOKENS, MANY = 1024, 4
"""Tokens of a micro-batch, and micro-batches of an optimizer step. On an H100 512 tokens took 70 ms and 16,384 tokens
172: a token of the small one took 13 times as long, most of it for launching kernels."""
FAILING, IN_STEPS = 0.01, 3
"""Share of responses whose scorer failed, and steps in which one did, of the last ``WINDOW``."""
FULL = 0.95
"""Peak of the memory over what there is: beyond, a batch that is a twentieth longer does not fit."""


def trainer_waits(history: History, facts: Facts) -> Finding | None:
    """The trainer of an asynchronous run waits for responses most of the time."""
    steps = _parts(history, "wait")
    waits, totals = dict(history.last("time/wait_s")), dict(history.last(TIME))
    if len(steps) < WINDOW:
        return None
    # A sum, as groups come in waves; without the longest wait, which may be an engine's that was replaced.
    longest = max(waits, key=lambda step: waits[step])
    share = sum(waits[step] for step, _ in steps if step != longest)
    share /= sum(totals[step] for step, _ in steps if step != longest) or 1.0
    if share < WAITS:
        return None
    remedies = [f"more engines (inference_model.num_devices{_now(facts, 'inference_model.num_devices')})"]
    remedies.append(times(facts, "env.num_envs", 2))
    if "train.max_staleness" in facts and (facts["train.max_staleness"] or 0) < 4:
        remedies.append(change(facts, "train.max_staleness", (facts["train.max_staleness"] or 0) + 1))
    first, last = span(steps, lambda value: value >= WAITS)
    return Finding(f"the trainer waits for responses {share:.0%} of a step's time", ", or ".join(remedies), first, last)


def sampling_dominates(history: History, facts: Facts) -> Finding | None:
    """Sampling takes nearly all of a step, for few responses or by a slow engine."""
    steps = _parts(history, "sample")
    share = middle([value for _, value in steps])
    responses = groups_of(facts) * int(facts.get("env.repeats") or FEW_RESPONSES)
    slow = facts.get("inference_model.engine") == "transformers"
    if len(steps) < WINDOW or share < SAMPLES or not (slow or responses <= FEW_RESPONSES):
        return None
    seen = f"sampling takes {share:.0%} of a step's time, for {responses} responses at a time"
    remedy = f"{times(facts, 'env.num_envs', 4)} with {times(facts, 'train.optim_batch_size', 4)}"
    remedy = f"{change(facts, 'inference_model.engine', 'vllm')} where it can be installed" if slow else remedy
    return Finding(seen, remedy, *span(steps, lambda value: value >= SAMPLES))


def small_micro_batches(history: History, facts: Facts) -> Finding | None:
    """An optimizer step is divided into many micro-batches of few tokens."""
    counts, per = history.last("train/micro_batches"), history.values("train/micro_batch_tokens")
    optimizer_steps = history.values("train/optimizer_steps")
    if len(counts) < WINDOW or not optimizer_steps:
        return None
    count, tokens = middle([value for _, value in counts]) / max(middle(optimizer_steps), 1), middle(per)
    accumulates = facts.get("train.gradient_accumulation_steps")
    limit = facts.get("train.micro_batch_tokens") or math.inf
    # A step of few tokens is no matter of its division, and prompts, which `tokens` leaves out, count for the limit.
    if count < MANY or tokens >= FEW_TOKENS or not (accumulates or limit < FEW_TOKENS):
        return None
    seen = f"an optimizer step is divided into {count:.0f} micro-batches of {tokens:.0f} response tokens"
    remedy = change(facts, "train.micro_batch_tokens", 8 * FEW_TOKENS)
    if accumulates:
        remedy = (
            f"{change(facts, 'train.gradient_accumulation_steps', None)} with train.micro_batch_tokens={8 * FEW_TOKENS}"
        )
    return Finding(seen, remedy, counts[0][0], counts[-1][0])


def scorers_fail(history: History, facts: Facts) -> Finding | None:
    """Scorers fail on responses again and again."""
    # Counted over the whole run; a kind that has not occurred yet has no count.
    failed = history.last(FAILED, WINDOW + 1)
    grown = [now for (_, was), (now, is_) in itertools.pairwise(failed) if is_ > was]
    if len(grown) < IN_STEPS:
        return None
    count = failed[-1][1] - failed[0][1]
    responses = (len(failed) - 1) * groups_of(facts) * int(facts.get("env.repeats") or 1)
    if count < FAILING * responses:
        return None
    seen = f"scorers failed on {count:.0f} of about {responses} responses in {len(failed) - 1} steps"
    kinds = [
        name.removeprefix("failed/") for name in history.row if name.startswith("failed/") and name != "failed/groups"
    ]
    remedy = (
        "env.score_timeout_s" + _now(facts, "env.score_timeout_s") if "timeout" in kinds else "env.reward, env.rewards"
    )
    return Finding(
        f"{seen} ({', '.join(kinds)})", f"{remedy}: the first failure of each kind was told", grown[0], grown[-1]
    )


def memory_full(history: History, facts: Facts) -> Finding | None:
    """The peak of the memory is near what there is."""
    peaks, limits = history.last("memory/peak_gib", EARLY), history.values("memory/limit_gib", EARLY)
    if len(peaks) < EARLY or len(limits) < EARLY:
        return None
    if min(peak / limit for (_, peak), limit in zip(peaks, limits, strict=True)) < FULL:
        return None
    seen = f"{mean([peak for _, peak in peaks]):.1f} of {limits[-1]:.1f} GiB are taken at the peak of a step"
    remedies = [times(facts, "train.micro_batch_tokens", 0.5)]
    if facts.get("train_model.gradient_checkpointing") is False:
        remedies.append(change(facts, "train_model.gradient_checkpointing", True))
    if "loss/sft" not in history.row:  # SFT has no engine
        remedies.append(times(facts, "inference_model.gpu_memory_utilization", 0.8))
    return Finding(seen, ", or ".join(remedies), peaks[0][0], peaks[-1][0])


def _parts(history: History, phase: str) -> list[tuple[int, float]]:
    """The part of the time of each of the last steps that a phase took."""
    totals = dict(history.last(TIME))
    return [(step, value / totals[step]) for step, value in history.last(f"time/{phase}_s") if totals.get(step)]


def _now(facts: Facts, name: str) -> str:
    from_config = change(facts, name, "higher")
    return from_config[from_config.find(" (now") :] if " (now" in from_config else ""
