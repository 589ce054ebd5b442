"""Every preset against TRL 1.16, verl 0.9.1 and Liger 0.8.5: same loss, same gradient, same advantages.

The peers see padded batches; we score ragged groups, cut into micro-batches, by the way that training takes.
`python tests/losses/test_parity.py` records the peers' results for one batch in `data/parity.json`, so that the
comparison runs where they are not installed. Letters: B responses, T length of the longest, N tokens of all responses.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import warnings
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from grpo_rl.data.advantages import kl_penalty
from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.losses.advantage import batch_advantages, group_advantages
from grpo_rl.losses.correction import correction_weight
from grpo_rl.losses.factors import ADVANTAGE, AGGREGATE, CORRECTION
from grpo_rl.losses.grpo import LOSSES, GRPOLoss
from grpo_rl.losses.kl import kl_estimate
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches

RECORDED = Path(__file__).parent / "data" / "parity.json"
FOLDER = Path(__file__).parents[2] / "config" / "loss"
GRPO = OmegaConf.load(FOLDER / "grpo.yaml")
PRESETS = {
    path.stem: OmegaConf.to_container(OmegaConf.merge(GRPO, OmegaConf.load(path)))
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.stem != "distill"  # has no surrogate, and is in test_distill.py
}
for preset in PRESETS.values():
    preset.pop("defaults", None)
# What no preset sets, on top of GRPO or another.
VARIANTS = {
    "gspo_to_sampler": PRESETS["gspo"] | {"correction": "none"},
    "dual_clip": {"dual_clip": 3.0, "clip_high": 0.28},
    "k2": {"kl": "k2"},
    "k3+": {"kl": "k3+"},
    "k3_is": {"kl": "k3_is"},
    "top_entropy": {"top_entropy_fraction": 0.237, "aggregate": "token_mean"},
    "truncated": {"mask_truncated": True},
    "sequence_tis": {"correction": "truncate", "correction_level": "sequence"},
    "dppo_narrow": {"surrogate": "dppo_tv", "move_low": 0.05, "move_high": 0.1, "ratio_cap": 2.0},
    "dppo_by_kl": {"surrogate": "dppo_kl", "move_low": 0.05, "move_high": 0.1},
    "opsm": {"off_policy_bound": 0.1},
    "clip_cov_all": {
        "surrogate": "clip_cov",
        "clip_cov_fraction": 1.0,
        "covariance_low": 0.1,
        "covariance_high": 1.0,
    },
    "kl_cov_many": {"surrogate": "kl_cov", "kl_cov_fraction": 0.21, "kl_cov_coef": 0.5},
    "sequence_mis": {"correction": "mask", "correction_level": "sequence", "correction_low": 0.1},
}
SETTINGS = PRESETS | {name: PRESETS["grpo"] | change for name, change in VARIANTS.items()}
LONGEST = 16
"""The divisor of ``loss.aggregate=constant`` where the preset leaves it open."""
KL_COEF = 0.04
BATCHES = range(200)


@dataclass(frozen=True)
class Batch:
    """Ragged responses to prompts, flat over N tokens, with one advantage a response."""

    lengths: torch.Tensor
    sizes: torch.Tensor
    trainable: torch.Tensor
    truncated: torch.Tensor
    advantages: torch.Tensor
    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    sampler_log_prob: torch.Tensor
    ref_log_prob: torch.Tensor
    entropy: torch.Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in values.items()})

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] -> [B, T], padded with zeros on the right; differentiable."""
        return torch.nn.utils.rnn.pad_sequence(flat.split(self.lengths.tolist()), batch_first=True)

    def trained(self, settings: dict) -> torch.Tensor:
        """[N] True on tokens that count; what TRL does to its masks before the loss."""
        cut = self.truncated.repeat_interleave(self.lengths) & settings["mask_truncated"]
        return self.trainable & ~cut

    def old(self, settings: dict) -> torch.Tensor:
        """[N] what the peers' ratio is to: the trainer's log-probabilities where a weight takes care of the rest."""
        return self.sampler_log_prob if settings["correction"] == "none" else self.old_log_prob

    @functools.cached_property
    def groups(self) -> list[Group]:
        starts = [0, *self.sizes.cumsum(0).tolist()]
        tokens = [0, *self.lengths.cumsum(0)[self.sizes.cumsum(0) - 1].tolist()]
        groups = []
        for i, size in enumerate(self.sizes.tolist()):
            responses, span = slice(starts[i], starts[i + 1]), slice(tokens[i], tokens[i + 1])
            group = random_group(lengths=self.lengths[responses].tolist(), group_id=i, rewards=[0.0] * size)
            groups.append(
                replace(
                    group,
                    log_probs=self.sampler_log_prob[span],
                    trainable=self.trainable[span],
                    truncated=self.truncated[responses],
                    advantages=self.advantages[responses],
                    ref_log_probs=self.ref_log_prob[span],
                    old_log_probs=self.old_log_prob[span],
                    old_entropies=self.entropy[span],
                )
            )
        return groups


