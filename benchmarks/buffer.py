"""Compares the speed of the buffer with TorchRL's on the same ragged responses: `python benchmarks/buffer.py`.

One pass fills an empty buffer with 4,096 responses (512 groups of 8) and samples 256 of them once. Lengths are
log-normal with a median of 100 tokens and a 99th percentile of 8 times that; prompts have 100 tokens.

- ours: `GroupBuffer.extend` takes 512 groups without advantages and computes them; `sample` gives 32 groups, that is
  256 responses, with ids, log-probabilities, rewards and advantages.
- TorchRL: `ReplayBuffer(storage=LazyStackStorage(4096))` takes 4,096 ragged TensorDicts, and `sample` gives 256 of
  them, with the same. It is spared everything else: the TensorDicts are built beforehand and have their advantages
  already. Handing them over as a list or as a lazy stack, and drawing with or without replacement, are all arms; the
  headline is over the fastest.

Neither side copies tokens: both hold references, and hand them out. Ours stores 512 items where TorchRL stores 4,096,
and gives 32 where it gives 256: that is most of the ratio.

TorchRL's own way to advantages, `MCAdvantage` as the buffer's transform, is one more arm, not in the headline: the only
one that starts from rewards, as ours does.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import harness
import torch
from lengths import dealt_lengths

NAME = "buffer"
OURS = "grpo_rl"
MC_ADVANTAGE = "torchrl_mc_advantage"
BAR = 10.0


@dataclass(frozen=True)
class Work:
    """The work of one pass."""

    groups: int = 512
    sampled_groups: int = 32
    repeats: int = 8
    prompt: int = 100
    median: int = 100
    p99_over_median: float = 8.0
    passes: int = 20
    """Passes in a step; the step reports their median."""

    @property
    def responses(self) -> int:
        return self.groups * self.repeats

    @property
    def sampled(self) -> int:
        return self.sampled_groups * self.repeats


def make_groups(work: Work) -> list:
    """Groups of random ids, the same in every arm."""
    from grpo_rl.testing import random_group

    lengths = dealt_lengths(work.groups, work.repeats, work.median, work.p99_over_median)
    return [random_group(work.prompt, row, vocab=49152, group_id=i, seed=i) for i, row in enumerate(lengths)]


def our_arm(steps: harness.Steps, work: Work) -> None:
    """Advantages are computed in each pass."""
    from grpo_rl.data.advantages import AdvantageEstimator
    from grpo_rl.data.buffer import GroupBuffer

    groups = make_groups(work)
    buffer, compute_advantages = GroupBuffer(work.groups, work.sampled_groups), AdvantageEstimator()

    def check(sample: list) -> int:
        assert all(len(g.response_ids) == len(g.log_probs) and len(g.advantages) == len(g.rewards) for g in sample)
        return sum(group.size for group in sample)

    _serve(steps, work, buffer, lambda: compute_advantages(groups), check)


def torchrl_arm(steps: harness.Steps, work: Work, as_stack: bool, replacement: bool) -> None:
    """TensorDicts with their advantages, built once."""
    from tensordict import lazy_stack
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

    from grpo_rl.losses.advantage import group_advantages

    groups = [group.with_advantages(group_advantages(group.rewards)) for group in make_groups(work)]
    rows = [row for group in groups for row in group.to_tensordict().unbind(0)]
    data = lazy_stack(rows) if as_stack else rows
    buffer = ReplayBuffer(
        storage=LazyStackStorage(work.responses),
        sampler=None if replacement else SamplerWithoutReplacement(),
        batch_size=work.sampled,
    )
    _serve(steps, work, buffer, lambda: data, _check_tensordict)


def mc_advantage_arm(steps: harness.Steps, work: Work) -> None:
    """TensorDicts without advantages, which TorchRL's transform computes as they come in."""
    from tensordict import lazy_stack
    from torchrl.data import LazyStackStorage, ReplayBuffer
    from torchrl.objectives.llm import MCAdvantage

    from grpo_rl.data import keys

    rows = []
    for group in make_groups(work):
        for row in group.to_tensordict().unbind(0):
            row[keys.GROUP_ID] = row[keys.GROUP_ID].reshape(1)  # it reads the id of a trajectory's every step
            row["next", "done"] = torch.ones(1, 1, dtype=torch.bool)
            rows.append(row)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(work.responses),
        transform=MCAdvantage(grpo_size=work.repeats, prompt_key=keys.GROUP_ID, trajectory_return="sum"),
        batch_size=work.sampled,
    )
    # One pass takes seconds. The transform writes into what it is given, so each pass gets rows of its own.
    work = replace(work, passes=1)
    _serve(steps, work, buffer, lambda: lazy_stack([row.copy() for row in rows]), _check_tensordict)


