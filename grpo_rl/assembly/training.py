"""Builds policy, reference, optimizer, loss, advantages, buffer and schedules."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.data.group import Group
from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.chat import encode_prompts
from grpo_rl.envs.task import check_weights
from grpo_rl.losses.factors import ADVANTAGE
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.before_loading import is_url
from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.policies.hub import check_finite, resolve_model
from grpo_rl.policies.loading import skeleton
from grpo_rl.policies.lora import has_adapters
from grpo_rl.policies.policy import Peers, Reference, ReferencePolicy, TrainPolicy
from grpo_rl.policies.teachers import TaskTeachers
from grpo_rl.run.logs import RunLogs
from grpo_rl.settings import derived
from grpo_rl.settings.devices import Devices, lacks_bfloat16
from grpo_rl.settings.schema import Settings
from grpo_rl.training.optimizer import PolicyOptimizer


def make_policy(settings: Settings, model_folder: Path, devices: Devices, ranks: Ranks | None = None) -> TrainPolicy:
    """Loads the policy; refuses weights that are not finite, and a model that can't be trained."""
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
    if devices.train[0].type == "cpu":
        logs.note("No GPU is visible: everything runs on the CPU")
        if lacks_bfloat16() and derived.dtype(settings) == "float32":
            logs.note("Weights are float32: this CPU has no instructions for bfloat16, and is slow in it")
        elif lacks_bfloat16():
            logs.note("This CPU has no instructions for bfloat16: train_model.dtype=float32 is several times as fast")
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


def make_reference(
    settings: Settings, model_folder: Path, devices: Devices, policy: TrainPolicy, env: LLMEnv
) -> Reference | None:
    """The frozen reference, or that of each task of a mixture; None if no KL term needs it.

    Without a name the policy with adapters is its own reference when they are off. The processes that train the policy
    share the reference likewise.

    Raises:
        ValueError: it has another vocabulary, or weights that are not finite, or its server can't be asked.
    """
    if not settings.policy.kl_coef:
        return None
    if settings.ref_model.hint and all(env.task.gold(row) is None for row in env.task.rows):
        raise ValueError(f"ref_model.hint has the gold answer, and no row of {settings.env.dataset} has one")
    teachers = derived.teachers(settings)
    # In one order on all ranks, which load them together.
    names = dict.fromkeys(teachers.values()) or {settings.ref_model.name: None}
    made = {name: _make_one(settings, name, model_folder, devices, policy, env) for name in names}
    if teachers:
        by_task = {task: made[name] for task, name in teachers.items()}
        return TaskTeachers(by_task, lambda groups: env.by_task([env.task.rows[group.row] for group in groups]))
    return made[settings.ref_model.name]


def _make_one(
    settings: Settings, name: str | None, model_folder: Path, devices: Devices, policy: TrainPolicy, env: LLMEnv
) -> Reference:
    if name and is_url(name):
        vocabulary, key = len(policy.model.get_input_embeddings().weight), os.environ.get("OPENAI_API_KEY")
        given = name, env.tokenizer, vocabulary, settings.ref_model.top, key, policy.peers
        served = importlib.import_module("grpo_rl.policies.served")  # for those alone who have a server
        return agreed(policy.peers, lambda: served.ServedTeacher(*given))
    peers, temperature = policy.peers, settings.sampling.temperature
    if has_adapters(policy.model) and not name:
        made = ReferencePolicy(policy.model, temperature)
        made.peers = peers
    else:
        dtype = getattr(torch, derived.dtype(settings))
        folder = agreed(peers, lambda: resolve_model(name)) if name else model_folder
        if folder != model_folder:
            _check_finite(folder, peers)
            agreed(peers, lambda: _check_reference(folder, model_folder, settings, str(name)))
        made = ReferencePolicy.load(folder, dtype, devices.ref[0], temperature, peers=peers)
    if settings.ref_model.hint:
        made.reads = partial(with_hint, env, settings.ref_model.hint)
    return made


def with_hint(env: LLMEnv, hint: str, group: Group) -> Group:
    """The group's responses behind a prompt that has the gold answer; as they are where the task has none."""
    row = env.task.rows[group.row]
    gold = env.task.gold(row)
    if gold is None:
        return group
    *before, asked = env.task.prompt(row)
    hinted = {**asked, "content": f"{asked['content']}\n\n{hint.replace('{gold}', gold)}"}
    ids = encode_prompts(env.tokenizer, [[*before, hinted]], list(env.task.tools_of(row)))[0]
    return replace(group, prompt_ids=torch.tensor(ids))


def _check_finite(folder: Path, peers: Peers | None) -> None:
    """Refuses non-finite weights on all ranks; rank zero reads its machine's copy for all."""
    agreed(peers, lambda: None if peers and peers.rank else check_finite(folder))


def _check_reference(folder: Path, model_folder: Path, settings: Settings, name: str) -> None:
    vocabularies = [load_tokenizer(model).get_vocab() for model in (folder, model_folder)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"{name} has another vocabulary than {settings.model.name}; choose one of the same family")
    models = skeleton(folder), skeleton(model_folder)
    shapes = [{name: weight.shape for name, weight in model.named_parameters()} for model in models]
    if settings.ref_model.refresh != "never" and shapes[0] != shapes[1]:
        differ = f"{name} has other weights than {settings.model.name}"
        raise ValueError(f"ref_model.refresh={settings.ref_model.refresh} copies the policy, and {differ}; set never")


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
    """The estimator that turns rewards of these parts into advantages; refuses weights that it would not read."""
    weights = dict(settings.loss["reward_weights"])
    if unknown := weights.keys() - set(reward_parts):
        what = ", ".join(sorted(unknown))
        raise ValueError(f"loss.reward_weights weighs {what}, and the reward's parts are {', '.join(reward_parts)}")
    check_weights(weights, "loss.reward_weights")
    function = ADVANTAGE.chosen(settings.loss)
    if weights and "reward_weights" not in function.keywords:
        raise ValueError(f"loss.reward_weights are of loss.advantage=multi_reward, not of {settings.loss.advantage}")
    return AdvantageEstimator(
        function,
        settings.loss.advantage_clip,
        kl_coef=derived.kl_in_reward(settings),
        kl=settings.loss.kl,
        reward_clip=settings.train.reward_clip,
        turn_credit=settings.loss.turn_credit,
        turn_discount=settings.loss.turn_discount,
    )