@functools.cache
def random_batch(seed: int, responses: int = 8, longest: int = 12) -> Batch:
    """Responses of 0 to ``longest`` tokens, at least one of a single token, some tokens not trained, in fp64.

    Ratios reach 20, so that every clip is met; what the reference says stays within one nat, as verl clamps k3 at 10.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (responses,), generator=g)
    lengths[:2] = torch.tensor([1, longest])
    n = int(lengths.sum())
    noise = torch.randn(4, n, generator=g, dtype=torch.float64)
    old = -4 * torch.rand(n, generator=g, dtype=torch.float64)
    log_prob = (old + (0.8 * noise[0]).clamp(-3, 3)).clamp(max=-1e-3)  # no probability is above 1
    return Batch(
        lengths=lengths,
        sizes=torch.tensor([3, 2, responses - 5]),
        trainable=torch.rand(n, generator=g) > 0.1,
        truncated=torch.rand(responses, generator=g) > 0.7,
        advantages=torch.randn(responses, generator=g, dtype=torch.float64),
        log_prob=log_prob,
        old_log_prob=old,
        sampler_log_prob=-(old + 0.4 * noise[1]).abs(),  # nor here, and no two are alike
        ref_log_prob=log_prob + (0.4 * noise[2]).clamp(-1, 1),
        # As fp32 holds them, in which TRL compares.
        entropy=torch.rand(n, generator=g).double(),
    )


class Table(TrainPolicy):
    """A policy whose log-probabilities are a parameter: its gradient is the loss's."""

    def __init__(self, batch: Batch):
        self.log_prob = batch.log_prob.clone().requires_grad_()
        sizes = [len(group.response_ids) for group in batch.groups]
        self._split = [x.split(sizes) for x in (self.log_prob, batch.entropy)]

    def score(self, groups):
        return tuple(torch.cat([x[group.group_id] for group in groups]) for x in self._split)


def ours(batch: Batch, settings: dict, kl_coef: float, entropy_coef: float = 0.0, count: int | None = 2):
    """Loss, gradient by log-probability [N] and metric sums of a step, cut into micro-batches."""
    loss = GRPOLoss(**settings, kl_coef=kl_coef, entropy_coef=entropy_coef)
    weighing = {name: settings[name] for name in ("mask_truncated", "top_entropy_fraction")}
    weighing["covariance"] = settings["covariance_low"], settings["covariance_high"]
    weighing["aggregate"] = AGGREGATE.chosen(settings, normalizer=settings["normalizer"] or LONGEST)
    policy, total, sums = Table(batch), 0.0, defaultdict(float)
    for tokens in scored_micro_batches(policy, batch.groups, MicroBatching(10**6, count, **weighing)):
        out = loss(tokens)
        value = sum(out[name] for name in LOSSES)
        value.backward()
        total += value.item()
        for name in out.keys():
            sums[name] += out[name].item()
    return total, policy.log_prob.grad, sums


