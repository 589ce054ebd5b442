"""The optimizer step: fp32 master weights, clipping, schedule, and a guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Args:
        grad_norm: L2 norm before clipping.
        lr: learning rate that was applied.
        skipped: the weights are as before: the gradient was not finite, or there was none, as where every group of the
            step was rewarded alike. Without a gradient there is no momentum and no weight decay either.
    """

    grad_norm: float
    lr: float
    skipped: bool


def lr_factor(step: int, warmup_steps: int, total_steps: int, schedule: str, least: float = 0.0) -> float:
    """Factor on the learning rate at ``step`` (from 0): linear warm-up, then constant, or decay until ``total_steps``.

    Args:
        least: where decay ends.

    >>> [lr_factor(s, 2, 6, "linear") for s in (0, 1, 2, 4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}.get(schedule, 1.0)
    return least + (1 - least) * left


class PolicyOptimizer:
    """Steps a model's parameters.

    With ``mixed_precision`` the model computes in its own dtype and fp32 master weights are stepped: an update of 1e-5
    is smaller than the spacing of bf16 numbers around most weights and would vanish if it were added to them. Gradients
    are summed in fp32 as they appear, so micro-batches lose nothing either.

    Args:
        model: whose trainable parameters are stepped.
        name: ``adamw`` or ``sgd``.
        total_steps: optimizer steps of the run, for schedules that decay.
        min_lr_fraction: of ``lr``, where decay ends.
        clip_grad_norm: largest L2 norm of the gradient.
        max_bad_steps: non-finite steps in a row that stop the run.

    Raises:
        ValueError: unknown name or schedule, or a number out of range.
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
    ) -> None:
        check_optimizer(name, lr, schedule, clip_grad_norm)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in named]
        self._params = [p for _, p in named]
        copies = mixed_precision and any(p.dtype != torch.float32 for p in self._params)
        self._masters = [p.detach().float().clone() for p in self._params] if copies else self._params
        for param in self._params if copies else ():
            param.grad_dtype = torch.float32  # a bf16 copy of each gradient would only take memory
        self._hooks = (
            [
                p.register_post_accumulate_grad_hook(_move_grad_to(master))
                for p, master in zip(self._params, self._masters, strict=True)
            ]
            if copies
            else []
        )
        if name == "adamw":
            self._optimizer = torch.optim.AdamW(
                self._masters, lr=lr, weight_decay=weight_decay, betas=tuple(betas), fused=True
            )
        else:
            self._optimizer = torch.optim.SGD(self._masters, lr=lr, weight_decay=weight_decay, fused=True)
        self._lr, self._clip = lr, clip_grad_norm
        self._schedule = (warmup_steps, total_steps, schedule, min_lr_fraction)
        self._max_bad_steps = max_bad_steps
        self.steps = 0
        self.bad_steps = 0
        self._bad_in_a_row = 0

    @torch.no_grad()
    def step(self) -> StepResult:
        """Applies the gradients summed since the last step, and clears them.

        Raises:
            NonFiniteError: ``max_bad_steps`` in a row were not finite; says which tensors.
        """
        lr = self._lr * lr_factor(self.steps, *self._schedule)
        grads = [p.grad for p in self._masters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        finite = math.isfinite(norm)
        if finite and grads:
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._clip, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._copy_masters()
            self._bad_in_a_row = 0
        if not finite:
            self.bad_steps += 1
            self._bad_in_a_row += 1
            if self._bad_in_a_row >= self._max_bad_steps:
                raise NonFiniteError(self._diagnosis(norm))
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(grad_norm=norm, lr=lr, skipped=not (finite and grads))

    def _copy_masters(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if param is not master:
                param.copy_(master)

    def _diagnosis(self, norm: float) -> str:
        bad = [
            n
            for n, p in zip(self._names, self._masters, strict=True)
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        broken = [n for n, p in zip(self._names, self._masters, strict=True) if not p.isfinite().all()]
        return (
            f"the gradient was not finite (norm {norm}) in {self._bad_in_a_row} steps in a row; first seen in "
            f"{bad[0] if bad else 'none (the norm overflows)'}, {len(bad)} of {len(self._names)} tensors. Weights "
            + (f"hold non-finite numbers in {broken[0]}" if broken else "are finite: they were not touched")
            + ". Lower optimizer.lr or loss.clip_high, raise optimizer.warmup_steps, or train in float32 "
            "(train_model.dtype=float32)."
        )

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
            ValueError: the state is of another model.
        """
        if list(state["masters"]) != self._names:
            raise ValueError("the checkpoint's tensors are not this model's: it was written by another model")
        for master, saved in zip(self._masters, state["masters"].values(), strict=True):
            master.copy_(saved)
        self._copy_masters()
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.bad_steps, self._bad_in_a_row = state["counters"]

    def close(self) -> None:
        """Takes the gradient hooks off the model, whose gradients are of its own dtype again."""
        for hook, param in zip(self._hooks, self._params, strict=False):
            hook.remove()
            param.grad_dtype = param.dtype


def check_optimizer(name: str, lr: float, schedule: str, clip_grad_norm: float) -> None:
    """Refuses settings that cannot train.

    Raises:
        ValueError: which one and what it may be.
    """
    if name not in ("adamw", "sgd"):
        raise ValueError(f"optimizer.name is {name!r}; it can be adamw or sgd")
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"optimizer.schedule is {schedule!r}; it can be constant, linear or cosine")
    if not lr >= 0 or not clip_grad_norm > 0:
        raise ValueError(
            f"optimizer.lr is {lr} and clip_grad_norm {clip_grad_norm}; need lr >= 0 and clip_grad_norm > 0"
        )


def _move_grad_to(master: Tensor):
    def hook(param: Tensor) -> None:
        if master.grad is None:
            master.grad = param.grad
        else:
            master.grad += param.grad
        param.grad = None

    return hook
