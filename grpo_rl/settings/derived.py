"""Numbers derived from settings: steps, micro-batches, arguments of parts; batch sizes that do not divide evenly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from grpo_rl.envs.sources import HUB_PREFIX, Source, repository_of
from grpo_rl.losses.factors import AGGREGATE, COVARIANCE, KL, SURROGATE, asks_for
from grpo_rl.policies.before_loading import LoRA, check_adapters, is_url
from grpo_rl.settings.mixture import entries
from grpo_rl.settings.sections import Sections

if TYPE_CHECKING:
    from grpo_rl.data.batching import MicroBatching


def train_source(settings: Sections) -> Source:
    """The source of the rows to train on."""
    env = settings.env
    return Source(env.path, env.subset, env.split, env.revision, env.columns)


def eval_source(settings: Sections) -> Source:
    """The source of held-out rows: ``env.eval_path``, or the held-out split of the rows to train on.

    ``env.subset`` and ``env.revision`` are of the repository of ``env.path``, and so of ``env.eval_path`` where that is
    the same one.

    Raises:
        ValueError: one of them is set, and ``env.eval_path`` is another repository.
    """
    env = settings.env
    if not env.eval_path:
        return Source(env.path, env.subset, env.eval_split, env.revision, env.columns)
    held_out = repository_of(env.eval_path)
    if held_out and held_out == repository_of(env.path):
        own_subset = ":" in env.eval_path.removeprefix(HUB_PREFIX)
        subset = None if own_subset else env.subset
        return Source(env.eval_path, subset, env.eval_split, env.revision, env.columns)
    for name, remedy in (("subset", f"write it into the path: {held_out}:SUBSET"), ("revision", "give a local copy")):
        if held_out and env[name]:
            raise ValueError(f"env.{name} is of the rows to train on, not of env.eval_path={env.eval_path}; {remedy}")
    return Source(env.eval_path, split=env.eval_split, columns=env.columns)


def dtype(settings: Sections) -> str:
    """Name of the dtype of weights and activations."""
    assert settings.train_model.dtype, "Settings.read replaces null"
    return settings.train_model.dtype


def total_steps(settings: Sections) -> int:
    """Collections of the whole run: ``total_dialog_turns`` responses, ``num_envs`` groups at a time, rounded up.

    With dynamic sampling this is an upper bound: its extra responses count as well.
    """
    return math.ceil(settings.train.total_dialog_turns / (settings.env.num_envs * settings.env.repeats))


def optimizer_steps(settings: Sections) -> int:
    """Optimizer steps of the whole run."""
    per_collection = settings.env.num_envs * settings.env.repeats // settings.train.optim_batch_size
    return total_steps(settings) * per_collection * settings.train.epochs


def steps_once(settings: Sections) -> bool:
    """True if each collection gives one optimizer step, so that no token is trained on with updated weights."""
    train = settings.train
    return train.epochs == 1 and settings.env.num_envs * settings.env.repeats <= train.optim_batch_size


def needs_old_log_probs(settings: Sections) -> bool:
    """True if the policy scores each collection before training on it, at the cost of one more forward pass.

    A correction and a KL in the reward need its log-probs; choosing tokens by entropy needs entropies. For a correction
    or a stored lineage, a collection of one optimizer step gets them in the training pass itself.
    """
    loss = settings.loss
    return (
        ((loss.correction != "none" or settings.train.lineage) and not steps_once(settings))
        or (loss.kl_in == "reward" and settings.policy.kl_coef > 0)
        or loss.top_entropy_fraction < 1
    )


def kl_in_loss(settings: Sections) -> float:
    """Weight of the KL as a term of the loss."""
    return settings.policy.kl_coef if settings.loss.kl_in == "loss" else 0.0


def teachers(settings: Sections) -> dict[str, str]:
    """The reference of each task of a mixture; empty where all prompts have the same."""
    own = {name: entry.teacher for name, entry in entries(settings).items()}
    found = {name: teacher or settings.ref_model.name or "" for name, teacher in own.items()}
    if any(own.values()) and (lacking := [name for name, teacher in found.items() if not teacher]):
        raise ValueError(f"env.mixture.{lacking[0]} has no teacher; give it one, or set ref_model.name for the others")
    return found if any(own.values()) else {}


def reference_names(settings: Sections) -> set[str]:
    """The models and endpoints that references are; empty where it is the policy's own model."""
    return {*teachers(settings).values()} or {name for name in (settings.ref_model.name,) if name}


def loaded_references(settings: Sections) -> int:
    """The number of references loaded next to the policy: not its own weights without adapters, nor served ones."""
    names = reference_names(settings)
    loaded = sum(not is_url(name) for name in names) if names else int(not settings.train_model.lora.rank)
    return loaded if settings.policy.kl_coef > 0 else 0


def compares_full_vocabulary(settings: Sections) -> bool:
    """True if the KL in the loss is over the reference's whole distribution."""
    return kl_in_loss(settings) > 0 and asks_for(KL.function(settings.loss.kl), "teacher_kl")


def kl_in_reward(settings: Sections) -> float:
    """Weight of the KL that is subtracted from rewards."""
    return settings.policy.kl_coef if settings.loss.kl_in == "reward" else 0.0


