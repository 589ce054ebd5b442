"""Builds a run from its settings, as both scripts do before their loops.

:class:`Restarts` hands on the run's folder to ranks that start again, with their number and why the last one ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_rl.assembly import devices, sync, training
from grpo_rl.assembly.environment import eval_rows, eval_tasks, made, make_env, with_transforms
from grpo_rl.collectors.base import BroadcastCollector, Collector
from grpo_rl.diagnosis.mismatch import Mismatch
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.loggers.base import check_loggers
from grpo_rl.perf.roofline import StepRoofline
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.policies.hub import resolve_model, weight_files
from grpo_rl.policies.loading import check_written
from grpo_rl.run.diagnosis import RunDiagnosis
from grpo_rl.run.folder import Room, RunFolder
from grpo_rl.run.held_out import HeldOut
from grpo_rl.run.hooks import Hook
from grpo_rl.run.logs import RunLogs
from grpo_rl.run.origin import config_hash, origin, revisions
from grpo_rl.run.parts import Parts
from grpo_rl.run.run import Interrupt, Run, RunOptions
from grpo_rl.run.step_metrics import step_metrics
from grpo_rl.run.summary import BestModel, FinalModel, ResultFiles, best_kept
from grpo_rl.settings import derived
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.sections import Train
from grpo_rl.training import checkpoint
from grpo_rl.training.micro_batches import WithinMemory
from grpo_rl.training.schedules import AdaptiveEntropy, AdaptiveKL, RefreshRule, Schedules
from grpo_rl.waits import start_phase, waiting, watching
from grpo_rl.weights.push import NullTransport, WeightSync

if TYPE_CHECKING:
    from grpo_rl.assembly.agents import Agents

BYTES_PER_PARAMETER = 12
"""Bytes of a checkpoint per parameter: fp32 weights and AdamW's two moments."""


def sync_run(settings: Settings, folder: str | Path) -> AbstractContextManager[Run]:
    """A run that alternates sampling and training, in this process or in those that torchrun started.

    Raises:
        ValueError: the settings do not fit this machine, the model or the data; before anything expensive starts.
        RunIsOver: the run to go on with is finished; a `SystemExit` with code 0.
    """
    with start_phase(f"finding {settings.model.name}"):
        model = resolve_model(settings.model.name)
        plan = devices.plan_devices(settings, model)
    make_ranks = partial(devices.make_ranks, settings, plan)
    make_engine = partial(sync.make_engine, settings, model, plan)
    return build_run(settings, folder, model, plan, make_ranks, make_engine, partial(sync.make_collector, settings))


