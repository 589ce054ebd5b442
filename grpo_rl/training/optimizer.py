"""The optimizer step: fp32 master weights, clipping, schedule; one whose loss or gradient is not finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.policies.loading import assign, local, placed_like, whole

if TYPE_CHECKING:
    from grpo_rl.distributed.ranks import Ranks

HELD_BYTES = 1 << 28
"""Bytes of gradients that wait before they are added."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors in AdamW's state that have the shape of a weight."""
REMEDY = (
    "Lower optimizer.lr (in GRPO or loss.clip_high), raise optimizer.warmup_steps, or set train_model.dtype=float32 "
    "where it is another."
)


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step.

    Args:
        grad_norm: L2 norm before clipping.
        lr: learning rate.
        skipped: the weights are unchanged: something was not finite, or there was no gradient, as in a step of only
            zero-variance groups. Then momentum and weight decay are not applied either.
        trouble: what was not finite, and where; set for the first of several such steps in a row.
    """

    grad_norm: float
    lr: float
    skipped: bool
    trouble: str | None = None


def lr_factor(step: int, warmup_steps: int, total_steps: int, schedule: str, least: float = 0.0) -> float:
    """Factor on the learning rate at ``step`` (from 0): linear warm-up, then constant, or decay until ``total_steps``.

    Args:
        least: the factor at the end of the decay.

    >>> [lr_factor(s, 2, 6, "linear") for s in (0, 1, 2, 4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}.get(schedule, 1.0)
    return least + (1 - least) * left


class PolicyOptimizer:
    """AdamW or SGD over a policy's parameters.

    With ``mixed_precision`` the model computes in its own dtype and fp32 master weights are updated: an update of 1e-5
    is smaller than the spacing of bf16 numbers around most weights and would vanish. Gradients are accumulated in fp32,
    so the sum over micro-batches loses nothing either.

    Several processes take one step together, with a common gradient, clipping and decision to skip the step.

    Args:
        name: ``adamw`` or ``sgd``.
        weight_decay: of matrices alone.
        total_steps: optimizer steps of the run, for schedules that decay.
        min_lr_fraction: fraction of ``lr`` at the end of the decay.
        clip_grad_norm: largest L2 norm of the gradient.
        max_bad_steps: non-finite steps in a row that stop the run.
        ranks: the processes that train the model together; all call each method.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str = "adamw",
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.95),
        warmup_steps: int = 0,
        total_steps: int = 1,
        schedule: str = "constant",
        min_lr_fraction: float = 0.0,
        clip_grad_norm: float = 1.0,
        mixed_precision: bool = True,
        max_bad_steps: int = 5,
        ranks: Ranks | None = None,
    ) -> None:
        assert name in ("adamw", "sgd") and schedule in ("constant", "linear", "cosine"), (name, schedule)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in named]
        self._params = [p for _, p in named]
        copies = mixed_precision and any(p.dtype != torch.float32 for p in self._params)
        self._masters = [p.detach().float().clone() for p in self._params] if copies else self._params
        on_cuda = ranks is None and all(p.device.type == "cuda" for p in self._params)
        self._queue = GradientQueue() if copies and on_cuda else None
        # What computes its gradient in fp32 hands it over so. A bf16 copy of any other would only take memory.
        in_fp32 = _embeddings(model) if self._queue else self._params
        for param in in_fp32 if copies else ():
            param.grad_dtype = torch.float32
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._queue.hook(master) if self._queue else move_grad_to(master))
            for param, master in zip(self._params, self._masters, strict=True)
            if copies
        ]
        settings = {"lr": lr, "weight_decay": 0.0, "fused": True}  # see _decay
        if name == "adamw":
            self._optimizer = torch.optim.AdamW(self._masters, betas=tuple(betas), **settings)
        else:
            self._optimizer = torch.optim.SGD(self._masters, **settings)
        self._weight_decay = weight_decay
        self._lr, self._clip = lr, clip_grad_norm
        self._schedule = (warmup_steps, total_steps, schedule, min_lr_fraction)
        self._max_bad_steps = max_bad_steps
        self._ranks = ranks
        self.before_step: Callable[[], None] = lambda: None
        """Called before weights and state change: it returns once no other thread reads them."""
        self.steps = 0
        self.bad_steps = 0
        self._bad_in_a_row = 0

    @torch.no_grad()
    def step(self, loss_is_finite: bool = True, explain: Callable[[], str] | None = None) -> StepResult:
        """Applies the gradients accumulated since the last step, and clears them.

        The step is skipped if the loss or the gradient is not finite.

        Args:
            loss_is_finite: whether the step's loss is; if not, a finite gradient is not trusted either.
            explain: locates the non-finite part of the batch; called if the loss or a gradient is not finite, in the
                first of several such steps in a row and before the error. It may recompute gradients. Not called if
                several processes train: all would have to take part.

        Raises:
            NonFiniteError: ``max_bad_steps`` steps in a row were not finite; names the tensors.
        """
        lr = self._lr * lr_factor(self.steps, *self._schedule)
        if self._queue:
            self._queue.flush()
        if self._ranks:
            self._ranks.sum_gradients(self._masters)
            loss_is_finite = not self._ranks.any([not loss_is_finite])[0]
        grads = [p.grad for p in self._masters if p.grad is not None]
        norm = _total_norm(grads) if grads else 0.0
        finite = loss_is_finite and math.isfinite(norm)  # squares that overflow make an infinite norm
        if finite and grads:
            if norm + 1e-6 > self._clip:  # otherwise it would multiply by 1
                torch.nn.utils.clip_grads_with_norm_(self._masters, self._clip, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        self.before_step()
        if finite and grads:
            self._decay(self._masters, lr)
            self._optimizer.step()
            self._copy_masters()
        trouble = None
        if not finite:
            self.bad_steps += 1
            self._bad_in_a_row += 1
            stops = self._bad_in_a_row >= self._max_bad_steps
            if stops or self._bad_in_a_row == 1:
                trouble = self._trouble(norm, loss_is_finite)
                # There is nothing to locate if all is finite and only too large for the step.
                broken = not loss_is_finite or bool(self.nonfinite_gradients())
                trouble += f" {explain()}" if explain and broken and not self._ranks else ""
            if stops:
                raise NonFiniteError(f"{self._bad_in_a_row} steps in a row: {trouble} {REMEDY}")
        elif grads:
            self._bad_in_a_row = 0
        self.clear_gradients()
        self.steps += 1
        return StepResult(grad_norm=norm, lr=lr, skipped=not (finite and grads), trouble=trouble)

    def _decay(self, weights: Sequence[Tensor], lr: float) -> None:
        """Decays matrices that have a gradient, as torch's optimizers do: norms and biases would only lose their scale.

        Parameter groups would do it too, but their order is that of the moments in a checkpoint.
        """
        named = zip(self._names, weights, strict=True)
        matrices = [w for n, w in named if w.grad is not None and w.ndim > 1 and "bias" not in n]
        if self._weight_decay and matrices:
            torch._foreach_mul_(matrices, 1 - lr * self._weight_decay)

    def clear_gradients(self) -> None:
        """Drops the accumulated gradients, and those that a backward pass which broke off left behind."""
        self._optimizer.zero_grad(set_to_none=True)
        for param in self._params:
            param.grad = None
        if self._queue:
            self._queue.clear()

    def nonfinite_gradients(self) -> list[str]:
        """Names of the parameters whose accumulated gradient has a NaN or an infinity."""
        if self._queue:
            self._queue.flush()
        return self._names_where([not _finite(master.grad) for master in self._masters])

    def _names_where(self, flags: Sequence[bool]) -> list[str]:
        """Names of the parameters that are flagged, on any rank."""
        flags = self._ranks.any(flags) if self._ranks else flags
        return [name for name, flag in zip(self._names, flags, strict=True) if flag]

    def _copy_masters(self) -> None:
        if self._queue:
            torch._foreach_copy_(self._params, self._masters)
            return
        for param, master in zip(self._params, self._masters, strict=True):
            if param is not master:
                param.copy_(master)

    def _trouble(self, norm: float, loss_is_finite: bool) -> str:
        broken = self._names_where([not _finite(master) for master in self._masters])
        weights = f"Weights hold non-finite numbers in {broken[0]}." if broken else "Weights were not touched."
        if bad := self.nonfinite_gradients():
            what = f"the gradient is not finite, first seen in {bad[0]}, {len(bad)} of {len(self._names)} tensors"
        elif not loss_is_finite:
            what = "the loss is not finite, though the gradient is"
        else:
            what = f"the gradient is too large for fp32 (norm {norm:g})"
        return f"{what}. {weights}"

    def state_dict(self) -> dict:
        """Master weights, optimizer state and counters, loadable with ``weights_only=True``."""
        return {
            "masters": dict(zip(self._names, [p.detach() for p in self._masters], strict=True)),
            "optimizer": self._optimizer.state_dict(),
            "counters": [self.steps, self.bad_steps, self._bad_in_a_row],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restores what :meth:`state_dict` returned, and writes the weights into the model.

        Raises:
            ValueError: the state belongs to another model.
        """
        if list(state["masters"]) != self._names:
            raise ValueError("the checkpoint's tensors are not this model's: it was written by another model")
        for master, saved in zip(self._masters, state["masters"].values(), strict=True):
            assign(master, saved)
        self._copy_masters()
        saved = state["optimizer"]
        moments = {
            i: {name: placed_like(x, self._masters[i]) if name in MOMENTS else x for name, x in of.items()}
            for i, of in saved["state"].items()
        }
        self._optimizer.load_state_dict({**saved, "state": moments})
        self.steps, self.bad_steps, self._bad_in_a_row = state["counters"]

    def close(self) -> None:
        """Removes the gradient hooks from the model, whose gradients then have its own dtype again."""
        for hook, param in zip(self._hooks, self._params, strict=False):
            hook.remove()
            param.grad_dtype = param.dtype


def _total_norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm over all tensors, sharded or not."""
    return float(whole(torch.nn.utils.get_total_norm(tensors)))


def _finite(x: Tensor | None) -> bool:
    """True if a tensor, or this rank's part of a sharded one, is finite; None counts as finite."""
    return x is None or bool(local(x).isfinite().all())


def _embeddings(model: torch.nn.Module) -> list[Tensor]:
    """Weights of the embedding and the head, whose gradients `grpo_rl.policies` computes."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) or module is head]
    return [module.get_parameter("weight") for module in modules if module.get_parameter("weight").requires_grad]


class GradientQueue:
    """Gradients of bf16 parameters on CUDA, added to their fp32 masters' many at a time: few kernels, same sums."""

    def __init__(self) -> None:
        self._waiting: dict[Tensor, Tensor] = {}
        self._bytes = 0

    def hook(self, master: Tensor) -> Callable[[Tensor], None]:
        """A parameter's hook after accumulation, which takes its gradient; one in fp32 is the master's at once."""
        give = move_grad_to(master)

        def take(param: Tensor) -> None:
            if param.grad is None:
                return
            if param.grad.dtype == master.dtype:
                give(param)
                return
            if master in self._waiting:  # of the micro-batch before
                self.flush()
            self._waiting[master], param.grad = param.grad, None
            self._bytes += self._waiting[master].nbytes
            if self._bytes > HELD_BYTES:
                self.flush()

        return take

    @torch.no_grad()
    def flush(self) -> None:
        """Adds what waits to the masters' gradients, in fp32."""
        masters, grads = list(self._waiting), list(self._waiting.values())
        self.clear()
        if not masters:
            return
        wide = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(wide, grads)
        added = [(master, grad) for master, grad in zip(masters, wide, strict=True) if master.grad is not None]
        if added:
            torch._foreach_add_([master.grad for master, _ in added], [grad for _, grad in added])
        for master, grad in zip(masters, wide, strict=True):
            if master.grad is None:
                master.grad = grad

    def clear(self) -> None:
        """Forgets what waits."""
        self._waiting, self._bytes = {}, 0


def move_grad_to(master: Tensor) -> Callable[[Tensor], None]:
    """A parameter's hook after accumulation, which adds its gradient to the master's."""

    def hook(param: Tensor) -> None:
        if master.grad is None:
            master.grad = param.grad
        else:
            master.grad += param.grad
        param.grad = None

    return hook
