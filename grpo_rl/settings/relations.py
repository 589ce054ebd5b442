"""Constraints between settings; constraints on a single setting are in its declaration."""

from grpo_rl.by_name import is_name
from grpo_rl.engines.sampling import Sampling
from grpo_rl.envs.own import is_env, own_class
from grpo_rl.envs.rewards.registry import read_parts
from grpo_rl.loggers.base import logger_names
from grpo_rl.losses.factors import ADVANTAGE, AGGREGATE, check_advantage, check_loss
from grpo_rl.policies.before_loading import LoRA, check_quantization, is_url
from grpo_rl.section import plain, select
from grpo_rl.settings.derived import (
    adapters,
    compares_full_vocabulary,
    kl_in_loss,
    kl_in_reward,
    reference_names,
    teachers,
)
from grpo_rl.settings.mixture import read_tasks
from grpo_rl.settings.sections import Sections, declarations
from grpo_rl.training.schedules import AdaptiveKL

SCRIPTS = {
    "sync": "sota/grpo.py, or grpo-rl train",
    "async": "sota/grpo_async.py, or grpo-rl train --async",
    "sft": "sota/sft.py, or grpo-rl train --sft",
}
"""The command that starts a run of each mode: from a checkout, or installed."""
NO_DEVICES = "leave ref_model.num_devices and ref_model.devices at null"


def check_relations(settings: Sections) -> None:
    """Refuses settings that contradict each other; `grpo_rl.settings.derived` checks divisibility."""
    read_parts(settings.env.rewards)
    _check_data(settings)
    logger_names(settings.logger.backend)
    sampling = settings.sampling
    Sampling(**sampling)
    if sampling.ignore_eos and settings.loss.mask_truncated and not sampling.stop:
        raise ValueError("sampling.ignore_eos: every response meets the length limit; set loss.mask_truncated=false")
    _check_mode(settings)
    _check_lora(settings)
    _check_parallel(settings)
    _check_loss(settings)
    _check_reference(settings)
    asked = f"inference_model.speculative={settings.inference_model.speculative}"
    if settings.inference_model.speculative is not None:
        if settings.inference_model.engine != "vllm" or settings.policy.router_replay:
            raise ValueError(f"{asked} needs inference_model.engine=vllm and policy.router_replay=false")
        if Sampling(**sampling).cuts:
            raise ValueError(f"{asked}: vLLM cuts nothing off drafts; leave top_p, top_k and min_p out of sampling")
    if settings.policy.router_replay and settings.inference_model.engine != "vllm":
        raise ValueError("policy.router_replay=true needs inference_model.engine=vllm, which records experts")


def _check_data(settings: Sections) -> None:
    context, response = settings.inference_model.max_model_len, settings.sampling.max_new_tokens
    if context <= response:
        raise ValueError(f"inference_model.max_model_len={context} leaves no room: sampling.max_new_tokens={response}")
    if settings.env.dataset == "search_qa" and settings.env.eval_path and not settings.env.task["corpus"]:
        raise ValueError("env.eval_path needs env.corpus: the documents next to env.path do not answer its questions")
    if settings.evaluate.rows == 1:
        raise ValueError("evaluate.rows is 1; use 0, or at least 2: one row gives no interval")
    for name in ("samples", "tasks", "keep_best", "patience"):
        if settings.evaluate[name] and not settings.evaluate.rows:
            raise ValueError(f"evaluate.{name} is set, and evaluate.rows=0 evaluates nothing; set evaluate.rows")
    if settings.evaluate.patience and not settings.evaluate.frequency:
        raise ValueError("evaluate.patience counts evaluations in training; set evaluate.frequency")
    read_tasks(settings.evaluate.tasks)


def _check_mode(settings: Sections) -> None:
    if settings.mode == "sft":
        return check_sft(settings)
    own, other = ("async", "sync") if settings.mode == "async" else ("sync", "async")
    for key, setting in declarations(settings.env.dataset, type(settings.loss)).items():
        if setting.mode not in (None, own) and (value := select(settings, key)) != setting.default:
            raise ValueError(f"{key}={plain(value)} is of mode={setting.mode}; run {SCRIPTS[other]}")
    if own == "sync":
        return
    if settings.ray.address is None and (settings.ray.nodes or 1) > 1:
        raise ValueError(f"ray.nodes={settings.ray.nodes} needs a cluster; set ray.address=auto, or host:port")
    if (engine := settings.inference_model.engine) != "vllm":
        raise ValueError(f"mode=async samples with inference_model.engine=vllm, not {engine}; use mode=sync")