@contextmanager
def build_run(
    settings: Settings,
    own_folder: str | Path,
    model: Path,
    plan: Devices,
    make_ranks: Callable[[], Ranks | None],
    make_engine: Callable[[], Any],
    make_collector: Callable[[LLMEnv, Any, WeightSync, int, Agents | None], Collector],
) -> Iterator[Run]:
    """Builds a run from the parts common to both modes and those that the arguments make.

    Args:
        model: the folder of the initial model.
        make_engine: makes the engine; called on rank zero alone.
        make_collector: makes rank zero's collector from environment, engine, weights and the number of collected
            responses.
    """
    # Wrong data and settings are found before the folder is claimed and a model is loaded.
    check_loggers(settings.logger.backend, settings.logger.settings)
    with start_phase(f"reading the data of {settings.env.dataset}"):
        tokenizer = load_tokenizer(model, settings.model)
        check_written(model, tokenizer)
        env = make_env(settings, tokenizer)
        if settings.loss.turn_credit and env.max_turns == 1:
            raise ValueError(f"loss.turn_credit: {settings.env.dataset} has conversations of one turn; set it to 0")
        rows, others = eval_rows(settings, env), eval_tasks(settings, tokenizer, env)
        agents = sync.make_agents(settings, tokenizer)
        transformed = with_transforms(env, settings.env.transforms)
    loss, buffer, hooks = training.make_loss(settings), training.make_buffer(settings), made(settings.hooks, "hooks")
    advantages = training.make_advantages(settings, env.task.reward_parts)
    with ExitStack() as stack:
        for held in (env, *(task.env for task in others)):
            stack.callback(held.close)
        ranks, folder, logs, interrupt = begin(
            stack,
            settings,
            own_folder,
            model,
            make_ranks,
            settings.train,
            lambda folder: RunLogs(
                folder, settings.logger, settings.train, derived.total_steps(settings), tokenizer, loss
            ),
        )
        for task in (env.members or {"": env}).values():
            task.guard.tell = logs.note
        if env.skipped:
            logs.note(f"{env.skipped} of {len(env.task.rows)} prompts are too long and left out")
        if folder.rank_zero:
            env.task.place((plan.reward or plan.train)[0])
        policy = training.load_policy(settings, model, plan, ranks, logs)
        with logs.progress.start_phase("loading the reference") if settings.policy.kl_coef else nullcontext():
            reference = training.make_reference(settings, model, plan, policy, env)
        optimizer = training.make_optimizer(settings, policy, ranks)
        stack.callback(optimizer.close)
        # Measured once per machine, before an engine takes the machine's memory.
        batching, roofline = derived.micro_batching(settings), None
        if ranks is None and settings.mode != "async":  # this process can't measure what others do meanwhile
            with logs.progress.start_phase("measuring this machine"):
                roofline = StepRoofline(
                    policy.model,
                    settings.train.epochs,
                    batching.skip_zero_advantage,
                    batching.mask_truncated,
                    len(plan.inference),
                    pushes_adapters=derived.pushes_adapters(settings),
                )
        if folder.rank_zero:
            name = "vLLM" if settings.inference_model.engine == "vllm" else "the transformers engine"
            with logs.progress.start_phase(f"starting {name}"):
                engine = make_engine()
        else:
            engine = NullTransport(getattr(torch, derived.dtype(settings)), derived.pushes_adapters(settings))
        stack.callback(engine.close)
        weights = WeightSync(policy.model, engine, ranks=ranks)
        own = make_collector(transformed, engine, weights, folder.collected, agents) if folder.rank_zero else None
        collector = BroadcastCollector(own, weights, folder.collected) if ranks else own
        assert collector
        stack.callback(collector.shutdown)

        if reference and derived.compares_full_vocabulary(settings):
            policy.distillation = reference, settings.loss.kl
        coefs = settings.policy
        if coefs.target_entropy is not None:
            loss.entropy_coef = 0.0  # until an entropy is known
        parts = Parts(
            env=env,
            tokenizer=tokenizer,
            policy=policy,
            reference=reference,
            optimizer=optimizer,
            engine=engine,
            weights=weights,
            collector=collector,
            schedules=Schedules(
                AdaptiveKL(coefs.kl_coef, coefs.target_kl),
                RefreshRule(settings.ref_model.refresh, settings.ref_model.refresh_steps, settings.ref_model.decay),
                loss if settings.loss.kl_in == "loss" else advantages,
                reference,
                policy,
                AdaptiveEntropy(
                    coefs.entropy_coef,
                    coefs.target_entropy,
                    coefs.entropy_coef_delta,
                    coefs.entropy_coef_max,
                ),
                loss,
            ),
            loss=loss,
            compute_advantages=advantages,
            buffer=buffer,
            within_memory=WithinMemory(policy, batching, optimizer.clear_gradients),
            needs_old_log_probs=derived.needs_old_log_probs(settings),
        )
        sampling, best = Sampling(**settings.sampling), _best(folder, logs, settings.evaluate.keep_best, ranks)
        held_out = HeldOut(
            transformed,
            rows,
            sampling,
            settings.evaluate,
            others,
            settings.train.seed,
            before=folder.eval_before,
            last=folder.eval_after,
            best=best,
            sessions=agents.held_out if agents else None,
        )
        mismatch = Mismatch(settings.mismatch.bound, max_staleness=derived.max_staleness(settings))
        with Run(
            folder,
            logs,
            parts,
            RunDiagnosis(parts, mismatch, sampling, alone=ranks is None),
            held_out,
            partial(step_metrics, mismatch, roofline, settings.train.max_resamples > 0),
            interrupt,
            options(settings, settings.train, folder, model),
            ranks,
            all_hooks(settings, logs, hooks),
        ) as run:
            yield run


def begin(
    stack: ExitStack,
    settings: Settings,
    own_folder: str | Path,
    model: Path,
    make_ranks: Callable[[], Ranks | None],
    train: Train,
    make_logs: Callable[[RunFolder], RunLogs],
) -> tuple[Ranks | None, RunFolder, RunLogs, Interrupt]:
    """Joins the ranks, and opens the run's folder and its logs; the stack closes them."""
    watcher = stack.enter_context(watching(settings.logger.wait_deadline_s))
    ranks = make_ranks()
    if ranks:
        stack.enter_context(ranks)
    room = needed_room(settings, sum(path.stat().st_size for path in weight_files(model)))
    config = settings.stored()
    with waiting("the run's folder, and the checkpoint to resume from"):
        restarts = Restarts.find(ranks, config) if ranks else Restarts()
        own, resume = restarts.place(own_folder, settings.resume)
        folder = stack.enter_context(RunFolder(own, resume, config, settings.as_text(), room, train, ranks))
        if ranks:
            restarts.leave(ranks, config, folder.shared, folder.restarts)
            folder.restarts = restarts.count
            if restarts.folder:
                reason = f": {restarts.reason}" if restarts.reason else ""
                folder.notes.append(f"Restart {restarts.count} of the run, with {ranks.size} ranks{reason}")
    stack.enter_context(watcher.telling(folder.shared, ranks.rank if ranks else 0, ranks.size if ranks else 1))
    folder.prepare()
    logs = stack.enter_context(make_logs(folder))
    for note in folder.notes:
        logs.note(note)
    if folder.rank_zero:
        stack.enter_context(watcher.saying(logs.note))
    if ranks and ranks.watch:  # this rank's heartbeats, and the message about a lost rank
        ranks.watch.doing, ranks.watch.advice = logs.progress.doing, folder.how_to_go_on
    return ranks, folder, logs, stack.enter_context(Interrupt(logs.note))