def _check_tensordict(sample) -> int:
    from grpo_rl.data import keys

    for row in sample.unbind(0):
        tokens = len(row[keys.TOKENS_FULL])
        assert len(row[keys.LOG_PROBS_FULL]) == tokens and row[keys.REWARD].numel() == 1
        assert row[keys.ADVANTAGE].numel() in (1, tokens)
    return len(sample)


def _serve(steps: harness.Steps, work: Work, buffer, data: Callable[[], object], check: Callable[..., int]) -> None:
    while steps.wait():
        passes = []
        for _ in range(work.passes):
            buffer.empty()
            batch = data()
            start = time.perf_counter()
            buffer.extend(batch)
            extended = time.perf_counter()
            sample = buffer.sample()
            end = time.perf_counter()
            assert check(sample) == work.sampled, "not the same work"
            passes.append((extended - start, end - extended))
        extend_us, sample_us = (1e6 * statistics.median(phase) for phase in zip(*passes, strict=True))
        steps.done(extend_us=extend_us, sample_us=sample_us, pass_us=extend_us + sample_us)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--groups", type=harness.at_least_one, default=Work.groups, help="groups that fill the buffer")
    args = parser.parse_args()
    load = harness.require_quiet(args.force)
    work = Work(args.groups, min(args.groups, Work.sampled_groups))
    functions = {OURS: (our_arm,)}
    for as_stack, replacement in itertools.product((True, False), repeat=2):
        name = f"torchrl_{'stack' if as_stack else 'list'}{'_replacement' * replacement}"
        functions[name] = (torchrl_arm, as_stack, replacement)
    peers = [name for name in functions if name != OURS]
    functions[MC_ADVANTAGE] = (mc_advantage_arm,)

    with contextlib.ExitStack() as stack:
        arms = {
            name: stack.enter_context(contextlib.closing(harness.Arm(name, function, work, *settings)))
            for name, (function, *settings) in functions.items()
        }
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps)

    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    passes_us = {name: arm["median"]["pass_us"] for name, arm in summary.items()}
    ratios = {name: passes_us[name] / passes_us[OURS] for name in (*peers, MC_ADVANTAGE)}
    for name, ratio in ratios.items():
        print(f"{name}: {passes_us[name] / 1000:.2f} ms, {ratio:.1f} times ours ({passes_us[OURS] / 1000:.2f} ms)")
    machine = harness.machine()
    fastest = min(peers, key=ratios.__getitem__)
    result = {
        "shows": f"Filling an empty buffer with {work.responses} ragged responses and sampling {work.sampled} of them. "
        f"Ours stores {work.groups} groups of {work.repeats} where TorchRL stores {work.responses} items: that is most "
        "of the ratio. No tokens are copied on either side.",
        "peer": f"{fastest}, torchrl {machine['packages']['torchrl']}",
        "bars": [harness.bar("times faster than TorchRL's", ratios[fastest], at_least=BAR)],
        "ratios": ratios,
        "arms": summary,
        "work": asdict(work),
        "code": harness.code("grpo_rl/data"),
        "machine": machine,
        **load,
    }
    harness.finish(NAME, ratios[fastest], result, args.out)


if __name__ == "__main__":
    main()
