"""Router record: how a mixture's routers spread the tokens of training over the experts, added up on the device.

Routers are those that `grpo_rl.policies.routing` finds. Every token that is computed counts once, prompts included:
what sequences begin with in common is computed once. Letters: T tokens of the micro-batch, K chosen experts,
E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.policies.routing import routers

RECORD = "grpo_rl_router_record"
"""Attribute of a mixture whose routers are recorded."""
LAST = ("tokens", "entropy", "differ", "replayed")
"""Sums of a layer that follow the counts of its experts."""


class RouterRecord:
    """The sums of each layer's router, since they were taken last: tokens of each expert, then :data:`LAST`."""

    def __init__(self) -> None:
        self._records = False
        self._sums: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context whose forward passes count; what gradient checkpointing computes again after it does not."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def take(self) -> dict[int, Tensor]:
        """The sums by layer, on the CPU; they begin anew. The device is waited for once."""
        numbers, sums = list(self._sums), list(self._sums.values())
        self._sums = {}
        if not sums:
            return {}
        return dict(zip(numbers, torch.cat(sums).cpu().split([len(of_layer) for of_layer in sums]), strict=True))

    def sums(self) -> dict[int, Tensor]:
        """A copy of the sums by layer, which stay."""
        return {number: sums.clone() for number, sums in self._sums.items()}

    def put_back(self, sums: dict[int, Tensor]) -> None:
        """Forgets what was added since :meth:`sums` returned these."""
        self._sums = {number: of_layer.clone() for number, of_layer in sums.items()}

    # Not traced: an MLP around a router may be compiled.
    @torch.compiler.disable
    @torch.no_grad()
    def add(self, number: int, experts: int, router: torch.nn.Module, args: tuple, output: Any) -> None:
        """Adds what a router returned, as its forward hook: its scores of all experts, and the chosen."""
        if not self._records:
            return
        tensors = [value for value in output if isinstance(value, Tensor)]
        chosen = next(value for value in tensors if not value.is_floating_point())
        scores = next(value for value in tensors if value.is_floating_point() and value.shape[-1] == experts)
        sums = self._of(number, experts, scores.device)
        flat = chosen.flatten().long()
        sums[:experts].scatter_add_(0, flat, torch.ones_like(flat, dtype=sums.dtype))
        sums[experts] += chosen.shape[0]
        sums[experts + 1] += entropy(scores.flatten(0, -2)).sum()

    @torch.compiler.disable
    @torch.no_grad()
    def add_replayed(self, number: int, experts: int, own: Int[Tensor, "T K"], given: Int[Tensor, "T K"]) -> None:
        """Adds how many of the given choices are not among the router's own; negative: none is given."""
        if not self._records:
            return
        sums = self._of(number, experts, own.device)
        replayed = given >= 0
        sums[experts + 2] += (replayed & (given[:, :, None] != own[:, None]).all(-1)).sum()
        sums[experts + 3] += replayed.sum()

    def _of(self, number: int, experts: int, device: torch.device) -> Tensor:
        if number not in self._sums:
            self._sums[number] = torch.zeros(experts + len(LAST), dtype=torch.float64, device=device)
        return self._sums[number]


def record_routers(model: PreTrainedModel) -> None:
    """Gives a mixture of experts a record of its routers, which :func:`router_record` returns.

    Call it before the model is compiled, and again once routers replay. A model without experts gets none, nor does one
    whose routers are not known.
    """
    # Only these have layers that are never compiled as a whole, with padding, see `compile_layers`.
    if not model._can_set_experts_implementation():
        return
    try:
        found = list(routers(model))
    except ValueError:  # a metric is no reason to refuse a model
        return
    before = router_record(model)
    record = before or RouterRecord()
    for name, _, router, experts in found:
        number = int(name.rpartition(".")[2])
        if before is None:
            router.register_forward_hook(functools.partial(record.add, number, experts))
        router.on_replay = functools.partial(record.add_replayed, number, experts)
    if found:
        setattr(model, RECORD, record)


def router_record(model: object) -> RouterRecord | None:
    """The record of a model's routers; None if it has none."""
    return getattr(model, RECORD, None)


def entropy(scores: Float[Tensor, "T E"]) -> Float[Tensor, " T"]:
    """The entropy of each token's probabilities of all experts, in nats, in fp32.

    Routers return logits or, some, the probabilities. A router that weighs experts by a sigmoid has none: there the
    softmax of its logits stands for them.

    >>> entropy(torch.tensor([[0.0, 0.0], [0.5, 0.5], [999.0, 0.0]]))
    tensor([0.6931, 0.6931, 0.0000])
    """
    scores = scores.float()
    are_probabilities = (scores >= 0).all(-1, keepdim=True) & ((scores.sum(-1, keepdim=True) - 1).abs() < 0.02)
    return torch.special.entr(torch.where(are_probabilities, scores, scores.softmax(-1))).sum(-1)


def router_metrics(taken: Sequence[dict[int, Tensor]]) -> dict[str, float]:
    """The metrics of the sums that :meth:`RouterRecord.take` returned, one of each process; empty without tokens.

    - ``router/load_max_over_mean``: tokens of the busiest expert over the mean of its layer's experts, in the layer
      where this is highest, as one collapsed layer of many would hardly show in a mean; 1: all experts are as busy,
      E / K: the same K experts take every token;
    - ``router/entropy``: of the routers' probabilities, in nats, the mean over tokens and layers; at most log E;
    - ``router/replayed_differ``: share of the replayed choices that are not among the router's own; without any, none.

    Two layers, 4 tokens to one of 2 experts; the second layer's all go to its first, 3 of them by replay alone:

    >>> layers = {0: [2, 2, 4, 2.0, 0, 0], 1: [4, 0, 4, 0.0, 3, 4]}
    >>> router_metrics([{number: torch.tensor(sums).double() for number, sums in layers.items()}])
    {'router/load_max_over_mean': 2.0, 'router/entropy': 0.25, 'router/replayed_differ': 0.75}
    """
    layers: dict[int, Tensor] = {}
    for of_process in taken:
        for number, sums in of_process.items():
            layers[number] = layers[number] + sums if number in layers else sums
    if not layers:
        return {}
    counts = [sums[: -len(LAST)] for sums in layers.values()]
    tokens, entropies, differ, replayed = (
        math.fsum(column) for column in zip(*(sums[-len(LAST) :].tolist() for sums in layers.values()), strict=True)
    )
    metrics = {
        "router/load_max_over_mean": max(float(of_layer.max() / of_layer.mean()) for of_layer in counts),
        "router/entropy": entropies / tokens,
    }
    if replayed:
        metrics["router/replayed_differ"] = differ / replayed
    return metrics