@functools.cache
def our_loss(name: str, seed: int, kl_coef: float):
    return ours(random_batch(seed), SETTINGS[name], kl_coef)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trls_trainer(batch: Batch, log_prob: torch.Tensor, **settings: object) -> tuple[SimpleNamespace, dict]:
    """A stand-in for TRL's trainer in one process, and the inputs that both of its losses read."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.padded(log_prob), batch.padded(batch.entropy), None),
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1,
            pad_across_processes=lambda x, **_: x,
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **settings,
    )  # fmt: skip
    ids = torch.zeros(len(batch.lengths), int(batch.lengths.max()), dtype=torch.long)
    prompts = {"prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1])}
    return trainer, prompts | {"completion_ids": ids, "advantages": batch.advantages}


def trl(batch: Batch, settings: dict, kl_coef: float):
    """The same by ``GRPOTrainer._compute_loss``, and its metrics."""
    GRPOTrainer = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError).GRPOTrainer
    log_prob = batch.log_prob.clone().requires_grad_()
    mask = batch.padded(batch.trained(settings).long())
    cispo = settings["surrogate"] == "cispo"  # whose epsilon_high is the bound itself
    by_mean = {"sequence_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}[settings["aggregate"]]
    trainer, inputs = trls_trainer(
        batch,
        log_prob,
        args=SimpleNamespace(
            delta=settings["dual_clip"], use_bias_correction_kl=settings["kl"] == "k3_is", steps_per_generation=1,
            sapo_temperature_pos=settings["tau_pos"], sapo_temperature_neg=settings["tau_neg"],
        ),
        loss_type=by_mean if settings["surrogate"] == "clipped" else settings["surrogate"],
        importance_sampling_level=settings["ratio"],
        beta=kl_coef,
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"] + cispo,
        current_gradient_accumulation_steps=1,
        max_completion_length=settings["normalizer"] or LONGEST,
        top_entropy_quantile=settings["top_entropy_fraction"],
        off_policy_mask_threshold=settings["off_policy_bound"],
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        use_vllm=settings["correction"] != "none",
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
    )  # fmt: skip
    trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
    inputs |= {
        "completion_mask": batch.padded(torch.ones_like(batch.trainable, dtype=torch.long)),
        "tool_mask": mask,
        "old_per_token_logps": batch.padded(batch.old(settings)),
        "ref_per_token_logps": batch.padded(batch.ref_log_prob),
        "importance_sampling_ratio": weights(batch, settings),
        "num_items_in_batch": mask.sum(),
    }
    with default_dtype(batch.log_prob.dtype):  # SAPO's temperatures would be rounded to fp32
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return loss.item(), log_prob.grad, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def verl(batch: Batch, settings: dict, kl_coef: float, entropy_coef: float = 0.0):
    """The same by verl's policy losses, put together as its actor does: surrogate - entropy bonus + KL."""
    core = verl_core()
    mode = {"sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean", "constant": "seq-mean-token-sum-norm"}[
        settings["aggregate"]
    ]
    trained = batch.trained(settings)
    counts = {
        "dp_size": 1, "global_batch_size": len(batch.lengths), "batch_num_tokens": int(trained.sum()),
        "loss_scale_factor": settings["normalizer"] or LONGEST,
    }  # fmt: skip
    clips = ("clip_low", "clip_high", "dual_clip")
    if settings["surrogate"].startswith("dppo"):
        clips = ("move_low", "move_high", "ratio_cap")
    if settings["surrogate"] == "gmpo":
        clips = ("log_clip", "log_clip", "dual_clip")
    config = verl_config(*(settings[name] for name in (*clips, "tau_pos", "tau_neg", *OF_COVARIANCE)))
    config.global_batch_info.update(counts)
    flat = batch.log_prob.clone().requires_grad_()
    log_prob, old, mask = batch.padded(flat), batch.padded(batch.old(settings)), batch.padded(trained.to(flat.dtype))
    clipped = "vanilla" if settings["ratio"] == "token" else "gspo"
    names = {"clipped": clipped, "gmpo": "geo_mean"}
    correction = weights(batch, settings)
    if settings["surrogate"] in ("plain", "topr"):
        policy_loss, correction = core.compute_policy_loss_reinforce, (log_prob - old).exp().detach()
        if settings["surrogate"] == "topr":
            mean = ((log_prob - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
            tapered = torch.where(batch.advantages > 0, 1.0, mean.detach().exp().clamp(max=1))
            correction = tapered[:, None].expand_as(mask)
    else:
        policy_loss = core.get_policy_loss_fn(names.get(settings["surrogate"], settings["surrogate"]))
    loss, _ = policy_loss(
        old,
        log_prob,
        batch.advantages[:, None].expand_as(mask),
        mask,
        mode,
        config,
        rollout_is_weights=correction,
    )
    if kl_coef:
        kl = core.kl_penalty(log_prob, batch.padded(batch.ref_log_prob), settings["kl"])
        loss = loss + kl_coef * core.agg_loss(kl, mask, mode, **counts)
    loss = loss - entropy_coef * core.agg_loss(batch.padded(batch.entropy), mask, mode, **counts)
    loss.backward()
    return loss.item(), flat.grad


@functools.cache
def verl_core():
    """verl's algorithms, without the 1e-8 that they add to counts and variances before they divide by them.

    A count of nothing is divided by as 1 instead. Covariances are those of the policy that sampled, tokens that PPO
    clips are among Clip-Cov's, and the share of KL-Cov's is rounded up.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    mean = [(" + 1e-8", ".clamp(min=1)", 1)]
    fresh = [("log_prob - verl_F.masked_mean(log_prob.", "old_log_prob - verl_F.masked_mean(old_log_prob.", 1)]
    fresh += [("cov_all[clip_by_origin] = -torch.inf", "pass", 1)]
    largest = [("log_prob[all_valid]", "old_log_prob[all_valid]", 1)]
    largest += [("len(cov_lst_all) * kl_cov_ratio", "np.ceil(len(cov_lst_all) * kl_cov_ratio)", 1)]
    for module, name, changes in (
        (core, "agg_loss", mean),
        (core, "compute_policy_loss_geo_mean", [(" + 1e-8", ".clamp(min=1)", 3)]),
        (core, "compute_policy_loss_dppo_kl", [(" + 1e-8", "", 2)]),
        (core, "compute_policy_loss_clip_cov", fresh),
        (core, "compute_policy_loss_kl_cov", largest),
        (core.verl_F, "masked_mean", mean),
        (core.verl_F, "masked_whiten", [(" + 1e-8", "", 1)]),
    ):
        source = inspect.getsource(getattr(module, name))
        for old, instead, count in changes:
            assert source.count(old) == count, name
            source = source.replace(old, instead)
        exec(source, module.__dict__)
    return core


OF_COVARIANCE = {
    "clip_cov_fraction": "clip_cov_ratio", "covariance_low": "clip_cov_lb", "covariance_high": "clip_cov_ub",
    "kl_cov_fraction": "kl_cov_ratio", "kl_cov_coef": "ppo_kl_coef",
}  # fmt: skip
"""Our settings, and verl's names of them."""


@functools.cache
def verl_config(clip_low, clip_high, dual_clip, tau_pos, tau_neg, *by_covariance):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, global_batch_info={}, clip_ratio_low=clip_low,
        clip_ratio_high=clip_high, clip_ratio_c=dual_clip or 1e9, tau_pos=tau_pos, tau_neg=tau_neg,
        policy_loss=PolicyLossConfig(**dict(zip(OF_COVARIANCE.values(), by_covariance, strict=True))),
    )  # fmt: skip


def weights(batch: Batch, settings: dict):
    """[B, T] weights of sampler against trainer by verl, which TRL's and Liger's losses are given too; None without."""
    if settings["correction"] == "none":
        return None
    verl_core()
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    low, high = settings["correction_low"], settings["correction_high"]
    mask = batch.padded(batch.trained(settings).to(batch.log_prob.dtype))
    log_ratio = batch.padded(batch.old_log_prob - batch.sampler_log_prob)
    threshold = high if settings["correction"] == "truncate" else f"{low}_{high}"
    got, _ = compute_rollout_correction_weights(log_ratio, mask, settings["correction_level"], threshold)
    return got


def liger(batch: Batch, settings: dict, kl_coef: float):
    """The same by the loss inside of Liger's fused head, which is given log-probabilities."""
    module = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", exc_type=ImportError)
    flat = batch.log_prob.clone().requires_grad_()
    mask = batch.padded(batch.trained(settings).to(flat.dtype))
    cispo = settings["surrogate"] == "cispo"
    by_mean = {"sequence_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}[settings["aggregate"]]
    loss, _ = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        batch.padded(flat),
        mask,
        batch.advantages,
        mask,
        ref_per_token_logps=batch.padded(batch.ref_log_prob),
        old_per_token_logps=batch.padded(batch.old(settings)),
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"] + cispo,
        beta=kl_coef,
        loss_type=by_mean if settings["surrogate"] == "clipped" else settings["surrogate"],
        max_completion_length=settings["normalizer"] or LONGEST,
        importance_sampling_level=settings["ratio"],
        sapo_temperature_pos=settings["tau_pos"],
        sapo_temperature_neg=settings["tau_neg"],
        vllm_is_ratio=weights(batch, settings),
        delta=settings["dual_clip"],
        use_bias_correction_kl=settings["kl"] == "k3_is",
    )
    loss.backward()
    return loss.item(), flat.grad


def has(peer, settings: dict) -> bool:
    """True if a peer has these settings; their KL is left out where it has no such estimate."""
    if settings["kl_in"] == "reward" or settings["surrogate"] == "plain" or settings["advantage"] == "maxrl":
        return False  # RLOO: below; of MaxRL the advantage alone is its own: tests/data/test_advantages.py
    if settings["surrogate"] in ("dppo_tv", "dppo_kl", "gmpo", "topr", "kl_cov"):
        return peer is verl
    if settings["surrogate"] == "clip_cov":
        return peer is verl and settings["clip_cov_fraction"] == 1  # which of more candidates it draws is chance
    if settings["off_policy_bound"]:
        return peer is trl
    if peer is verl:
        # Its GSPO is GSPO-token, which is the same only while a response's tokens weigh the same.
        return settings["top_entropy_fraction"] == 1 and (
            settings["ratio"] != "sequence" or settings["correction"] == "none"
        )
    return settings["ratio"] != "sequence_token" and (peer is trl or settings["top_entropy_fraction"] == 1)


def kl_coef_of(peer, settings: dict) -> float:
    known = {verl: ("k2", "k3", "k3+"), trl: ("k3", "k3_is"), liger: ("k3", "k3_is")}[peer]
    return KL_COEF if settings["kl"] in known else 0.0


CASES = [
    pytest.param(name, peer, id=f"{name}-{peer.__name__}")
    for name, settings in SETTINGS.items()
    for peer in (trl, verl, liger)
    if has(peer, settings)
]


def assert_same(result, expected, tolerance: float) -> None:
    """Loss to ``tolerance``, gradient to ``tolerance`` of its largest entry."""
    (loss, gradient), (expected_loss, expected_gradient) = result[:2], expected[:2]
    assert loss == pytest.approx(expected_loss, abs=tolerance)
    largest = float(expected_gradient.abs().max())
    torch.testing.assert_close(gradient, expected_gradient.to(gradient), rtol=0, atol=tolerance * largest)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [BATCHES[:20], pytest.param(BATCHES, marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize(("name", "peer"), CASES)
def test_loss_and_gradient_equal_the_peers_on_random_ragged_batches(name, peer, batches):
    settings = SETTINGS[name]
    kl_coef = kl_coef_of(peer, settings)
    for seed in batches:
        assert_same(our_loss(name, seed, kl_coef), peer(random_batch(seed), settings, kl_coef), 1e-10)


def test_every_preset_has_a_peer():
    assert {case.values[0] for case in CASES} | {"rloo", "gpg", "maxrl", "clip_cov"} >= PRESETS.keys()  # see `has`


@pytest.mark.slow
def test_the_batches_meet_every_clip_and_bound():
    """A clip that no ratio meets would be compared with nothing."""
    for name, flags in {
        "grpo": ("clip_low", "clip_high"), "gspo": ("clip_low", "clip_high"), "cispo": ("clip_high",),
        "dual_clip": ("clip_dual",), "tis": ("corrected",), "icepop": ("corrected",), "sequence_mis": ("corrected",),
        "dppo": ("clip_low", "clip_high"), "dppo_narrow": ("clip_low", "clip_high"), "dppo_by_kl": ("clip_low",),
        "gmpo": ("clip_low", "clip_high"), "opsm": ("clip_off_policy",),
    }.items():  # fmt: skip
        for flag in flags:
            tokens = sum(our_loss(name, seed, KL_COEF)[2]["tokens"] for seed in BATCHES[:20])
            met = sum(our_loss(name, seed, KL_COEF)[2][flag] for seed in BATCHES[:20])
            assert 0.001 < met / tokens < 0.9, (name, flag)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("peer", ["verl", "trl"])
def test_rloos_gradient_equals_the_peers(peer):
    """TRL weighs a response by the product of its ratios, and so equals ours on fresh weights, where that is 1.

    verl takes the same weighted gradient token by token, at any ratio. Their losses have other values: in TRL an
    response counts A once, and verl's weighs log pi.
    """
    settings = PRESETS["rloo"]
    for seed in BATCHES:
        batch = random_batch(seed)
        if peer == "verl":
            expected = verl(batch, settings, 0.0)[1]
        else:
            batch = replace(batch, sampler_log_prob=batch.log_prob)
            expected = trl_rloo(batch)
        got = ours(batch, settings, 0.0)[1]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def trl_rloo(batch: Batch) -> torch.Tensor:
    """Gradient [N] by ``RLOOTrainer._compute_loss`` on fresh weights."""
    RLOOTrainer = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError).RLOOTrainer
    log_prob = batch.log_prob.clone().requires_grad_()
    mask = batch.padded(batch.trainable.to(log_prob.dtype))
    trainer, inputs = trls_trainer(batch, log_prob, epsilon_low=0.2, epsilon_high=0.2)
    inputs |= {"completion_mask": mask, "old_logps": (batch.padded(batch.log_prob) * mask).sum(1)}
    RLOOTrainer._compute_loss(trainer, trainer.model, inputs).backward()
    return log_prob.grad


def test_liger_as_a_whole_gives_the_same_gradient_of_the_hidden_states():
    """Through its fused head, which computes in fp32: to 1.2e-6, a unit in the last place, on one kind of processor."""
    module = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", exc_type=ImportError)
    settings, vocab, hidden_size = PRESETS["dapo"] | {"mask_truncated": False}, 11, 6
    for seed in range(10):
        batch = random_batch(seed)
        g = torch.Generator().manual_seed(seed)
        hidden = torch.randn(len(batch.entropy), hidden_size, generator=g)
        head = torch.randn(vocab, hidden_size, generator=g)
        ids = torch.randint(vocab, (len(hidden),), generator=g)
        wide = hidden.double().requires_grad_()
        log_prob = (wide @ head.double().T).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        shift = log_prob.detach() - batch.log_prob
        batch = replace(
            batch,
            log_prob=log_prob.detach(),
            sampler_log_prob=batch.sampler_log_prob + shift,
            ref_log_prob=batch.ref_log_prob + shift,
        )
        loss, gradient, _ = ours(batch, settings, KL_COEF)
        log_prob.backward(gradient)

        padded = batch.padded(hidden).requires_grad_()
        theirs, _ = module.LigerFusedLinearGRPOFunction.apply(
            padded, head, batch.padded(ids), batch.padded(batch.trainable.float()), batch.advantages.float(), None,
            batch.padded(batch.ref_log_prob.float()), batch.padded(batch.sampler_log_prob.float()), None, None, None,
            KL_COEF, settings["clip_low"], settings["clip_high"], "dapo", None, "token", 1.0, 1.05, 1.0, False, True,
        )  # fmt: skip
        theirs.backward()
        expected = torch.cat([row[:n] for row, n in zip(padded.grad, batch.lengths.tolist(), strict=True)])
        assert loss == pytest.approx(theirs.item(), abs=1e-6)
        torch.testing.assert_close(wide.grad.float(), expected, rtol=0, atol=2e-6)


def test_loss_and_gradient_match_the_table_worked_out_by_hand():
    # Clips 0.2 and 0.2, beta 0.1. The first response has two tokens and A = 1, the second one token and A = -2.
    #   token  ratio  A    surrogate                    by log pi  ref/pi  k3                    by log pi (1 - ref/pi)
    #   1      1.5    1    -min(1.5, 1.2)      = -1.2    0          1       0                     0
    #   2      0.5    1    -min(0.5, 0.8)      = -0.5   -0.5        2       2 - ln 2 - 1          -1
    #   3      0.9   -2    -min(-1.8, -1.8)    =  1.8    1.8        0.5     0.5 + ln 2 - 1         0.5
    # Mean over responses: weights 1/4, 1/4, 1/2.
    #   loss      = (-1.2 - 0.5)/4 + 1.8/2 + 0.1 * ((1 - ln 2)/4 + (ln 2 - 0.5)/2) = 0.475 + 0.1 * ln 2 / 4
    #   gradient  = 0, (-0.5 - 0.1)/4, (1.8 + 0.05)/2
    # Mean over tokens: weights 1/3 each.
    #   loss      = (-1.2 - 0.5 + 1.8)/3 + 0.1 * (0.5 / 3)
    #   gradient  = 0, -0.6/3, 1.85/3
    ratio, ref_ratio = (torch.tensor(x, dtype=torch.float64) for x in ([1.5, 0.5, 0.9], [1.0, 2.0, 0.5]))
    old = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    batch = Batch(
        lengths=torch.tensor([2, 1]),
        sizes=torch.tensor([2]),
        trainable=torch.ones(3, dtype=torch.bool),
        truncated=torch.zeros(2, dtype=torch.bool),
        advantages=torch.tensor([1.0, -2.0], dtype=torch.float64),
        log_prob=old + ratio.log(),
        old_log_prob=old,
        sampler_log_prob=old,
        ref_log_prob=old + ratio.log() + ref_ratio.log(),
        entropy=torch.zeros(3, dtype=torch.float64),
    )
    by_responses = (0.475 + 0.1 * math.log(2) / 4, torch.tensor([0.0, -0.6 / 4, 1.85 / 2], dtype=torch.float64))
    by_tokens = (0.1 / 3 + 0.05 / 3, torch.tensor([0.0, -0.6 / 3, 1.85 / 3], dtype=torch.float64))
    assert_same(ours(batch, PRESETS["grpo"], 0.1, count=None), by_responses, 1e-12)
    assert_same(ours(batch, PRESETS["bnpo"], 0.1, count=None), by_tokens, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_equal_the_recorded_ones(name, dtype):
    recorded = json.loads(RECORDED.read_text())
    # Through NumPy, because torch would round the numbers to fp32 first.
    batch = Batch(**{key: torch.from_numpy(np.array(x)) for key, x in recorded["batch"].items()}).to(dtype)
    answers = [entry for entry in recorded["answers"] if entry["settings"] == name]
    assert {entry["peer"] for entry in answers} == {case.values[1].__name__ for case in CASES if case.values[0] == name}
    for entry in answers:
        expected = entry["loss"], torch.tensor(entry["gradient"], dtype=torch.float64)
        got = ours(batch, SETTINGS[name], entry["kl_coef"])
        assert_same(got, expected, 1e-10 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dr_grpo"])
def test_the_entropy_bonus_equals_verls(name):
    batch, settings = random_batch(0), SETTINGS[name]
    assert_same(ours(batch, settings, 0.0, entropy_coef=0.3), verl(batch, settings, 0.0, entropy_coef=0.3), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo", "dual_clip", "k3_is"])
def test_clip_fractions_kl_and_entropy_equal_trls_metrics(name):
    for seed in range(5):
        batch, settings = random_batch(seed), SETTINGS[name]
        _, _, sums = ours(batch, settings, 0.1)
        _, _, metrics = trl(batch, settings, 0.1)
        assert sums["tokens"] == int(batch.trained(settings).sum())
        for ours_, theirs in {
            "clip_low": "clip_ratio/low_mean",
            "clip_high": "clip_ratio/high_mean",
            "kl_ref": "kl",
            "entropy": "entropy",
        }.items():
            if (name, theirs) != ("k3_is", "kl"):  # TRL logs its weighted one
                # TRL counts in fp32.
                assert sums[ours_] / sums["tokens"] == pytest.approx(metrics[theirs], rel=1e-6), ours_


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_estimates_of_the_kl_equal_verls(kind):
    for seed in BATCHES:
        batch = random_batch(seed)
        expected = verl_core().kl_penalty(batch.log_prob, batch.ref_log_prob, kind)
        torch.testing.assert_close(kl_estimate(kind, batch.log_prob, batch.ref_log_prob), expected, rtol=0, atol=1e-12)


def test_the_kl_in_the_reward_sums_what_verl_takes_off_each_tokens_reward():
    for seed in BATCHES:
        batch = random_batch(seed)
        charged = verl_core().compute_rewards(
            torch.zeros_like(batch.entropy), batch.old_log_prob, batch.ref_log_prob, 1.0
        )
        expected = -(batch.padded(charged) * batch.padded(batch.trainable.double())).sum(1)
        got = torch.cat([kl_penalty(group) for group in batch.groups])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_weights_of_sampler_against_trainer_equal_verls(how, level):
    low = {"token": 0.7, "sequence": 0.1}[level]  # verl's metrics divide by zero where every response is masked
    settings = PRESETS["grpo"] | {"correction": how, "correction_level": level, "correction_low": low}
    for seed in BATCHES:
        batch = random_batch(seed)
        log_ratio = torch.where(batch.trainable, batch.old_log_prob - batch.sampler_log_prob, 0.0)
        function = CORRECTION.bound(how, correction_low=low)
        got, _ = correction_weight(log_ratio, function, level, torch.repeat_interleave(batch.lengths))
        expected = weights(batch, settings)
        mask = batch.padded(batch.trainable.double())
        torch.testing.assert_close(batch.padded(got) * mask, expected * mask, rtol=1e-12, atol=0)


HALF_OF_B = ADVANTAGE.bound("multi_reward", reward_weights={"b": 0.5})


@pytest.fixture
def nanstd():
    return pytest.importorskip("trl.trainer.utils", exc_type=ImportError).nanstd


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_z_scores_equal_trls_and_verls(nanstd, group_size):
    rewards = random_rewards(group_size)
    rewards[0] = 0.5
    got = group_advantages(rewards)
    # GRPOTrainer._generate_and_score_completions, scale_rewards="group"; its Bessel correction is always fp32.
    trls = (rewards - rewards.nanmean(1, keepdim=True)) / (nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    torch.testing.assert_close(got, trls, rtol=1e-7, atol=0)
    assert_verls(verl_core().compute_grpo_outcome_advantage, rewards, got, epsilon=1e-4)


def random_rewards(group_size: int, groups: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 7, (groups, group_size), generator=torch.Generator().manual_seed(seed)).double() / 2


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("no_std", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("leave_one_out", "compute_rloo_outcome_advantage", {}),
    ],
)
def test_other_advantages_of_a_group_equal_verls(kind, name, settings):
    rewards = random_rewards(4)
    assert_verls(getattr(verl_core(), name), rewards, group_advantages(rewards, kind), **settings)


def test_gpgs_advantages_equal_verls_where_zero_rewards_are_those_of_zero_variance_groups():
    """verl divides by the share of rewards other than 0, and we by that of responses in groups with variance."""
    rewards = random_rewards(4) + 1
    rewards[1] = 0.0
    (got,) = batch_advantages([rewards], "gpg")
    assert_verls(verl_core().compute_gpg_outcome_advantage, rewards, got)


def test_the_std_of_a_collections_rewards_equals_trls(nanstd):
    for seed in BATCHES:
        rewards = random_rewards(4, seed=seed)
        (got,) = batch_advantages([rewards], "batch_std")
        # scale_rewards="batch"
        trls = (rewards - rewards.nanmean(1, keepdim=True)) / (nanstd(rewards.flatten()) + 1e-4)
        torch.testing.assert_close(got, trls, rtol=1e-7, atol=1e-12)


def test_the_batchs_z_score_equals_verls_where_every_response_has_as_many_tokens():
    """verl counts responses by their tokens: with one token each, once. It adds nothing to the std, and we 1e-4."""
    for seed in BATCHES:
        rewards = random_rewards(4, seed=seed)
        (got,) = batch_advantages([rewards], "batch_zscore")
        std = group_advantages(rewards, "no_std").std()
        function = verl_core().compute_reinforce_plus_plus_baseline_outcome_advantage
        assert_verls(function, rewards, got * (std + 1e-4) / std, tokens=1)


@pytest.mark.slow
def test_normalised_parts_of_the_reward_equal_trls_and_verls(nanstd):
    for seed in BATCHES:
        parts = {"a": random_rewards(4, seed=seed), "b": random_rewards(4, seed=seed + 10**6)}
        (got,) = batch_advantages([sum(parts.values())], HALF_OF_B, parts=[parts])
        sums, trls = normalised_by_trl(parts, nanstd)
        torch.testing.assert_close(got, trls, rtol=1e-6, atol=1e-9)
        # verl takes parts in fp32.
        assert_verls_gdpo(parts, got * (sums.std() + 1e-4) / sums.std())


def normalised_by_trl(parts: dict, nanstd) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and the advantages of multi_objective_aggregation="normalize_then_sum"."""
    grouped = torch.stack(list(parts.values()), -1)
    scores = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    sums = (scores * torch.tensor([1.0, 0.5])).nansum(-1)
    return sums, (sums - sums.nanmean()) / (nanstd(sums.flatten()) + 1e-4)


def test_rewards_that_are_none_for_some_responses_are_summed_and_normalised_as_by_trl(nanstd):
    for seed in BATCHES:
        a, b = random_rewards(4, seed=seed), random_rewards(4, seed=seed + 10**6)
        lacks = torch.rand(a.shape, generator=torch.Generator().manual_seed(seed))
        parts = {"a": a.masked_fill(lacks < 0.3, torch.nan), "b": b.masked_fill(lacks > 0.6, torch.nan)}
        (got,) = batch_advantages([torch.zeros_like(a)], HALF_OF_B, parts=[parts])
        torch.testing.assert_close(got, normalised_by_trl(parts, nanstd)[1], rtol=1e-6, atol=1e-9)


def assert_verls_gdpo(parts: dict, expected: torch.Tensor) -> None:
    groups, size = expected.shape
    advantages, _ = verl_core().compute_gdpo_outcome_advantage(
        torch.zeros(groups * size, 1),
        torch.ones(groups * size, 1),
        index=np.arange(groups).repeat(size),
        epsilon=1e-4,
        config={"gdpo_reward_keys": list(parts), "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={name: part.flatten().numpy() for name, part in parts.items()},
        batch={"prompts": torch.zeros(groups * size, 1), "attention_mask": torch.ones(groups * size, 2).long()},
    )
    torch.testing.assert_close(advantages[:, 0].double(), expected.flatten(), rtol=0, atol=2e-6)


def assert_verls(function, rewards, expected, tokens: int = 2, **settings) -> None:
    """verl takes the reward of each response on one of its tokens, and returns the advantage on every token."""
    groups, size = rewards.shape
    token_rewards = torch.zeros(groups * size, tokens).double()
    token_rewards[:, -1] = rewards.flatten()
    index = np.arange(groups).repeat(size)
    advantages, _ = function(token_rewards, torch.ones_like(token_rewards), index=index, **settings)
    torch.testing.assert_close(advantages, expected.flatten()[:, None].expand(-1, tokens), rtol=0, atol=1e-10)


def record() -> None:
    """Writes the peers' results for one small batch, in fp64."""
    batch = random_batch(seed=2020, responses=7, longest=6)
    answers = []
    for case in CASES:
        name, peer = case.values
        kl_coef = kl_coef_of(peer, SETTINGS[name])
        loss, gradient = peer(batch, SETTINGS[name], kl_coef)[:2]
        entry = {"peer": peer.__name__, "settings": name, "kl_coef": kl_coef, "loss": loss}
        answers.append(entry | {"gradient": gradient.tolist()})
    about = (
        "TRL 1.16.0, verl 0.9.1 and Liger 0.8.5 on one batch, in fp64; settings are those of config/loss and of "
        "VARIANTS; written by `python tests/losses/test_parity.py`"
    )
    columns = {f.name: getattr(batch, f.name).tolist() for f in fields(batch)}
    lines = ",\n".join(json.dumps(entry) for entry in answers)
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(
        f'{{"about": {json.dumps(about)},\n"batch": {json.dumps(columns)},\n"answers": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    record()
