"""Checks of a model with its weights: sampler against trainer, a gradient, a push of changed weights."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from grpo_rl.checks.check import Case, Finding, unfit
from grpo_rl.checks.model import source_of
from grpo_rl.checks.trial import QUESTIONS, Trial, in_one_process, trial
from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.group import Group
from grpo_rl.diagnosis.causes import DiagnosisContext
from grpo_rl.diagnosis.mismatch import Mismatch, MismatchError
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.settings.derived import micro_batching
from grpo_rl.training.micro_batches import MicroBatching, scored_micro_batches


def weights(case: Case) -> Iterator[Finding]:
    """The findings on the model with its weights, in one process: it samples, scores that, and gets a gradient."""
    if case.quick or case.cluster:
        elsewhere = "each node has its own; run `grpo-rl doctor` without --ray on one"
        yield Finding("SKIP", "weights", "--quick reads none" if case.quick else elsewhere)
        return
    folder, settings = Path(source_of(case)), in_one_process(case.read, torch.cuda.device_count())
    with trial(settings, folder, load_tokenizer(folder, settings.model)) as parts:
        count = sum(p.numel() for p in parts.policy.model.parameters())
        arrived = f"proven to have arrived in {settings.inference_model.engine}"
        yield Finding("OK", "weights", f"{count / 1e6:,.1f} million, finite, {arrived}")
        with unfit("sampling"):
            groups = parts.groups()
        yield _sampled(parts, groups)
        with unfit("sampler, trainer"):
            yield from _compared(parts, groups, micro_batching(settings), settings.mismatch.bound)


def _sampled(parts: Trial, groups: list[Group]) -> Finding:
    lengths = [len(ids) for group in groups for ids in group.responses]
    ended = len(lengths) - sum(int(group.truncated.sum()) for group in groups if group.truncated is not None)
    first = parts.text(groups[0].responses[0])
    text = f"{len(lengths)} responses, {sum(lengths)} tokens, {ended} ended within {parts.sampling.max_new_tokens}"
    return Finding("OK", "sampling", f"{text}; to {QUESTIONS[0]!r}: {first!r}")


def _compared(parts: Trial, groups: list[Group], batching: MicroBatching, bound: float | None) -> Iterator[Finding]:
    # Every second response is rewarded, so that there is a gradient whatever their text.
    groups = [replace(group, rewards=(torch.arange(group.size) % 2).float()) for group in groups]
    # What a loss leaves out is scored here as well: the trial's short responses may be all cut off.
    batching = replace(batching, on_policy=True, mask_truncated=False, top_entropy_fraction=1.0, covariance=None)
    mismatch = Mismatch(bound)
    for tokens in scored_micro_batches(parts.policy, AdvantageEstimator()(groups), batching):
        mismatch.add(tokens.detach(), groups, parts.weights.version)
        GRPOLoss()(tokens)["loss"].backward()
    context = DiagnosisContext(
        parts.policy,
        parts.weights,
        parts.engine,
        parts.sampling,
        batching.max_tokens,
        lambda group: repr(QUESTIONS[group.row]),
        parts.text,
    )
    try:
        warning = mismatch.judge(context)
    except MismatchError as error:
        yield Finding("FIX", "sampler, trainer", str(error))
    else:
        seen = mismatch.metrics()
        if not math.isfinite(seen["mismatch/mean"]):  # which a run leaves to its optimizer step
            raise ValueError("log-probs are not finite; try train_model.dtype=float32 where it is another")
        text = f"log-probs differ by {seen['mismatch/mean']:.2g} nats a token in the mean"
        text += f" (a run stops above {bound:g})" if bound else ""
        text += f", {seen['mismatch/max']:.2g} at most; mass kept {seen['mismatch/mass_kept']:.3f}"
        yield Finding("note" if warning else "OK", "sampler, trainer", f"{text}. {warning}" if warning else text)
    yield _gradient(parts)
    with unfit("push"):
        yield _pushed(parts)


def _pushed(parts: Trial) -> Finding:
    """Pushes weights that differ from those that the engine has read itself, and reads back what it computes with."""
    trained = [weight for weight in parts.policy.model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data.add_(weight.data.abs().mean() / 8 + 2.0**-7)
    began = time.monotonic()
    parts.weights.push()
    seconds = time.monotonic() - began
    parts.weights.verify()
    size = sum(weight.nbytes for weight in trained) / 2**20
    text = f"{len(trained)} changed tensors ({size:,.0f} MiB) sent in {seconds:.2g} s, proven, and read back the same"
    return Finding("OK", "push", text)


def _gradient(parts: Trial) -> Finding:
    gradients = {n: p.grad for n, p in parts.policy.model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm().item()
    if broken := [name for name, gradient in gradients.items() if not gradient.isfinite().all()]:
        found = f"{len(broken)} of {len(gradients)} tensors are not finite, {broken[0]} first"
        return Finding("FIX", "gradient", f"{found}; try train_model.dtype=float32 where it is another")
    return Finding("OK", "gradient", f"of a micro-batch of these responses: finite, norm {norm:.2g}")