def _check_lora(settings: Sections) -> None:
    lora, train = adapters(settings), settings.train_model
    check_quantization(train.quantization, lora, train.compile)
    if not lora.rank:
        unused = LoRA(rank=train.lora.rank)
        if idle := [name for name, value in train.lora.items() if value != unused[name]]:
            value = plain(train.lora[idle[0]])
            raise ValueError(f"train_model.lora.{idle[0]}={value} without adapters; set train_model.lora.rank")
        return
    if lora.push == "adapter" and settings.inference_model.engine != "vllm":
        raise ValueError("train_model.lora.push=adapter needs inference_model.engine=vllm; use merged")
    if lora.dora and lora.push == "adapter":
        raise ValueError("train_model.lora.dora=true: vLLM has no such adapters; set train_model.lora.push=merged")
    if lora.dora and (train.parallel == "fsdp" or train.quantization):
        raise ValueError("train_model.lora.dora=true: with fsdp or a quantised base this was never run; leave it out")
    if settings.policy.kl_coef and _reference_has_devices(settings) and not reference_names(settings):
        raise ValueError(f"with train_model.lora the reference is on the policy's device; {NO_DEVICES}")


def _reference_has_devices(settings: Sections) -> bool:
    return settings.ref_model.num_devices is not None or settings.ref_model.devices is not None


def _check_parallel(settings: Sections) -> None:
    train = settings.train_model
    if train.parallel is not None and _reference_has_devices(settings):
        raise ValueError(f"with train_model.parallel={train.parallel} each trainer holds the reference; {NO_DEVICES}")
    if train.cpu_offload and train.parallel != "fsdp":
        raise ValueError(f"train_model.cpu_offload=true needs train_model.parallel=fsdp, not {train.parallel}")
    if train.quantization and train.parallel == "fsdp":
        raise ValueError(f"train_model.quantization={train.quantization} is not sharded; use train_model.parallel=ddp")
    if train.lora.export == "adapter" and train.parallel == "fsdp":
        raise ValueError("train_model.parallel=fsdp writes adapters merged; set train_model.lora.export=merged")


def _check_loss(settings: Sections) -> None:
    loss = settings.loss
    masks_tokens = loss.correction == "mask" and loss.correction_level == "token"
    shared = loss.surrogate == "gmpo" or (loss.ratio == "sequence" and loss.surrogate != "topr")  # topr: each its own
    covariance = loss.surrogate in ("clip_cov", "kl_cov")
    if shared and (masks_tokens or covariance or loss.top_entropy_fraction < 1):
        remedy = "loss.correction_level=sequence alone" if loss.surrogate == "gmpo" else "loss.ratio=sequence_token"
        what = "loss.top_entropy_fraction, loss.correction=mask, clip_cov and kl_cov leave out no token of a response"
        raise ValueError(f"{what} with one value for all; use {remedy}")
    if loss.turn_credit and settings.env.dataset == "agent":
        raise ValueError("loss.turn_credit is of conversations that the environment leads; set it to 0 for agents")
    if loss.turn_credit and (loss.ratio == "sequence" or loss.surrogate == "gmpo" or loss.off_policy_bound is not None):
        of_one = "loss.ratio=sequence, loss.surrogate=gmpo and loss.off_policy_bound, which take one for all"
        raise ValueError(f"loss.turn_credit gives tokens advantages of their own; it can't go with {of_one}")
    if loss.surrogate == "none" and loss.off_policy_bound is not None:
        raise ValueError("loss.off_policy_bound has no effect with loss.surrogate=none; set it to null")
    if loss["normalizer"] is not None and "normalizer" not in AGGREGATE.chosen(loss).keywords:
        raise ValueError(f"loss.normalizer={loss['normalizer']}: loss.aggregate={loss.aggregate} reads none, use null")
    check_loss(loss, kl_in_loss(settings))
    if loss.surrogate == "none":
        _check_distillation(settings)
    advantage, clip = ADVANTAGE.chosen(loss), settings.train.reward_clip
    check_advantage(advantage, kl_in_reward(settings), loss.kl, clip, loss.turn_credit)


def _check_distillation(settings: Sections) -> None:
    """Refuses a teacher that is the policy itself, or becomes it, and dynamic sampling."""
    reference = settings.ref_model
    what = "loss.surrogate=none trains on the KL to a teacher alone"
    if settings.train.max_resamples:
        raise ValueError(f"{what}, and all groups teach; set train.max_resamples to 0")
    if reference.hint is not None:
        return
    if settings.model.name in (reference_names(settings) or {settings.model.name}):
        raise ValueError(f"{what}, and the reference is the policy's own model; set ref_model.name=TEACHER")
    if reference.refresh != "never":
        raise ValueError(f"{what}, and ref_model.refresh={reference.refresh} would renew it; set it to never")


