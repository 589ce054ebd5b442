"""The origin of a NaN or an infinity: the first tensor, layer, group and prompt, found by doing the step again.

A healthy step pays nothing for it: only after a step whose loss or gradient was not finite are the forward and backward
pass repeated, on the weights of that step, one group at a time and with every module watched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.engines.base import forked_random_state
from grpo_rl.losses.aggregate import StepTotals
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.training.micro_batches import scored_micro_batches, step_totals
from grpo_rl.training.optimizer import PolicyOptimizer

COMPUTED = ("log_prob", "entropy", "teacher_kl")
"""Entries that the policy adds to a group's tokens, the last with a teacher; all else was there before."""


@torch.enable_grad()
def locate_nonfinite(
    policy: TrainPolicy,
    loss: LossModule,
    optimizer: PolicyOptimizer,
    batch: Sequence[Group],
    batching: MicroBatching,
    describe: Callable[[Group], str],
) -> str:
    """A sentence on what is not finite first, its group as ``describe`` names it. Gradients summed so far are lost."""
    if broken := [name for name, x in policy.model.named_parameters() if not x.isfinite().all()]:
        return f"The weights themselves hold it: {broken[0]}, {len(broken)} in all."
    # Each group by itself, with the weights that its tokens have in the step; there is nothing to split it into.
    totals = step_totals(batch, batching)
    batching = replace(batching, count=None)
    try:
        for group in batch:
            optimizer.clear_gradients()
            # A run that goes on draws the same random numbers as without this search.
            with forked_random_state(), _watched(policy.model) as seen:
                found = _in_group(policy, loss, optimizer, group, batching, totals, seen)
            if found:
                return f"It comes from {describe(group)}: {found}."
    except torch.OutOfMemoryError:
        return "Where it comes from could not be traced: out of memory."
    finally:
        optimizer.clear_gradients()
    return f"None of the {len(batch)} groups has it by itself: it is their sum that overflows, or a compiled kernel."


def _in_group(
    policy: TrainPolicy,
    loss: LossModule,
    optimizer: PolicyOptimizer,
    group: Group,
    batching: MicroBatching,
    totals: StepTotals,
    seen: dict[str, str],
) -> str | None:
    # On-policy, the trainer's old log-probabilities are a copy of its present ones.
    computed = (*COMPUTED, "old_log_prob") if batching.on_policy else COMPUTED
    for tokens in scored_micro_batches(policy, [group], batching, totals):
        given = [name for name in tokens.keys() if name not in computed]
        if place := _place(tokens, given, group):
            return f"{place}, which was not finite before it was scored"
        if place := _place(tokens, COMPUTED, group):
            where = f"in the output of {seen['forward']}" if "forward" in seen else "in the head"
            return f"{place}; it first appears {where}"
        losses = loss(tokens)
        if bad := [n for n, x in losses.items() if n.startswith("loss_") and not x.isfinite()]:
            return f"{bad[0]} is {losses[bad[0]].item()}, though every log-probability is finite ({_extremes(tokens)})"
        tokens["log_prob"].register_hook(partial(_note, seen, "backward", "the log-probabilities"))  # pyrefly: ignore[missing-attribute]
        losses["loss"].backward()
        if bad := optimizer.nonfinite_gradients():
            if "forward" in seen:
                where = f"the output of {seen['forward']}, at a token that no response depends on,"
            else:
                where = f"the gradient of {seen.get('backward', 'a weight')}"
            return f"the loss is finite, and {where} is the first that is not; {bad[0]} is one of {len(bad)} tensors"
    return None


def _place(tokens: TensorDictBase, names: Sequence[str], group: Group) -> str | None:
    """The first token at which one of the entries is not finite."""
    for name in (name for name in names if name in tokens.keys()):
        values = tokens[name].detach().cpu()
        if not values.is_floating_point():
            continue
        bad = tokens["trainable"].cpu() & ~values.isfinite()
        if bad.any():
            token = int(torch.nonzero(bad)[0])
            response = int(torch.repeat_interleave(group.lengths)[token])
            place = f"token {token - int(group.offsets[response])} of response {response}"
            return f"{name} of {place} is {float(values[token])}"
    return None


def _extremes(tokens: TensorDictBase) -> str:
    log_ratio = (tokens["log_prob"] - tokens["sampler_log_prob"])[tokens["trainable"]].detach()
    return (
        f"log-ratios from {float(log_ratio.min()):.3g} to {float(log_ratio.max()):.3g}, advantages from "
        f"{float(tokens['advantage'].min()):.3g} to {float(tokens['advantage'].max()):.3g}"
    )


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[dict[str, str]]:
    """A dict that gets the names of the modules whose output (``forward``) and gradient (``backward``) first broke."""
    seen: dict[str, str] = {}

    def look(name: str, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        _note(seen, "forward", name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(partial(_note, seen, "backward", f"the output of {name}"))

    # A module's hook is called before that of the module around it: the innermost is the first to be seen.
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules() if name]
    # What is inside a compiled module would not call its hooks. All else stays compiled: without its kernel the
    # attention takes memory that there may not be.
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield seen
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for hook in hooks:
            hook.remove()


def _note(seen: dict[str, str], which: str, name: str, values: Tensor) -> None:
    if which not in seen and not values.isfinite().all():
        seen[which] = name
