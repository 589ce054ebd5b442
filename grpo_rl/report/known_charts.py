"""The charts of the metrics that a run is known to log: what is drawn together, in reading order, and what it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_rl.monitor.metrics import STEP_PHASES, is_reward_statistic

CLOCKS = frozenset({"time", "time/at_s"})
"""Metrics that place a line in time and say nothing of the run."""
LOSS = tuple(f"loss/{name}" for name in ("total", "objective", "kl", "entropy"))
EVALUATION = frozenset(
    {
        "loss",
        "reward",
        "sampled_reward",
        "standard_error",
        "failed",
        "mean_length",
        "truncated_fraction",
        "accuracy",
        "tied",
    }
)
"""Names under ``eval/`` beside the parts of the held-out reward, pass@k and maj@k."""


@dataclass(frozen=True)
class Chart:
    """A chart: metrics that are drawn together, and what they show.

    Args:
        series: metric name -> label. Series that no run logged are left out; the others keep their colours.
        floor: the axis reaches down to at least here.
        markers: each point is a mark, for the few points of an evaluation.
    """

    group: str
    title: str
    series: Mapping[str, str]
    help: str = ""
    floor: float | None = None
    stacked: bool = False
    percent: bool = False
    markers: bool = False


def known_charts(names: Sequence[str]) -> Iterator[Chart]:
    """The charts that metrics of these names may belong to."""
    yield from _imitation()
    yield from _reward(names)
    yield from _held_out(names)
    yield from _responses(names)
    yield from _policy()
    yield from _sampler_and_trainer(names)
    yield from _progress(names)
    yield from _machine(names)


def _below(names: Sequence[str], prefix: str) -> dict[str, str]:
    """The metrics that begin with this, and the rest of their names."""
    return {name: name[len(prefix) :] for name in names if name.startswith(prefix)}


def _imitation() -> Iterator[Chart]:
    """The charts that SFT alone has."""
    group = "Demonstrations"
    yield Chart(
        group, "Loss of demonstrations", {"loss/sft": "training", "eval/loss": "held-out"},
        "The mean of -log pi over their tokens, in nats. Where the held-out one rises, the data is learnt by heart.",
        markers=True,
    )  # fmt: skip
    yield Chart(group, "Passes over the data", {"train/epoch": "epochs"}, "Since the run's start.", 0)
    yield Chart(group, "Tokens of demonstrations", {"train/tokens": "tokens"}, "Those that a step imitates.", 0)


def _reward(names: Sequence[str]) -> Iterator[Chart]:
    group = "Reward"
    rewards = {"reward/mean": "mean reward", "reward/sampled_mean": "with the groups that were filtered out"}
    yield Chart(group, "Reward", rewards, "The mean over the responses of a training step.")
    held_out = {"eval/reward": "held-out", "eval/sampled_reward": "of sampled responses"}
    yield Chart(
        group, "Held-out reward", held_out,
        "The mean reward of problems that are never trained on. Responses are greedy where nothing else is said.",
        markers=True,
    )  # fmt: skip
    yield from _tasks(names)
    parts = {name: part for name, part in _below(names, "reward/").items() if not is_reward_statistic(part)}
    parts.pop("reward/sampled_mean", None)
    yield Chart(group, "Reward parts", parts, "What the reward is made of, as means over responses.")
    spread = {f"reward_distribution/total/p{p}": f"{p} % earn less" for p in (90, 50, 10)}
    yield Chart(
        group, "Spread of the reward", spread | {"reward/std": "standard deviation"},
        "How the responses of a step differ in their reward.",
    )  # fmt: skip
    for part in dict.fromkeys(rest.rpartition("/")[0] for rest in _below(names, "reward_distribution/").values()):
        if part and part != "total":
            series = {f"reward_distribution/{part}/p{p}": f"{p} % earn less" for p in (90, 50, 10)}
            yield Chart(group, f"Spread of {part}", series, "How the responses of a step differ in this part.")
    yield Chart(
        group, "Measured beside the reward", _below(names, "measure/"),
        "What the task logs and does not pay for, as means over responses.",
    )  # fmt: skip
    yield Chart(
        group, "Zero-variance groups", {"reward/zero_std_fraction": "of all groups"},
        "All responses of such a group earn the same; the policy learns nothing from it.", 0, percent=True,
    )  # fmt: skip


def _tasks(names: Sequence[str]) -> Iterator[Chart]:
    """The charts of a mixture's tasks, a line a task."""
    group, tasks = "Tasks", _below(names, "mixture/").values()
    for metric, title, help, percent in (
        ("reward/{}/mean", "Reward by task", "The mean over the responses to a task's prompts.", False),
        ("reward/{}/zero_std_fraction", "Zero-variance groups by task", "They teach nothing.", True),
        ("response/{}/mean_length", "Response length by task", "The tokens of a response.", False),
        ("response/{}/truncated_fraction", "Responses cut off, by task", "They reached the length limit.", True),
        ("failed/{}", "Failures by task", "Responses without a reward since the start of the run.", False),
        ("mixture/{}", "Groups by task", "Their numbers in a step, drawn by the weights of env.mixture.", False),
    ):
        series = {metric.format(task): task for task in tasks}
        yield Chart(group, title, series, help, None if metric == "reward/{}/mean" else 0, percent=percent)


