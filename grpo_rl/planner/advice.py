"""Which devices should do what, and what to change where something does not fit; every advice was planned itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from grpo_rl.planner.hardware import GIB
from grpo_rl.planner.memory import reference_weights
from grpo_rl.planner.plan import USABLE, Plan, make_plan
from grpo_rl.planner.question import Question, tensor_parallel_sizes

LARGEST_CLUSTER = 1024
BEST_UTILIZATION = 0.9
"""Of a device that samples alone."""


@dataclass(frozen=True)
class Split:
    """Devices of a step and the seconds that it takes.

    Args:
        train: devices that train; in turns with sampling they are those that sample.
        inference: devices that sample.
        size: of an engine.
        utilization: ``inference_model.gpu_memory_utilization``.
        seconds: of each phase.
        step_s: of a step.
        missing_gib: what the fullest device lacks.
    """

    train: int
    inference: int
    size: int
    utilization: float
    seconds: Mapping[str, float]
    step_s: float
    missing_gib: float = 0.0

    @property
    def settings(self) -> dict[str, object]:
        """The keys that ask for it."""
        devices: dict[str, object] = {"train_model.num_devices": self.train}
        if self.inference:
            devices["inference_model.num_devices"] = self.inference
        else:
            devices |= {"mode": "sync", "inference_model.sleep": True}
        return devices | {
            "inference_model.tensor_parallel_size": self.size,
            "inference_model.gpu_memory_utilization": self.utilization,
        }


def at_once(question: Question) -> Split | None:
    """The split with which a step is shortest where sampling and training go on at the same time; None: none fits.

    Of those that are about as short, the one whose phases take least together: its waiting side has most to spare.
    """
    fitting = [split for split in _splits(question) if not split.missing_gib]
    shortest = min((split.step_s for split in fitting), default=0.0)
    about = [split for split in fitting if split.step_s <= 1.01 * shortest]
    return min(about, key=lambda split: (sum(split.seconds.values()), split.size), default=None)


def in_turns(question: Question) -> Split | None:
    """The same where all devices sample, then all train, and the engine sleeps meanwhile: its memory is given back.

    Awake it takes what the trainer's state leaves. On several devices that is to compare with: no script runs vLLM in
    turns with several trainers (:attr:`grpo_rl.planner.plan.Plan.refused`).
    """
    count, memory = question.cluster.count, question.cluster.device.memory
    over = count if question.sharded(count) else 1
    kept = reference_weights(question.shape, over) if question.reference_apart else 0.0
    if kept + question.trainer(count, question.tokens(count)).total > USABLE * memory:
        return None
    kept += question.kept(count)
    utilization = min(BEST_UTILIZATION, math.floor(20 * (USABLE - kept / memory)) / 20)
    question = question.having({"inference_model.gpu_memory_utilization": utilization})
    splits = []
    for size in tensor_parallel_sizes(question, count):
        seconds = question.seconds(count, count, count // size, size, colocated=True)
        if question.engine(size).tokens >= question.cfg.inference_model.max_model_len:
            splits.append(Split(count, 0, size, utilization, seconds, sum(seconds.values())))
    return min(splits, key=lambda split: split.step_s, default=None)


def neighbours(question: Question, split: Split) -> list[Split]:
    """Splits that fit, with engines of the same size, a sixteenth and an eighth of the devices to either side."""
    count = question.cluster.count
    same = [
        other
        for other in _splits(question)
        if not other.missing_gib and other.size == split.size and other.train != split.train
    ]
    found: list[Split] = []
    for away in (-count / 8, -count / 16, count / 16, count / 8):
        side = [other for other in same if (other.train - split.train) * away > 0 and other not in found]
        if side:
            found.append(min(side, key=lambda other: abs(other.train - split.train - away)))
    return sorted(found, key=lambda other: other.train)


def divided(question: Question) -> tuple[Question, list[str]]:
    """The question with devices given to each role, and the settings that do it.

    Nothing is changed where the config divides them itself, or there is one. An engine on devices of its own may take
    :data:`BEST_UTILIZATION` of them; the config's share is for one that has to leave room for a trainer.
    """
    cfg, count = question.cfg, question.cluster.count
    asked = [cfg[role][key] for role in ("train_model", "inference_model") for key in ("num_devices", "devices")]
    if any(value is not None for value in asked) or count == 1:
        return question, []
    if question.mode == "async":
        apart = question.having({"inference_model.gpu_memory_utilization": BEST_UTILIZATION})
        longest = cfg.inference_model.max_model_len
        if not (splits := list(_splits(apart))):
            raise ValueError(f"{count} devices are too few to train, to sample and for ref_model; leave ref_model null")
        # Where nothing fits, at least an engine that does: it is the smaller of both.
        settings = (
            at_once(apart)
            or min(splits, key=lambda split: (apart.engine(split.size).tokens < longest, split.missing_gib))
        ).settings
    elif split := in_turns(question):
        settings = split.settings
    else:
        size = max(tensor_parallel_sizes(question, count))
        settings = {"train_model.num_devices": count, "inference_model.tensor_parallel_size": size}
        settings |= {"mode": "sync", "inference_model.sleep": True}
    if settings["train_model.num_devices"] != 1 and cfg.train_model.parallel is None:
        settings["train_model.parallel"] = "fsdp"
    return question.having(settings), [written(settings)]


def _splits(question: Question) -> Iterator[Split]:
    """Every split of all devices into trainers and engines.

    A reference shares the trainers' devices, or has one of its own beside a single trainer.
    """
    count, cfg = question.cluster.count, question.cfg
    own_ref = cfg.ref_model.num_devices or len(cfg.ref_model.devices or ())
    usable, utilization = USABLE * question.cluster.device.memory, cfg.inference_model.gpu_memory_utilization
    for size in tensor_parallel_sizes(question, 2 ** int(math.log2(max(1, count - 1)))):
        engine = question.engine(size)
        least = question.cfg.inference_model.max_model_len * engine.kv_per_token
        lacks = max(0.0, engine.weights + engine.work + least - min(engine.budget, usable))
        for ranks in range(1, count - own_ref):
            inference = count - own_ref - ranks
            if inference % size or ranks > (1 if own_ref else question.most_ranks):
                continue
            over = ranks if question.sharded(ranks) else 1
            needs = question.trainer(ranks, question.tokens(ranks)).total
            if question.reference_apart and not own_ref:
                needs += reference_weights(question.shape, over)
            missing = max(0.0, needs - usable, lacks) / GIB
            seconds = question.seconds(ranks, ranks, inference // size, size, colocated=False)
            rest = sum(s for phase, s in seconds.items() if phase != "sample")
            yield Split(ranks, inference, size, utilization, seconds, max(seconds["sample"], rest), missing)


def remedies(plan: Plan) -> dict[str, list[str]]:
    """For each role that does not fit, the settings that make it fit, each by itself; else pairs of them, else none.

    What is said was planned: with it that role fits, and no other lacks more than before.
    """
    return {role: list(_remedies(plan, role)) for role in plan.missing}


def _remedies(plan: Plan, role: str) -> Iterator[str]:
    candidates = list(_candidates(plan, role))
    singles = [found for candidate in candidates if (found := _first(plan, role, [candidate]))]
    if singles:
        yield from map(written, singles)
        return
    for pair in itertools.combinations(candidates, 2):
        if found := _first(plan, role, pair):
            yield written(found)


def _candidates(plan: Plan, role: str) -> Iterator[tuple[str, list[object]]]:
    """Keys that may help, and their values, the least change first."""
    question, cfg, devices = plan.question, plan.question.cfg, plan.devices
    free = question.cluster.count - len({*devices.train, *devices.ref, *devices.inference})
    inference, utilization = cfg.inference_model, cfg.inference_model.gpu_memory_utilization
    shares = [round(0.05 * i, 2) for i in range(2, 19)]
    if role == "train":
        if not cfg.train_model.gradient_checkpointing:
            yield "train_model.gradient_checkpointing", [True]
        if question.longest_group <= plan.largest_tokens < cfg.train.micro_batch_tokens:
            yield "train.micro_batch_tokens", [plan.largest_tokens]
        if devices.colocated and not question.sleeps:
            yield "inference_model.gpu_memory_utilization", [s for s in shares[::-1] if s < utilization]
            if question.visible:
                yield "inference_model.sleep", [True]
        ranks = len(devices.train)
        if question.visible and not cfg.train_model.devices:
            yield "train_model.num_devices", list(range(ranks + 1, ranks + free + 1))
        fitting = (plan.largest_tokens - (inference.max_model_len - question.answer)) // question.batches.largest
        if 64 <= fitting < question.answer:
            yield "sampling.max_new_tokens", [fitting // 64 * 64]
        if not cfg.train_model.lora.rank:
            yield "train_model.lora.rank", [16]
    if role == "inference":
        if not devices.colocated:
            yield "inference_model.gpu_memory_utilization", [s for s in shares if s > utilization]
        elif question.sleeps:
            yield "inference_model.gpu_memory_utilization", [s for s in shares[::-1] if s < utilization]
        sizes = tensor_parallel_sizes(question, len(devices.inference))
        yield "inference_model.tensor_parallel_size", [size for size in sizes if size > devices.tensor_parallel_size]
        if (length := plan.largest_len // 64 * 64) > question.answer:
            yield "inference_model.max_model_len", [length]
    if question.visible:
        doubled = [question.cluster.count * 2**i for i in range(1, 11)]
        yield "cluster", [count for count in doubled if count <= LARGEST_CLUSTER]


def _first(plan: Plan, role: str, candidates: Iterable[tuple[str, list[object]]]) -> dict[str, object] | None:
    """The first values of these keys together with which the role fits."""
    keys, values = zip(*candidates, strict=True)
    for chosen in itertools.product(*values):
        settings = dict(zip(keys, chosen, strict=True))
        try:
            question = plan.question.having(settings)
            if "cluster" in settings and question.visible:
                question, _ = divided(_undivided(question))
            other = make_plan(question)
        except ValueError:
            continue  # a value that this config can't have
        if all(name != role and gib <= plan.missing.get(name, 0.0) for name, gib in other.missing.items()):
            return settings
    return None


def _undivided(question: Question) -> Question:
    """On a larger cluster the devices are divided anew."""
    roles = ("train_model", "inference_model")
    return question.having({f"{role}.{key}": None for role in roles for key in ("num_devices", "devices")})


def written(settings: Mapping[str, object]) -> str:
    """Settings as overrides.

    >>> written({"train_model.gradient_checkpointing": True, "train.micro_batch_tokens": 512})
    'train_model.gradient_checkpointing=true train.micro_batch_tokens=512'
    """
    told = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return " ".join(f"{key}={value}" for key, value in told.items())
