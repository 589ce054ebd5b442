"""GRPOLoss against TRL 1.16 and verl 0.9.1: same loss, same gradient, on padded peers' and our own ragged layout.

`python tests/test_parity.py` records the peers' answers to one batch in tests/data/parity.json, so that the comparison
runs where they are not installed. Letters: B answers, T length of the longest, N tokens of all answers.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from grpo_rl.advantages import group_advantages
from grpo_rl.losses.aggregate import token_weights
from grpo_rl.losses.grpo import GRPOLoss

RECORDED = Path(__file__).parent / "data" / "parity.json"
AGGREGATES = ("sequence_mean", "token_mean")
SETTINGS = [
    pytest.param(dict(clip_low=low, clip_high=high, kl_coef=kl, aggregate=aggregate), id=f"{aggregate}-{high}-kl{kl}")
    for aggregate in AGGREGATES
    for low, high in ((0.2, 0.2), (0.1, 0.28))
    for kl in (0.0, 0.04)
]


@dataclass(frozen=True)
class Batch:
    """Ragged answers, flat over N tokens, with one advantage an answer."""

    lengths: torch.Tensor
    trainable: torch.Tensor
    advantages: torch.Tensor
    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    ref_log_prob: torch.Tensor
    entropy: torch.Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in values.items()})

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] -> [B, T], padded with zeros on the right; differentiable."""
        return torch.nn.utils.rnn.pad_sequence(flat.split(self.lengths.tolist()), batch_first=True)