def _held_out(names: Sequence[str]) -> Iterator[Chart]:
    group = "Held-out"
    found = _below(names, "eval/")
    tasks = [rest.removesuffix("/reward") for rest in found.values() if rest.endswith("/reward")]
    tasks = [task for task in tasks if task != "measure"]
    of_tasks = {f"eval/{task}/{rest}" for task in tasks for rest in _below(names, f"eval/{task}/").values()}
    own = {name: rest for name, rest in found.items() if name not in of_tasks}
    yield Chart(
        group, "Held-out problems solved", _solved(own),
        "accuracy: the greedy response is right. pass@k: one of k sampled is. maj@k: the answer of most of them is.",
        0, percent=True, markers=True,
    )  # fmt: skip
    measures = _below(list(own), "eval/measure/")
    parts = {
        name: rest for name, rest in own.items() if not {name} & {*measures, *_solved(own)} and rest not in EVALUATION
    }
    yield Chart(group, "Held-out parts", parts, "What the held-out reward is made of.", markers=True)
    yield Chart(
        group, "Measured beside the held-out reward", measures, "What the task logs and does not pay for.", markers=True
    )
    for task in tasks:
        inner = _below(names, f"eval/{task}/")
        series = {name: rest for name, rest in inner.items() if rest in ("reward", "sampled_reward")} | _solved(inner)
        series |= {name: rest for name, rest in inner.items() if rest not in EVALUATION}
        yield Chart(
            group, f"Held-out: {task}", series, "Reward and scores of one of several tasks.",
            markers=True,
        )  # fmt: skip
    prefixes = {"eval/": "training task"} | {f"eval/{task}/": task for task in tasks}
    for metric, title, help, percent in (
        ("standard_error", "Standard error of the held-out reward", "How far chance moves the mean reward.", False),
        ("mean_length", "Held-out response length", "The mean number of tokens of a greedy response.", False),
        ("truncated_fraction", "Held-out responses cut off", "Greedy responses that reached the length limit.", True),
        ("tied", "Tied majorities", "Problems of which several answers are the most frequent one.", True),
        ("failed", "Held-out responses without a reward", "Responses whose scorer failed.", False),
    ):
        series = {f"{prefix}{metric}": label for prefix, label in prefixes.items()}
        yield Chart(group, title, series, help, 0, percent=percent, markers=True)


def _solved(found: Mapping[str, str]) -> dict[str, str]:
    return {name: rest for name, rest in found.items() if rest == "accuracy" or rest.startswith(("pass@", "maj@"))}


