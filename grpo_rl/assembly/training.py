"""Builds policy, reference, optimizer, loss, advantages, buffer and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.envs.task import check_weights
from grpo_rl.losses.factors import ADVANTAGE
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.hub import check_finite, load_tokenizer, resolve_model
from grpo_rl.policies.loading import skeleton
from grpo_rl.policies.lora import has_adapters
from grpo_rl.policies.policy import Peers, ReferencePolicy, TrainPolicy
from grpo_rl.run.logs import RunLogs
from grpo_rl.settings import derived
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.hardware import lacks_bfloat16
from grpo_rl.settings.schema import Settings
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.training.schedules import AdaptiveKL, RefreshRule, Schedules


def make_policy(settings: Settings, model_folder: Path, devices: Devices, ranks: Ranks | None = None) -> TrainPolicy:
    """Loads the policy.

    Raises:
        ValueError: the model's weights are not finite, or it can't be trained.
    """
    _check_finite(model_folder, ranks)
    return TrainPolicy.load(
        model_folder,
        getattr(torch, derived.dtype(settings)),
        devices.train[0],
        settings.sampling.temperature,
        settings.train_model.gradient_checkpointing,
        settings.train_model.compile,
        derived.adapters(settings),
        settings.train_model.quantization,
        ranks,
        settings.policy.router_replay,
    )


def load_policy(
    settings: Settings, model_folder: Path, devices: Devices, ranks: Ranks | None, logs: RunLogs
) -> TrainPolicy:
    """The policy of a run, loaded in a phase of its start, with a note on what is compiled, or why nothing is."""
    if note := note_on_dtype(derived.dtype(settings), devices.train[0]):
        logs.note(note)
    with logs.progress.start_phase("loading the model"):
        policy = make_policy(settings, model_folder, devices, ranks)
    if policy.compile_s is not None:
        # Passes without a gradient are compiled when first made: old log-probs, or those of a reference.
        more = settings.mode != "sft" and (derived.needs_old_log_probs(settings) or settings.policy.kl_coef)
        rest = "; the first step compiles scoring, and takes longer" if more else ""
        logs.note(f"Compiled for training in {policy.compile_s:.1f} s{rest}")
    if settings.train_model.compile is None and (why := why_uncompiled(policy.device)):
        logs.note(f"Nothing is compiled, and steps take longer: {why}")
    return policy


def note_on_dtype(dtype: str, device: torch.device) -> str | None:
    """A log line on how well the dtype suits this CPU; None if there is nothing to report."""
    if device.type != "cpu" or not lacks_bfloat16():
        return None
    if dtype == "float32":
        return "Weights are float32: nearly all x86 CPUs without AVX-512, as this one, are slow in bfloat16"
    return (
        "Nearly all x86 CPUs without AVX-512, as this one, are slow in bfloat16: train_model.dtype=float32 may be many "
        "times faster"
    )


def make_reference(
    settings: Settings, model_folder: Path, devices: Devices, policy: TrainPolicy
) -> ReferencePolicy | None:
    """The frozen reference; None if no KL term needs it.

    Args:
        policy: the policy. With adapters it is its own reference when they are off, and nothing more is loaded. The
            processes that train it share the reference likewise.

    Raises:
        ValueError: ``ref_model.name`` is a model that can't judge the policy's tokens, or can't become its copy.
    """
    if not settings.policy.kl_coef:
        return None
    peers = policy.peers
    if has_adapters(policy.model):
        reference = ReferencePolicy(policy.model, settings.sampling.temperature)
        reference.peers = peers
        return reference
    dtype = getattr(torch, derived.dtype(settings))
    folder = agreed(peers, lambda: resolve_model(settings.ref_model.name)) if settings.ref_model.name else model_folder
    if folder != model_folder:
        _check_finite(folder, peers)
        agreed(peers, lambda: _check_reference(folder, model_folder, settings))
    return ReferencePolicy.load(folder, dtype, devices.ref[0], settings.sampling.temperature, peers=peers)


def _check_finite(folder: Path, peers: Peers | None) -> None:
    """Refuses non-finite weights on all ranks; rank zero reads its machine's copy for all."""
    agreed(peers, lambda: None if peers and peers.rank else check_finite(folder))