def random_batch(seed: int, answers: int = 8, longest: int = 12) -> Batch:
    """Answers of 0 to ``longest`` tokens, at least one of a single token, some tokens not trained, in fp64.

    Differences of log-probabilities stay within one nat: many ratios are clipped, but verl's extras (a second clip of
    bad answers' ratios at 3, a clamp of k3 at 10) stay out of reach.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (answers,), generator=g)
    lengths[:2] = torch.tensor([1, longest])
    n = int(lengths.sum())
    noise = (0.4 * torch.randn(2, n, generator=g, dtype=torch.float64)).clamp(-1, 1)
    old = -4 * torch.rand(n, generator=g, dtype=torch.float64)
    return Batch(
        lengths=lengths,
        trainable=torch.rand(n, generator=g) > 0.1,
        advantages=torch.randn(answers, generator=g, dtype=torch.float64),
        log_prob=old + noise[0],
        old_log_prob=old,
        ref_log_prob=old + noise[0] - noise[1],
        entropy=torch.rand(n, generator=g, dtype=torch.float64),
    )


def ours(batch: Batch, clip_low, clip_high, kl_coef, aggregate, entropy_coef=0.0, edges=None):
    """Loss, gradient by log-probability [N] and metric sums, over micro-batches cut between answers at ``edges``."""
    loss_module = GRPOLoss(clip_low, clip_high, kl_coef, entropy_coef)
    log_prob = batch.log_prob.clone().requires_grad_()
    starts = [0, *batch.lengths.cumsum(0).tolist()]
    edges = [0, len(batch.lengths)] if edges is None else edges
    total, sums = 0.0, defaultdict(float)
    for first, last in zip(edges, edges[1:], strict=False):
        tokens = slice(starts[first], starts[last])
        lengths = batch.lengths[first:last]
        entries = {name: getattr(batch, name)[tokens] for name in ("old_log_prob", "entropy", "trainable")}
        if kl_coef:
            entries["ref_log_prob"] = batch.ref_log_prob[tokens]
        entries["log_prob"] = log_prob[tokens]
        entries["advantage"] = batch.advantages[first:last].repeat_interleave(lengths)
        entries["weight"] = token_weights(
            lengths, batch.trainable[tokens], aggregate, len(batch.lengths), int(batch.trainable.sum()), log_prob.dtype
        )
        out = loss_module(TensorDict(entries, batch_size=[starts[last] - starts[first]]))
        loss = out["loss_objective"] + out["loss_kl"] + out["loss_entropy"]
        loss.backward()
        total += loss.item()
        for name in out.keys():
            sums[name] += out[name].item()
    return total, log_prob.grad, sums


def trl(batch: Batch, clip_low, clip_high, kl_coef, aggregate):
    """The same by ``GRPOTrainer._compute_loss``, and its metrics. Its "bnpo" is the mean over the batch's tokens."""
    GRPOTrainer = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError).GRPOTrainer
    log_prob = batch.log_prob.clone().requires_grad_()
    ids = torch.zeros(len(batch.lengths), int(batch.lengths.max()), dtype=torch.long)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.padded(log_prob), batch.padded(batch.entropy), None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type={"sequence_mean": "grpo", "token_mean": "bnpo"}[aggregate],
        importance_sampling_level="token",
        beta=kl_coef,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = GRPOTrainer._compute_loss(
        trainer,
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": batch.padded(torch.ones_like(batch.trainable, dtype=torch.long)),
            "tool_mask": batch.padded(batch.trainable.long()),
            "advantages": batch.advantages,
            "old_per_token_logps": batch.padded(batch.old_log_prob),
            "ref_per_token_logps": batch.padded(batch.ref_log_prob),
        },
    )
    loss.backward()
    return loss.item(), log_prob.grad, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def verl(batch: Batch, clip_low, clip_high, kl_coef, aggregate, entropy_coef=0.0):
    """The same by verl's policy loss, put together as its actor does: surrogate - entropy bonus + KL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
        from verl.workers.config import ActorConfig
    mode = {"sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean"}[aggregate]
    counts = {"dp_size": 1, "global_batch_size": len(batch.lengths), "batch_num_tokens": int(batch.trainable.sum())}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        global_batch_info=counts,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
    )
    flat = batch.log_prob.clone().requires_grad_()
    log_prob, mask = batch.padded(flat), batch.padded(batch.trainable.to(flat.dtype))
    advantages = batch.advantages[:, None].expand_as(mask)
    loss, _ = core.compute_policy_loss_vanilla(
        batch.padded(batch.old_log_prob), log_prob, advantages, mask, mode, config
    )
    kl = core.kl_penalty(log_prob, batch.padded(batch.ref_log_prob), "low_var_kl")
    loss = loss + kl_coef * core.agg_loss(kl, mask, mode, **counts)
    loss = loss - entropy_coef * core.agg_loss(batch.padded(batch.entropy), mask, mode, **counts)
    loss.backward()
    return loss.item(), flat.grad


def assert_same(result, expected, tolerance: float) -> None:
    """Loss to ``tolerance``, gradient to ``tolerance`` of its largest entry."""
    (loss, gradient), (expected_loss, expected_gradient) = result[:2], expected[:2]
    assert loss == pytest.approx(expected_loss, abs=tolerance)
    largest = float(expected_gradient.abs().max())
    torch.testing.assert_close(gradient, expected_gradient.to(gradient), rtol=0, atol=tolerance * largest)


def tolerance_of(dtype: torch.dtype, peer: str, aggregate: str) -> float:
    if dtype == torch.float32:
        return 1e-6
    # verl adds 1e-8 to each answer's number of tokens before it divides by it.
    return 2e-8 if peer == "verl" and aggregate == "sequence_mean" else 1e-10


def test_loss_and_gradient_match_the_table_worked_out_by_hand():
    # Clips 0.2 and 0.2, beta 0.1. The first answer has two tokens and A = 1, the second one token and A = -2.
    #   token  ratio  A    surrogate                    by log pi  ref/pi  k3                    by log pi (1 - ref/pi)
    #   1      1.5    1    -min(1.5, 1.2)      = -1.2    0          1       0                     0
    #   2      0.5    1    -min(0.5, 0.8)      = -0.5   -0.5        2       2 - ln 2 - 1          -1
    #   3      0.9   -2    -min(-1.8, -1.8)    =  1.8    1.8        0.5     0.5 + ln 2 - 1         0.5
    # Mean over answers: weights 1/4, 1/4, 1/2.
    #   loss      = (-1.2 - 0.5)/4 + 1.8/2 + 0.1 * ((1 - ln 2)/4 + (ln 2 - 0.5)/2) = 0.475 + 0.1 * ln 2 / 4
    #   gradient  = 0, (-0.5 - 0.1)/4, (1.8 + 0.05)/2
    # Mean over tokens: weights 1/3 each.
    #   loss      = (-1.2 - 0.5 + 1.8)/3 + 0.1 * (0.5 / 3)
    #   gradient  = 0, -0.6/3, 1.85/3
    ratio, ref_ratio = (torch.tensor(x, dtype=torch.float64) for x in ([1.5, 0.5, 0.9], [1.0, 2.0, 0.5]))
    old = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    batch = Batch(
        lengths=torch.tensor([2, 1]),
        trainable=torch.ones(3, dtype=torch.bool),
        advantages=torch.tensor([1.0, -2.0], dtype=torch.float64),
        log_prob=old + ratio.log(),
        old_log_prob=old,
        ref_log_prob=old + ratio.log() + ref_ratio.log(),
        entropy=torch.zeros(3, dtype=torch.float64),
    )
    clips = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1}
    by_answers = (0.475 + 0.1 * math.log(2) / 4, torch.tensor([0.0, -0.6 / 4, 1.85 / 2], dtype=torch.float64))
    by_tokens = (0.1 / 3 + 0.05 / 3, torch.tensor([0.0, -0.6 / 3, 1.85 / 3], dtype=torch.float64))
    assert_same(ours(batch, **clips, aggregate="sequence_mean"), by_answers, 1e-12)
    assert_same(ours(batch, **clips, aggregate="token_mean"), by_tokens, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_and_gradient_equal_the_recorded_ones(settings, dtype):
    recorded = json.loads(RECORDED.read_text())
    # Through NumPy, because torch would round the numbers to fp32 first.
    batch = Batch(**{name: torch.from_numpy(np.array(x)) for name, x in recorded["batch"].items()}).to(dtype)
    answers = [entry for entry in recorded["answers"] if entry["settings"] == settings]
    assert {entry["peer"] for entry in answers} == {"trl", "verl"}
    for entry in answers:
        expected = entry["loss"], torch.tensor(entry["gradient"], dtype=torch.float64)
        assert_same(ours(batch, **settings), expected, tolerance_of(dtype, entry["peer"], settings["aggregate"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("peer", [trl, verl])
def test_loss_and_gradient_equal_the_peers_on_random_ragged_batches(peer, settings, dtype):
    for seed in range(5):
        batch = random_batch(seed).to(dtype)
        expected = peer(batch, **settings)
        tolerance = tolerance_of(dtype, peer.__name__, settings["aggregate"])
        assert_same(ours(batch, **settings), expected, tolerance)
        # The peer sees the whole step at once; we may cut it anywhere.
        assert_same(ours(batch, **settings, edges=[0, 1, 5, len(batch.lengths)]), expected, tolerance)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_entropy_bonus_equals_verls(aggregate):
    settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "aggregate": aggregate, "entropy_coef": 0.3}
    batch = random_batch(0)
    assert_same(ours(batch, **settings), verl(batch, **settings), tolerance_of(torch.float64, "verl", aggregate))


def test_clip_fractions_kl_and_entropy_equal_trls_metrics():
    for seed in range(5):
        settings = {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.1, "aggregate": "sequence_mean"}
        batch = random_batch(seed)
        _, _, sums = ours(batch, **settings, edges=[0, 3, len(batch.lengths)])
        _, _, metrics = trl(batch, **settings)
        assert sums["tokens"] == int(batch.trainable.sum())
        for name, theirs in {
            "clip_low": "clip_ratio/low_mean",
            "clip_high": "clip_ratio/high_mean",
            "kl_ref": "kl",
            "entropy": "entropy",
        }.items():
            # TRL counts in fp32.
            assert sums[name] / sums["tokens"] == pytest.approx(metrics[theirs], rel=1e-6), name


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_z_scores_equal_trls_and_verls(group_size):
    nanstd = pytest.importorskip("trl.trainer.utils", exc_type=ImportError).nanstd
    core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    rewards = torch.randint(0, 7, (5, group_size), generator=torch.Generator().manual_seed(group_size)).double() / 2
    rewards[0] = 0.5
    got = torch.stack([group_advantages(group) for group in rewards])
    # GRPOTrainer._generate_and_score_completions, scale_rewards="group"; its Bessel correction is always fp32.
    trls = (rewards - rewards.nanmean(1, keepdim=True)) / (nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    torch.testing.assert_close(got, trls, rtol=1e-7, atol=0)
    assert_verls(core.compute_grpo_outcome_advantage, rewards, got, epsilon=1e-4)


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("no_std", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("leave_one_out", "compute_rloo_outcome_advantage", {}),
    ],
)
def test_other_advantages_equal_verls(kind, name, settings):
    core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    rewards = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(0)).double() / 2
    got = torch.stack([group_advantages(group, kind) for group in rewards])
    assert_verls(getattr(core, name), rewards, got, **settings)


def assert_verls(function, rewards, expected, **settings) -> None:
    """verl takes the reward of each answer on one of its tokens, and returns the advantage on every token."""
    groups, size = rewards.shape
    token_rewards = torch.stack([torch.zeros(groups * size).double(), rewards.flatten()], 1)
    index = np.arange(groups).repeat(size)
    advantages, _ = function(token_rewards, torch.ones_like(token_rewards), index=index, **settings)
    torch.testing.assert_close(advantages, expected.flatten()[:, None].expand(-1, 2), rtol=0, atol=1e-10)


def record() -> None:
    """Writes the peers' answers to one small batch, in fp64."""
    batch = random_batch(seed=2020, answers=5, longest=6)
    answers = []
    for parameters in SETTINGS:
        settings = parameters.values[0]
        for peer in (trl, verl):
            loss, gradient = peer(batch, **settings)[:2]
            entry = {"peer": peer.__name__, "settings": settings, "loss": loss, "gradient": gradient.tolist()}
            answers.append(entry)
    about = "TRL 1.16.0 and verl 0.9.1 on one batch, in fp64; written by `python tests/test_parity.py`"
    columns = {f.name: getattr(batch, f.name).tolist() for f in fields(batch)}
    lines = ",\n".join(json.dumps(entry) for entry in answers)
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(
        f'{{"about": {json.dumps(about)},\n"batch": {json.dumps(columns)},\n"answers": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    record()