def _responses(names: Sequence[str]) -> Iterator[Chart]:
    group = "Responses"
    lengths = {"response/mean_length": "mean", "response/max_length": "longest"}
    yield Chart(group, "Response length", lengths, "The tokens of a response, without the prompt.", 0)
    odd = {"response/truncated_fraction": "truncated", "response/repetition": "repeated 4-grams"}
    yield Chart(
        group, "Cut-off and repetitive responses", odd,
        "truncated: responses that reached the length limit. repeated: 4-grams that the response had before.", 0,
        percent=True,
    )  # fmt: skip
    yield Chart(
        group, "Length and reward", {"response/length_correlation": "correlation"},
        "Above zero the longer responses of a group earn more than the shorter ones.",
    )  # fmt: skip
    yield Chart(
        group, "Failed scorers and groups",
        {name: kind for name, kind in _below(names, "failed/").items() if f"mixture/{kind}" not in names},
        "Responses whose scorer failed, by what went wrong, and groups that were lost with them.", 0,
    )  # fmt: skip


def _policy() -> Iterator[Chart]:
    group = "Policy"
    yield Chart(
        group, "Entropy", {"entropy": "entropy"},
        "Nats a token: how open the policy's choice is. Near zero it has stopped exploring.", 0,
    )  # fmt: skip
    divergences = {"kl/ref": "to the reference", "kl/sampler": "to the sampler"}
    yield Chart(group, "KL divergence", divergences, "Nats a token: how far the policy is from each.", 0)
    yield Chart(group, "Weight of the KL divergence", {"kl/coef": "kl_coef"}, "Its factor in loss or reward.", 0)
    clipped = {"clip/low_fraction": "below", "clip/high_fraction": "above", "clip/dual_fraction": "dual clip"}
    yield Chart(
        group, "Clipped tokens", clipped,
        "Tokens whose ratio left the clip range; there are few where a batch is trained on once.", 0, percent=True,
    )  # fmt: skip
    yield Chart(
        group, "Advantages", {"advantage/mean": "mean", "advantage/std": "standard deviation"},
        "How much better than its group a response is counted, over the responses of a step.",
    )  # fmt: skip
    yield Chart(
        group, "Gradient norm", {"grad_norm": "before clipping"}, "Spikes often come before a run falls apart.", 0
    )  # fmt: skip
    yield Chart(
        group, "Loss", {name: name[5:] for name in LOSS},
        "The value of a policy-gradient loss says little; its parts should stay in proportion.",
    )  # fmt: skip
    yield Chart(group, "Learning rate", {"lr": "learning rate"}, "The rate of the step, as scheduled.", 0)


def _sampler_and_trainer(names: Sequence[str]) -> Iterator[Chart]:
    group = "Sampler and trainer"
    mismatch = {"mismatch/mean": "mean", "mismatch/max": "largest"}
    yield Chart(
        group, "Sampler against trainer", mismatch,
        "The gap between their log-probabilities of a token on the same weights; small gaps are rounding.", 0,
    )  # fmt: skip
    stale = {name: f"{age} versions old" for name, age in _below(names, "mismatch/stale_").items()}
    yield Chart(
        group, "Sampler against trainer on moved weights", stale,
        "The same gap where weights moved after the token was sampled; 0: in the step's later optimizer steps.", 0,
    )  # fmt: skip
    yield Chart(
        group, "Probability that the sampler could draw from", {"mismatch/mass_kept": "kept by top-k and top-p"},
        "The trainer's probability of the tokens that the sampler's settings allow.", 0, percent=True,
    )  # fmt: skip
    effective = {"ess": "of the loss", "correction/ess": "of the correction"}
    yield Chart(
        group, "Effective sample size", effective,
        "The share of tokens that would say as much if all weighed the same; 100 %: they do.", 0, percent=True,
    )  # fmt: skip
    correction = {"correction/mean": "mean weight", "correction/bounded_fraction": "bounded, as a share"}
    yield Chart(group, "Correction of stale tokens", correction, "The weights that make up for older policies.", 0)
    versions = {"staleness/mean": "mean", "staleness/max": "largest"}
    yield Chart(
        group, "Staleness", versions, "Versions between the weights that sampled a token and those that are trained.", 0
    )
    busiest = {"router/load_max_over_mean": "worst layer"}
    yield Chart(group, "Busiest expert", busiest, "The tokens of the busiest expert over the mean of its layer.", 0)