def micro_batching(settings: Sections) -> MicroBatching:
    """The way an optimizer step's groups are split and weighted."""
    from grpo_rl.data.batching import MicroBatching  # torch, which the check of a config does without

    loss, most = settings.loss, settings.sampling.max_new_tokens
    surrogate = SURROGATE.function(loss.surrogate)
    return MicroBatching(
        max_tokens=settings.train.micro_batch_tokens,
        count=settings.train.gradient_accumulation_steps,
        aggregate=AGGREGATE.chosen(loss, normalizer=most if loss["normalizer"] is None else loss["normalizer"]),
        # With a KL or entropy term, or one of the surrogate's, every group has a gradient.
        skip_zero_advantage=not (
            kl_in_loss(settings)
            or settings.policy.entropy_coef
            or settings.policy.target_entropy is not None
            or any(loss.get(name) for name in getattr(surrogate, "trains_all", ()))
        ),
        mask_truncated=loss.mask_truncated,
        top_entropy_fraction=loss.top_entropy_fraction,
        covariance=(loss.covariance_low, loss.covariance_high) if asks_for(surrogate, *COVARIANCE) else None,
        on_policy=steps_once(settings),
    )


def max_staleness(settings: Sections) -> int:
    """Policy versions that a trained token may be behind; 0 in sync mode."""
    return settings.train.max_staleness if settings.mode == "async" else 0


def responses_at_once(settings: Sections, engines: int = 1) -> int:
    """Responses that one of so many engines is sent at a time: those of training, or the rows of an evaluation."""
    prompts, evaluate = settings.env.num_envs * (1 + max_staleness(settings)), settings.evaluate
    sampled = math.ceil(prompts / engines) * settings.env.repeats
    others = [int(task["rows"]) * max(int(task.get("samples", 0)), 1) for task in evaluate.tasks]
    tasks = len(settings.env.task.get("mixture", ())) or 1
    evaluated = max(tasks * evaluate.rows * max(evaluate.samples, 1), *others, 0)
    return max(sampled, math.ceil(evaluated / engines))


def adapters(settings: Sections) -> LoRA:
    """The adapters of ``train_model.lora``, which need peft; rank 0 means none."""
    check_adapters(settings.train_model.lora)
    return settings.train_model.lora.model_copy(update={"seed": settings.train.seed})


def pushes_adapters(settings: Sections) -> bool:
    """True if only adapters are pushed to the engine, which keeps its own base weights."""
    lora = settings.train_model.lora
    return bool(lora.rank) and lora.push == "adapter"


Where = Literal["cut", "left_over", "micro_batches", "run"]
"""The part that the error breaks: a group, a collection, an optimizer step, the run."""


class IndivisibleBatchError(ValueError):
    """A batch size that does not divide evenly; ``fits`` has the nearest values that do, each a remedy.

    >>> print(IndivisibleBatchError("16 in 3 halls", "cut", {"halls": [2, 4], "seats": [8]}))
    16 in 3 halls; use halls=2 or 4, or seats=8
    """

    def __init__(self, what: str, where: Where, fits: Mapping[str, Iterable[int]]) -> None:
        self.what, self.where = what, where
        self.fits = {key: tuple(values) for key, values in fits.items() if tuple(values)}
        super().__init__(f"{what}; use {self.remedy}")

    @property
    def remedy(self) -> str:
        """The values that fit, as a sentence's end."""
        return ", or ".join(f"{key}={' or '.join(map(str, values))}" for key, values in self.fits.items())


def indivisible_batches(settings: Sections) -> Iterator[IndivisibleBatchError]:
    """Every batch size of the settings that does not divide evenly."""
    train, prompts, size = settings.train, settings.env.num_envs, settings.env.repeats
    batch, turns, steps = train.optim_batch_size, train.total_dialog_turns, train.gradient_accumulation_steps
    collected, groups = prompts * size, max(1, batch // size)
    batches = [size * divisor for divisor in divisors(prompts)]
    if batch % size:
        sizes = [divisor for divisor in divisors(batch) if divisor > 1 and prompts * divisor % batch == 0]
        yield IndivisibleBatchError(
            f"train.optim_batch_size={batch} is not a multiple of env.repeats={size}: a group would be cut",
            "cut",
            {"train.optim_batch_size": _nearest(batch, batches), "env.repeats": _nearest(size, sizes)},
        )
    elif collected % batch:
        multiples = [prompts // groups * groups, (prompts // groups + 1) * groups]
        yield IndivisibleBatchError(
            f"env.num_envs x env.repeats = {prompts} x {size} = {collected} responses a collection do not divide "
            f"into batches of train.optim_batch_size={batch}",
            "left_over",
            {"train.optim_batch_size": _nearest(batch, batches), "env.num_envs": _nearest(prompts, multiples)},
        )
    if steps is not None and steps > groups:
        yield IndivisibleBatchError(
            f"train.gradient_accumulation_steps={steps} micro-batches cannot be made of the {groups} groups of an "
            "optimizer step",
            "micro_batches",
            {"train.gradient_accumulation_steps": [groups]},
        )
    if turns < collected:
        yield IndivisibleBatchError(
            f"train.total_dialog_turns={turns} is less than one collection, {collected} responses",
            "run",
            {"train.total_dialog_turns": [collected]},
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order; above 1e12 only pairs with one up to 1e6, enough for a proposal.

    >>> divisors(12), divisors(16), len(divisors(2**62))
    ([1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16], 40)
    """
    lower = [divisor for divisor in range(1, min(math.isqrt(number), 1_000_000) + 1) if number % divisor == 0]
    return sorted({*lower, *(number // divisor for divisor in lower)})


def _nearest(number: int, fitting: Iterable[int]) -> list[int]:
    """The greatest of the fitting values below a number, and the least above it.

    >>> _nearest(20, [8, 16, 32, 64]), _nearest(5, [0, 3])
    ([16, 32], [3])
    """
    fitting = [value for value in fitting if value > 0]
    below, above = [value for value in fitting if value < number], [value for value in fitting if value > number]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
