"""The processes that train one policy together: what each computes, what they exchange, who holds which weights.

Every rank is given all groups of an optimizer step, plans the same micro-batches and computes its own share of them:
whole groups, balanced by tokens. Gradients are sums over ranks, as the loss is divided by counts of the whole step.

- ``ddp``: every rank holds the whole model; gradients are added up once a step, when all micro-batches are done. It is
  done here and not by DistributedDataParallel, which prepares a backward pass only through ``forward``: a policy scores
  with parts of its model.
- ``fsdp``: every rank holds a part of each weight, of its gradient and of its optimizer state (FSDP2). Weights of a
  layer are gathered when it is computed, so ranks have to compute in step: one with nothing left goes on with tokens of
  weight zero.

Before they exchange anything, `meet` gives the ranks of one start a name of their own: torchrun's store still has what
ranks wrote before they were started again.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import socket
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.distributed.liveness import Member, Watch
from grpo_rl.policies.loading import whole
from grpo_rl.policies.policy import CALL_WHOLE
from grpo_rl.waits import Wait, waiting

Mode = Literal["fsdp", "ddp"]
X = TypeVar("X")
P = ParamSpec("P")
POLL_S = 0.1
"""Seconds between two looks for ranks that have not come yet."""


def _exchange(method: Callable[Concatenate[Ranks, P], X]) -> Callable[Concatenate[Ranks, P], X]:
    """The method as an exchange of ranks, under its name in their watch."""

    @functools.wraps(method)
    def watched(ranks: Ranks, *arguments: P.args, **named: P.kwargs) -> X:
        with ranks.watch.exchange(method.__name__) if ranks.watch else nullcontext():
            return method(ranks, *arguments, **named)

    return watched


class Ranks:
    """The processes of a training, as one of them sees it.

    Args:
        fp32_masters: with ``fsdp`` the weights that are trained are held in fp32, as the optimizer's master weights,
            and gathered in the model's own dtype.
        cpu_offload: with ``fsdp`` weights, gradients and optimizer state stay in the CPU's memory.
    """

    def __init__(
        self, mode: Mode, device: torch.device | str = "cpu", fp32_masters: bool = True, cpu_offload: bool = False
    ) -> None:
        self._fp32_masters, self._cpu_offload = fp32_masters, cpu_offload
        self.mode, self.device = mode, torch.device(device)
        self.told_after_s: float | None = None
        """Seconds of waiting for other ranks after which it is logged; None: those of every wait."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.in_step = mode == "fsdp"
        """True if a forward or backward pass of one rank waits for those of the others."""
        self._mesh = init_device_mesh(self.device.type, (self.size,)) if self.in_step else None
        self.cpu_mesh = init_device_mesh("cpu", (self.size,)) if self.in_step else None
        """The device mesh over which a checkpoint's tensors are spread while they are read."""
        self.watch: Watch | None = None
        """The watch over the other ranks, of ranks that have met."""

    @classmethod
    def join(
        cls,
        mode: Mode,
        device: torch.device | str = "cpu",
        rank: int | None = None,
        size: int | None = None,
        store: dist.Store | None = None,
        timeout_s: float = 1800.0,
        deadline_s: float = 60.0,
        **placement: bool,
    ) -> Ranks:
        """Meets the other ranks, by the environment that torchrun sets or by a store that all of them know.

        Args:
            rank: this process's number; with ``size``, how many there are, and ``store``.
            timeout_s: longest wait for the others, here and in every exchange; a longer one fails.
            deadline_s: a rank that gives no sign of life for this long is lost, and all others end.
            placement: ``fp32_masters`` and ``cpu_offload``.

        Raises:
            ValueError: neither torchrun's environment nor a store is there.
        """
        if store is None and "WORLD_SIZE" not in os.environ:
            raise ValueError(f"train_model.parallel={mode} needs several processes; start torchrun --nproc-per-node N")
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Numbers and offloaded weights are exchanged on the CPU, all else on the GPUs.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit, by_torchrun = datetime.timedelta(seconds=timeout_s), store is None
        told_after_s = timeout_s / 2  # before the process group gives up
        with waiting("all ranks to join", deadline_s=told_after_s) as joins:
            if store is None:
                store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
            assert store is not None and rank is not None and size is not None
            joins.detail = f"this is rank {rank} of {size}"
            name = meet(store, rank, size, timeout_s)
            at = {"rank": rank, "world_size": size, "store": dist.PrefixStore(name, store)}
            dist.init_process_group(backend, timeout=limit, **at)
            ranks = cls(mode, device, **placement)
        ranks.told_after_s = told_after_s
        members = ranks.gather(Member.here(rank))
        own = store.clone()  # pyrefly: ignore[missing-attribute]
        watch = Watch(own, f"grpo_rl/watch {name}", members, rank, deadline_s, by_torchrun)
        ranks.wait()  # all have sent a heartbeat
        watch.start()
        ranks.watch = watch
        return ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the other ranks, and notifies them if an error is the reason.

        Raises:
            RankLostError: the error is that of an exchange, and another rank caused it.
        """
        if self.watch:
            self.watch.leave(error)
        if dist.is_initialized():
            dist.destroy_process_group()

    # Exchanges between ranks. All of them have to call these, in the same order.

    def wait(self) -> None:
        """Waits until all ranks are here."""
        self.any([False])

    @_exchange
    def gather(self, mine: X) -> list[X]:
        """The values that all ranks passed, in rank order."""
        everyones: list[Any] = [None] * self.size
        with self._waiting("gather"):
            dist.all_gather_object(everyones, mine)
        return everyones

    @_exchange
    def broadcast(self, first: X) -> X:
        """The value that rank zero passed."""
        box = [first]
        with self._waiting("broadcast"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    @_exchange
    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, True if it is set on any rank."""
        joint = torch.tensor([bool(flag) for flag in flags], dtype=torch.int32)
        with self._waiting("any"):
            dist.all_reduce(joint, dist.ReduceOp.MAX)
        return joint.bool().tolist()

    @_exchange
    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        """Makes every rank's gradients the sum of all; a weight that none has a gradient of is left without one.

        With ``fsdp`` they are sums already.
        """
        if self.in_step:
            return
        exchanges = []
        for weight, has_gradient in zip(weights, self.any([w.grad is not None for w in weights]), strict=True):
            if has_gradient:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                exchanges.append(dist.all_reduce(weight.grad, async_op=True))
        with self._waiting("sum of gradients"):
            for exchange in exchanges:
                exchange.wait()

    def _waiting(self, what: str) -> Wait:
        return waiting("the other ranks", what, self.told_after_s)

    # Who holds which weights.

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context that one machine's ranks enter in turns: memory holds a model once while it is loaded."""
        machines = self.gather(socket.gethostname())
        mine, turns = machines[: self.rank].count(machines[self.rank]), max(map(machines.count, machines))
        for _ in range(mine):
            self.wait()
        yield
        for _ in range(turns - mine):
            self.wait()

    def place(self, model: PreTrainedModel) -> None:
        """Moves a model from wherever it is to this rank's device: all of it, or with ``fsdp`` this rank's part.

        Each decoder layer is gathered by itself; embedding, head and last norm are gathered around a policy's scoring.
        Outside of forward and backward passes every weight is sharded. Gradients are summed in fp32, over tokens,
        micro-batches and ranks.
        """
        if not self.in_step:
            model.to(self.device)
            return
        dtype, wide = model.dtype, torch.promote_types(model.dtype, torch.float32)
        precision = MixedPrecisionPolicy(dtype, reduce_dtype=wide, cast_forward_inputs=False)
        pins = self.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pins) if self._cpu_offload else OffloadPolicy()
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in [*layers, model]:
            for parameter in module.parameters():
                if self._fp32_masters and parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(wide)
            unit = fully_shard(
                module, mesh=self._mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload
            )
            # Sums, not means: the loss is divided by counts of the whole step.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            module.register_forward_pre_hook(_sum_gradients_in_fp32)
        setattr(model, CALL_WHOLE, types.MethodType(_call, model))
        register_fsdp_forward_method(model, CALL_WHOLE)


