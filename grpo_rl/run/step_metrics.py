"""The numbers of a training step."""

from collections.abc import Sequence

import torch

from grpo_rl.data.batching import groups_to_score
from grpo_rl.data.group import Group
from grpo_rl.diagnosis.mismatch import Mismatch
from grpo_rl.monitor.metrics import memory_metrics, reward_metrics, task_metrics
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.perf.roofline import StepRoofline
from grpo_rl.policies.routing import router_metrics, router_record
from grpo_rl.run.parts import Parts


def step_metrics(
    mismatch: Mismatch,
    roofline: StepRoofline | None,
    resamples: bool,
    parts: Parts,
    groups: Sequence[Group],
    record: StepRecord,
) -> dict[str, float]:
    """Numbers of a step, by name, from the run's parts, the step's groups with advantages, and its record.

    Args:
        roofline: the time of the step at this machine's best; None if several processes train.
        resamples: whether dynamic sampling drops groups, so that the mean reward of all sampled groups is logged too.
    """
    step_s, sampled = record.elapsed_s, parts.collector.sampled
    # The push that ended the step has already raised the version.
    sampled_under = parts.weights.version - 1
    metrics = (
        reward_metrics(groups, sampled_under)
        | record.metrics(sum(int(group.trainable.sum()) for group in sampled), step_s)
        | {"policy_version": sampled_under, "optimizer/skipped_steps": parts.optimizer.bad_steps}
    )
    metrics |= memory_metrics(getattr(parts.engine, "held_gib", 0.0))
    metrics |= getattr(parts.engine, "metrics", dict)()  # other ranks have no engine
    batching = parts.within_memory.batching
    scored = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
    metrics["train/skipped_groups"] = len(groups) - len(scored)
    # Counted over the whole run, held-out responses included: failures are too rare for counts per step.
    failed, _ = parts.env.guard.failures()
    metrics |= {f"failed/{kind}": count for kind, count in failed.items()}
    metrics |= parts.collector.metrics() | parts.env.metrics()
    by_task = parts.env.by_task([parts.env.task.rows[group.row] for group in groups])
    metrics |= task_metrics({name: [groups[i] for i in own] for name, own in by_task.items()})
    if resamples:
        metrics["reward/sampled_mean"] = float(torch.cat([group.rewards for group in sampled]).mean())
    if routers := router_record(parts.policy.model):
        taken, peers = routers.take(), parts.policy.peers
        metrics |= router_metrics(peers.gather(taken) if peers else [taken])
    metrics |= mismatch.metrics()
    if roofline:
        metrics |= roofline.metrics(groups, record.phases_s, step_s)
    return metrics