def _check_reference(folder: Path, model_folder: Path, settings: Settings) -> None:
    vocabularies = [load_tokenizer(model).get_vocab() for model in (folder, model_folder)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"ref_model.name={settings.ref_model.name} has another vocabulary than {settings.model.name}: its scores "
            "of the policy's tokens would mean nothing; choose a model of the same family"
        )
    shapes = [
        {name: weight.shape for name, weight in skeleton(model).named_parameters()} for model in (folder, model_folder)
    ]
    if settings.ref_model.refresh != "never" and shapes[0] != shapes[1]:
        raise ValueError(
            f"ref_model.refresh={settings.ref_model.refresh} renews the reference from the policy, and "
            f"{settings.ref_model.name} has other weights than {settings.model.name}; set ref_model.refresh=never, or "
            "leave ref_model.name at null"
        )


def make_loss(settings: Settings) -> GRPOLoss:
    """The loss of ``loss`` and ``policy``."""
    return GRPOLoss(settings.loss, derived.kl_in_loss(settings), settings.policy.entropy_coef)


def make_optimizer(
    settings: Settings, policy: TrainPolicy, ranks: Ranks | None = None, total_steps: int | None = None
) -> PolicyOptimizer:
    """The optimizer of ``optimizer.name`` over the policy; ``total_steps``: of the run, None: those of GRPO."""
    return PolicyOptimizer(
        policy.model,
        **settings.optimizer,
        total_steps=total_steps or derived.optimizer_steps(settings),
        mixed_precision=settings.train.mixed_precision,
        max_bad_steps=settings.train.max_bad_steps,
        ranks=ranks,
    )


def make_buffer(settings: Settings) -> GroupBuffer:
    """The buffer of one collection."""
    return GroupBuffer(settings.env.num_envs, settings.train.optim_batch_size // settings.env.repeats)


def make_advantages(settings: Settings, reward_parts: Sequence[str] = ()) -> AdvantageEstimator:
    """The estimator that turns rewards of these parts into advantages.

    Raises:
        ValueError: ``loss`` has settings that give no advantage, or weighs parts that the reward doesn't have.
    """
    weights = dict(settings.loss["reward_weights"])
    if unknown := weights.keys() - set(reward_parts):
        raise ValueError(
            f"loss.reward_weights weighs {', '.join(sorted(unknown))}, and the parts of the reward are "
            f"{', '.join(reward_parts)}"
        )
    check_weights(weights, "loss.reward_weights")
    function = ADVANTAGE.chosen(settings.loss)
    if weights and "reward_weights" not in function.keywords:
        raise ValueError(
            f"loss.reward_weights are read by loss.advantage=multi_reward, not by {settings.loss.advantage}; the "
            "weights of the reward's sum are those of env.reward and env.rewards"
        )
    return AdvantageEstimator(
        function,
        settings.loss.advantage_clip,
        kl_coef=derived.kl_in_reward(settings),
        kl=settings.loss.kl,
        reward_clip=settings.train.reward_clip,
    )


def make_schedules(
    settings: Settings,
    loss: GRPOLoss,
    advantages: AdvantageEstimator,
    reference: ReferencePolicy | None,
    policy: TrainPolicy,
) -> Schedules:
    """The schedules: KL weight and reference refresh."""
    return Schedules(
        AdaptiveKL(settings.policy.kl_coef, settings.policy.target_kl),
        RefreshRule(settings.ref_model.refresh, settings.ref_model.refresh_steps, settings.ref_model.decay),
        loss if settings.loss.kl_in == "loss" else advantages,
        reference,
        policy,
    )