def _call(model: PreTrainedModel, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function and returns its result; FSDP gathers the model's own weights before and shards them after."""
    _sum_gradients_in_fp32(model)
    return function(*arguments)


def _sum_gradients_in_fp32(module: torch.nn.Module, *_: object) -> None:
    """Has gathered weights sum their gradients in fp32: in their own dtype a micro-batch would lose tokens."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)


def agreed(ranks: Ranks | None, work: Callable[[], X]) -> X:
    """Runs work of each rank and returns the rank's own result; where it fails on one rank, all raise that error.

    Every rank has to call it. One that went on would wait for ever for one that has stopped.

    Raises:
        ValueError: on some rank.
        OSError: likewise.
    """
    if ranks is None:
        return work()
    done, error = None, None
    try:
        done = work()
    except (ValueError, OSError) as failed:
        error = failed
    if errors := [of_rank for of_rank in ranks.gather(error) if of_rank is not None]:
        raise errors[0]
    return done  # pyrefly: ignore[bad-return]


def gathered(weights: Iterable[tuple[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """The named weights, whole, gathered one at a time, on the CPU of rank zero; other ranks join in and get none."""
    state = {}
    for name, weight in weights:
        tensor = whole(weight.detach())
        if rank == 0:
            state[name] = tensor.cpu()
    return state


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that the ranks of this start alone have, once all of them are there: the prefix of their keys.

    torchrun's store keeps what ranks wrote before they were started again, such as addresses at which no one answers.
    So rank zero calls by a new name until all have answered with a name of their own, and then lists those: who
    finds its own among them has been called by the rank zero of its own start.

    Raises:
        ValueError: not all ranks came within ``timeout_s``.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        store.set("grpo_rl/call", own)
        keys = [f"grpo_rl/answer {own} {other}" for other in range(1, size)]
        while missing := [key for key in keys if not store.check([key])]:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: "
                    + ", ".join(f"rank {key.split()[-1]}" for key in missing[:8])
                )
            time.sleep(POLL_S)
        store.set(f"grpo_rl/met {own}", json.dumps([own, *(store.get(key).decode() for key in keys)]))
        return own
    answered = None
    while time.monotonic() < deadline:
        if store.check(["grpo_rl/call"]):
            call = store.get("grpo_rl/call").decode()
            if call != answered:
                store.set(f"grpo_rl/answer {call} {rank}", own)
                answered = call
            if store.check([f"grpo_rl/met {call}"]):
                met = json.loads(store.get(f"grpo_rl/met {call}"))
                if len(met) == size and met[rank] == own:
                    return call
        time.sleep(POLL_S)
    raise ValueError(f"rank 0 did not call rank {rank} within {timeout_s:g} s")