def _check_reference(settings: Sections) -> None:
    reference, policy = settings.ref_model, settings.policy
    AdaptiveKL(policy.kl_coef, policy.target_kl)
    if policy.target_entropy is not None and policy.entropy_coef > policy.entropy_coef_max:
        raise ValueError(f"policy.entropy_coef={policy.entropy_coef} is above policy.entropy_coef_max; raise that")
    if (hint := reference.hint) is not None:
        dataset = settings.env.dataset
        if "{gold}" not in hint or dataset == "agent" or (is_name(dataset) and is_env(own_class(dataset))):
            raise ValueError("ref_model.hint is a text with {gold} in it, for tasks whose prompts are the task's own")
    names, refreshed = reference_names(settings), reference.refresh != "never"
    if (names or refreshed or hint is not None) and not policy.kl_coef:
        raise ValueError("ref_model and a task's teacher are of the KL term's reference; set policy.kl_coef")
    if teachers(settings) and (refreshed or _reference_has_devices(settings)):
        raise ValueError(f"tasks of env.mixture have teachers; leave ref_model.refresh out, and {NO_DEVICES}")
    if refreshed and settings.train_model.lora.rank:
        raise ValueError("with train_model.lora the policy's weights are no reference's; leave ref_model.refresh out")
    served = [name for name in names if is_url(name)]
    if reference.top and not (served and compares_full_vocabulary(settings)):
        raise ValueError("ref_model.top is read by loss.kl over the full vocabulary, to a served teacher; use 0")
    if served:
        what = f"{served[0]} is a served teacher"
        if settings.sampling.temperature != 1:
            raise ValueError(f"{what}, whose log-probabilities are of temperature 1; set sampling.temperature=1")
        if Sampling(**settings.sampling).cuts:
            raise ValueError(f"{what}, which cuts no tokens off; leave top_p, top_k and min_p out of sampling")
        if refreshed or hint or _reference_has_devices(settings):
            raise ValueError(f"{what}; leave ref_model.refresh, hint, num_devices and devices out")
        if compares_full_vocabulary(settings) and not reference.top:
            raise ValueError(f"{what}, and loss.kl={settings.loss.kl} compares distributions; set ref_model.top=20")
    elsewhere = settings.train_model.parallel == "fsdp" or _reference_has_devices(settings)
    if compares_full_vocabulary(settings) and elsewhere:
        what = f"loss.kl={settings.loss.kl} compares whole distributions on one device; leave ref_model.devices out"
        raise ValueError(f"{what}, and use train_model.parallel=ddp")


OF_GRPO = (
    "env.num_envs", "env.repeats", "env.max_turns", "env.score_timeout_s", "env.max_failed_fraction", "env.isolated",
    "env.curriculum", "env.rewards", "env.tool_parser", "env.mcp", "env.transforms", "ref_model", "inference_model",
    "sampling", "train.total_dialog_turns", "train.steps", "train.max_staleness", "train.max_resamples",
    "train.reward_clip", "train.lineage", "train_model.lora.push", "policy", "mismatch", "loss", "evaluate.samples",
    "evaluate.temperature", "evaluate.tasks", "evaluate.keep_best", "evaluate.patience", "evaluate.score",
    "logger.completions", "logger.token_groups", "ray",
)  # fmt: skip
"""Settings and sections of sampling and rewards, which SFT has none of."""


def is_read(key: str) -> bool:
    """True if mode=sft reads a setting.

    >>> is_read("optimizer.lr"), is_read("sampling.temperature"), is_read("sampling.max_new_tokens")
    (True, False, True)
    """
    lengths = ("inference_model.max_model_len", "sampling.max_new_tokens")  # which GRPO can go on with
    return key in lengths or not any(key == name or key.startswith(f"{name}.") for name in OF_GRPO)


def check_sft(settings: Sections) -> None:
    """Refuses settings that mode=sft does not read, and more micro-batches than a step has rows."""
    batch, count = settings.train.optim_batch_size, settings.train.gradient_accumulation_steps
    if count is not None and count > batch:
        raise ValueError(f"train.gradient_accumulation_steps={count}: a step has {batch} rows; use at most {batch}")
    for key, setting in declarations(settings.env.dataset, type(settings.loss)).items():
        if not is_read(key) and (own := select(settings, key)) != setting.default:
            raise ValueError(f"{key}={plain(own)} means nothing to mode=sft, which samples no responses; leave it out")