def _progress(names: Sequence[str]) -> Iterator[Chart]:
    group = "Work"
    yield Chart(
        group, "Groups", _below(names, "groups/") | {"sample/filtered_groups": "filtered out"},
        "Groups by what became of them in the step; open: begun and not yet trained on.", 0,
    )  # fmt: skip
    updates = {"train/optimizer_steps": "optimizer steps", "train/micro_batches": "micro-batches"}
    yield Chart(group, "Updates of a step", updates, "Optimizer steps, and the micro-batches that they are made of.", 0)
    yield Chart(
        group, "Tokens of a micro-batch", {"train/micro_batch_tokens": "mean"},
        "Tokens of responses that are trained on, on average; prompts come on top.", 0,
    )  # fmt: skip
    short = {"train/out_of_memory": "training, in the step", "engine/out_of_memory": "engine, so far"}
    yield Chart(group, "Memory ran out", short, "Each time it went on with less at a time, at the same gradient.", 0)
    skipped = {"train/skipped_groups": "groups without a gradient", "optimizer/skipped_steps": "optimizer steps"}
    yield Chart(
        group, "Skipped", skipped,
        "Zero-variance groups need no forward pass; an optimizer step is skipped where its gradient is not finite.", 0,
    )  # fmt: skip
    yield Chart(group, "Responses so far", {"total/responses": "responses"}, "All that were sampled for training.", 0)
    tokens = {"total/sampled_tokens": "sampled", "total/trained_tokens": "trained on"}
    yield Chart(group, "Tokens so far", tokens, "Tokens of responses since the run's start.", 0)
    yield Chart(
        group, "Time so far", {"total/seconds": "seconds"}, "Seconds of the run, with evaluations and checkpoints.", 0
    )


def _machine(names: Sequence[str]) -> Iterator[Chart]:
    group = "Machine"
    rates = {"throughput/sample_tokens_per_s": "sampling", "throughput/train_tokens_per_s": "training"}
    ranks = {"ranks/size": "ranks", "ranks/restarts": "restarts"}
    yield Chart(group, "Ranks", ranks, "Processes that train together, and how often they were started again.", 0)
    yield Chart(group, "Throughput", rates, "Tokens of responses per second.", 0)
    # What SFT alone has comes last, and leaves the others their colours.
    phases = {f"time/{phase}_s": phase for phase in sorted(STEP_PHASES, key="read".__eq__)}
    phases |= {
        name: rest.removesuffix("_s")
        for name, rest in _below(names, "time/").items()
        if name not in CLOCKS and rest != "evaluate_s"
    }
    yield Chart(group, "Time of a step", phases, "The seconds of each phase, one above the other.", 0, stacked=True)
    yield Chart(
        group, "Time of an evaluation", {"time/evaluate_s": "evaluation"}, "Seconds, between two steps.", 0,
        markers=True,
    )  # fmt: skip
    roofline = {"limit_fraction": "whole step"} | {
        f"limit_fraction/{phase}": phase for phase in ("sample", "score", "train", "sync")
    }
    yield Chart(
        group, "Share of the machine's roofline", roofline,
        "The time that the machine would need at its measured best, over the time taken.", 0, percent=True,
    )  # fmt: skip
    memory = {name: rest.removesuffix("_gib").replace("_", " ") for name, rest in _below(names, "memory/").items()}
    limit = {"memory/limit_gib": memory.pop("memory/limit_gib", "limit")}
    yield Chart(group, "Memory", memory, "GiB of the training process, at its peak.", 0)
    yield Chart(group, "Memory that there is", limit, "GiB of the GPU, or of the machine or container without one.", 0)
