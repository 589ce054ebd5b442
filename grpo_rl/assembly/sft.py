"""Builds a run of SFT from its settings: that of sota/sft.py, with a collector of demonstrations and no engine."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo_rl.assembly import devices, training
from grpo_rl.assembly.environment import held_out_rows, made, task_settings
from grpo_rl.assembly.run import all_hooks, begin, options
from grpo_rl.by_name import is_name
from grpo_rl.collectors.base import Collector
from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.diagnosis.mismatch import Mismatch
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.demonstrations import Demonstrations
from grpo_rl.envs.own import check_prompts
from grpo_rl.envs.spec import task_spec
from grpo_rl.loggers.base import check_loggers
from grpo_rl.losses.sft import SFTLoss
from grpo_rl.policies.generation import end_ids, load_tokenizer
from grpo_rl.policies.hub import resolve_model
from grpo_rl.policies.loading import check_written
from grpo_rl.run.folder import RunFolder
from grpo_rl.run.logs import RunLogs
from grpo_rl.run.parts import CommonParts
from grpo_rl.run.run import Run
from grpo_rl.run.sft import HeldOutDemonstrations, SFTDiagnosis, sft_metrics
from grpo_rl.settings.derived import dtype, train_source
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.sections import Train
from grpo_rl.training.micro_batches import WithinMemory
from grpo_rl.training.schedules import AdaptiveKL, RefreshRule, Schedules
from grpo_rl.waits import start_phase
from grpo_rl.weights.push import NullTransport, WeightSync


class DemonstrationCollector(Collector):
    """The `Collector` of SFT: the rows of each optimizer step in turn, every row once an epoch.

    Args:
        batch: rows of a step; the last step of the run takes those that are left.
        total: rows of the whole run, those of all epochs.
        collected: rows that were handed out before a resume.
    """

    def __init__(self, demonstrations: Demonstrations, batch: int, total: int, collected: int = 0) -> None:
        self._demonstrations, self._batch, self._total = demonstrations, batch, total
        self.collected = collected
        self.sample_s = 0.0
        self.sampled: list[Group] = []
        """Empty: nothing is sampled."""

    def collect(self) -> list[Group]:
        """The rows of the next step, whatever the group size: a group has the one response of its row."""
        started = time.perf_counter()
        groups = self._demonstrations.take(min(self._batch, self._total - self.collected))
        self.collected += len(groups)
        self.sample_s = time.perf_counter() - started
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self._demonstrations.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self._demonstrations.restore(state)

    def metrics(self) -> dict[str, float]:
        """The passes over the data so far."""
        return {"train/epoch": self.collected / len(self._demonstrations)}

    def shutdown(self) -> None:
        """Ends nothing."""


@contextmanager
def sft_run(settings: Settings, own_folder: str | Path) -> Iterator[Run[CommonParts]]:
    """A run that imitates the data's responses; for processes and errors see `grpo_rl.assembly.run.sync_run`."""
    check_loggers(settings.logger.backend, settings.logger.settings)
    with start_phase(f"finding {settings.model.name}"):
        model = resolve_model(settings.model.name)
        plan = devices.plan_devices(settings, model)
    with start_phase(f"reading the data of {settings.env.dataset}"):
        tokenizer = load_tokenizer(model, settings.model)
        check_written(model, tokenizer)
        rows = make_demonstrations(settings, tokenizer, end_ids(model))
        held_out, hooks = rows.groups(held_out_rows(settings, rows.task)), made(settings.hooks, "hooks")
    epochs, batch = settings.train.epochs, settings.train.optim_batch_size
    total = epochs * len(rows)
    train = settings.train.model_copy(update={"total_dialog_turns": total})
    with ExitStack() as stack:
        make_ranks = partial(devices.make_ranks, settings, plan)
        ranks, folder, logs, interrupt = begin(
            stack, settings, own_folder, model, make_ranks, train, partial(_make_logs, settings, train)
        )
        _tell_rows(logs, rows)
        policy = training.load_policy(settings, model, plan, ranks, logs)
        optimizer = training.make_optimizer(settings, policy, ranks, steps_of(train, folder))
        stack.callback(optimizer.close)
        nowhere = NullTransport(getattr(torch, dtype(settings)), takes_adapters=False)
        max_tokens, count = settings.train.micro_batch_tokens, settings.train.gradient_accumulation_steps
        batching = MicroBatching(max_tokens, count, aggregate="token_mean")
        within_memory = WithinMemory(policy, batching, optimizer.clear_gradients)
        parts = CommonParts(
            env=rows,
            tokenizer=tokenizer,
            policy=policy,
            optimizer=optimizer,
            engine=None,
            weights=WeightSync(policy.model, nowhere, ranks=ranks),  # for the base of adapters
            collector=DemonstrationCollector(rows, batch, total, folder.collected),
            schedules=Schedules(AdaptiveKL(0.0), RefreshRule(), AdvantageEstimator()),
            loss=SFTLoss(),
            within_memory=within_memory,
        )
        with Run(
            folder,
            logs,
            parts,
            SFTDiagnosis(parts, Mismatch(), Sampling(), alone=ranks is None),
            HeldOutDemonstrations(policy, held_out, within_memory, folder.eval_before),
            sft_metrics,
            interrupt,
            options(settings, train, folder, model),
            ranks,
            all_hooks(settings, logs, hooks),
        ) as run:
            yield run


def make_demonstrations(settings: Settings, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Demonstrations:
    """The rows of ``env.dataset`` with the responses that SFT imitates, checked against the lengths of GRPO."""
    given, spec, longest = settings.env, task_spec(settings.env.dataset), settings.sampling.max_new_tokens
    task = spec.make_task(train_source(settings), **spec.parted(task_settings(settings))[0])
    if is_name(given.dataset):
        check_prompts(task, task.rows, given.dataset)
    return Demonstrations(
        task,
        tokenizer,
        ends,
        max_prompt_tokens=settings.inference_model.max_model_len - longest,
        max_response_tokens=longest,
        long_prompt=given.long_prompt,
        seed=settings.train.seed,
    )


def steps_of(train: Train, folder: RunFolder) -> int:
    """Steps of the whole run; one that is prolonged keeps the short step that it ended with."""
    return folder.step + -(-(train.total_dialog_turns - folder.collected) // train.optim_batch_size)


def _make_logs(settings: Settings, train: Train, folder: RunFolder) -> RunLogs:
    logs = RunLogs(folder, settings.logger, train, steps_of(train, folder))  # no tokenizer: no responses to store
    logs.progress.title = "SFT"
    return logs


def _tell_rows(logs: RunLogs, rows: Demonstrations) -> None:
    if rows.skipped:
        logs.note(f"{rows.skipped} of {len(rows.task.rows)} rows are too long and left out")
    if wrong := rows.written_otherwise:
        share = f"{len(wrong)} of {len(rows)}"
        logs.note(
            f"Warning. The chat template writes {share} demonstrations (the first is row {wrong[0]}) with other "
            "ids than GRPO would sample them with: it changes earlier turns, or generation stops elsewhere. They "
            "are trained on as GRPO samples: prompt, text, generation's end"
        )
