"""Gradients of bf16 parameters on CUDA, added to their fp32 masters' many at a time: few kernels, same sums."""

from collections.abc import Callable

import torch
from torch import Tensor

HELD_BYTES = 1 << 28
"""Bytes of gradients that wait before they are added."""


class GradientQueue:
    """Gradients as autograd made them, until there are enough for a kernel or the optimizer needs them."""

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