def all_hooks(settings: Settings, logs: RunLogs, own: Sequence[Hook]) -> list[Hook]:
    """The run's hooks: models, logs, result files, and those of the user, who finds all that was written."""
    adapters = settings.train_model.lora.export
    return [BestModel(adapters), FinalModel(adapters), *logs.hooks, ResultFiles(), *own]


def options(settings: Settings, train: Train, folder: RunFolder, model: Path) -> RunOptions:
    """The options of a run in the settings' mode; a resumed run keeps the origin of its first start."""
    before = folder.restored[1].get("origin") if folder.restored else None
    return RunOptions(
        train,
        settings.evaluate.frequency,
        settings.model.name,
        settings.env.dataset,
        {"async": "wait", "sft": "read"}.get(settings.mode or "", "sample"),
        settings.inference_model.sleep,
        origin(folder.config, before) | revisions(model, settings.env, before),
    )


def needed_room(settings: Settings, model_bytes: float) -> Room:
    """The disk space that a run of a model of so many bytes needs."""
    # Checkpoints of adapters are small next to the model.
    parameters = 0 if settings.train_model.lora.rank else model_bytes / 2
    reference = {"never": 0, "average": 4}.get(settings.ref_model.refresh, 2)  # bytes of a parameter, when renewed
    return Room(
        1 + settings.train.keep_checkpoints,  # one more while the next is written
        parameters * (BYTES_PER_PARAMETER + reference),
        model_bytes,
        2 if settings.evaluate.rows and settings.evaluate.keep_best else 1,
    )


def _best(folder: RunFolder, logs: RunLogs, keeps: bool, ranks: Ranks | None) -> dict | None:
    """The tracker's state of a resumed run, without the best where its model is not kept."""
    state = folder.best
    if not (state and keeps):
        return state
    kept = best_kept(folder.path) if folder.rank_zero else None
    kept = ranks.broadcast(kept) if ranks else kept
    if state["best"] and kept != state["best"][0]:
        logs.note(f"The best model, of step {state['best'][0]}, is not there; the next evaluation is the best so far")
        state = {**state, "best": None}
    return state


@dataclass
class Restarts:
    """The earlier starts of a run by the launcher that started this one.

    torchrun, and the script that started trainers as Ray's actors, hold a store that outlives the ranks. A run writes
    its folder there; ranks that are started again find it, whatever ``hydra.run.dir`` and ``resume`` say.

    Args:
        count: how often the run was started again; 0: this is the first start.
        folder: the folder that the earlier starts wrote to.
        reason: which rank was lost in the last start, if that was found out.
    """

    count: int = 0
    folder: Path | None = None
    reason: str = ""

    @classmethod
    def find(cls, ranks: Ranks, config: Mapping[str, Any]) -> Restarts:
        """The state that earlier starts with the same config left; every rank calls this."""
        found = cls()
        if ranks.rank == 0 and ranks.watch and ranks.watch.store.check([_key(config)]):
            left = json.loads(ranks.watch.store.get(_key(config)))
            found = cls(left["restarts"] + 1, Path(left["folder"]), ranks.watch.lost_in(left["watch"]))
        return ranks.broadcast(found)

    def place(self, own: str | Path, resume: str | None) -> tuple[str | Path, str | None]:
        """The folder of a new run and ``resume``, as the run of the earlier starts needs them to go on.

        A run that went on from a checkpoint of another folder, and has none of its own yet, does so again.
        """
        if self.folder is None:
            return own, resume
        has_own = bool(checkpoint.checkpoints(self.folder / checkpoint.CHECKPOINTS))
        return self.folder, str(self.folder) if has_own or resume in (None, "auto") else resume

    def leave(self, ranks: Ranks, config: Mapping[str, Any], folder: Path, before: int) -> None:
        """Leaves the run's folder to later starts; rank zero does.

        Args:
            before: restarts that the checkpoint counts, if this is the launcher's first start.
        """
        self.count = self.count if self.folder else before
        if ranks.rank == 0 and ranks.watch:
            left = {"folder": str(folder), "restarts": self.count, "watch": ranks.watch.name}
            ranks.watch.store.set(_key(config), json.dumps(left))


def _key(config: Mapping[str, Any]) -> str:
    return f"grpo_rl/run {config_hash(config)}"
