"""Routers of mixtures of experts: a record of how they spread the tokens of training, and router replay.

In a replay they take a sampler's choice of experts instead of their own. Sampler and trainer round differently, and a
token whose router is undecided goes to other experts then: its log-probability differs by more than rounding. Here only
the choice is the sampler's. What the chosen experts weigh, and its gradient, is the router's own, so that routers are
trained as ever.

In the record every token that is computed counts once, prompts included: what sequences begin with in common is
computed once. Letters: T tokens of the micro-batch, L decoder layers, K chosen experts, E experts.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.data.group import NO_ROUTE
from grpo_rl.policies.mixers import ToldLayout, tell_layout, with_mixin
from grpo_rl.policies.packing import ROUTES


def replay_routes(model: PreTrainedModel) -> None:
    """Has the model's routers take the experts that a layout's :data:`ROUTES` give."""
    for name, layer, router, experts in _routers_to_replay(model):
        if isinstance(router, Replays):
            continue
        check_router(model, router, experts)
        router.__class__ = with_mixin(Replays, type(router))
        router.number, router.experts = int(name.rpartition(".")[2]), experts
        tell_layout(layer)


def check_replay(model: PreTrainedModel) -> None:
    """Checks that a model's routers can take others' choices; the model may be without weights.

    Raises:
        ValueError: it has no routers, or one can't; names it.
    """
    found = _routers_to_replay(model)
    if not found:
        raise ValueError(f"policy.router_replay=true: {type(model).__name__} has no experts; set it to false")
    by_class = {type(router): (router, experts) for _, _, router, experts in found}
    for router, experts in by_class.values():
        check_router(model, router, experts)


def routers(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, Any, int]]:
    """The routers of the model: name of the layer, layer, router, number of experts.

    Raises:
        ValueError: a layer has stacked experts and not one router; names it.
    """
    for name, layer, weights in stacked_experts(model):
        stacked = {len(weight) for weight in weights}
        number = stacked.pop()
        found = [module for module in layer.modules() if _scores(module, number)]
        if stacked or len(found) != 1:
            names = ", ".join(sorted({type(module).__name__ for module in found})) or "none that is known"
            raise ValueError(f"which module of {type(model).__name__}'s {name} chooses experts is unclear ({names})")
        yield name, layer, found[0], number


def stacked_experts(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, list[torch.nn.Parameter]]]:
    """The layers that have experts: name, layer, and the weights [E, ...] of all its experts."""
    for name, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        weights = [
            parameter
            for module in layer.modules()
            for parameter in module.parameters(recurse=False)
            if parameter.ndim == 3 and parameter.shape[1] > 1 and not isinstance(module, torch.nn.Conv1d)
        ]
        if weights:
            yield name, layer, weights


def _routers_to_replay(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module, Any, int]]:
    try:
        return list(routers(model))
    except ValueError as error:
        raise ValueError(f"policy.router_replay=true: {error}; set it to false") from error


def _scores(module: torch.nn.Module, experts: int) -> bool:
    weight = None if isinstance(module, torch.nn.Linear) else module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and len(weight) == experts


@torch.no_grad()
def check_router(model: PreTrainedModel, router: Any, experts: int) -> None:
    """Raises ValueError where a copy of the router with random weights does not return the experts that it is given."""
    trial = copy.deepcopy(router).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*trial.parameters(), *trial.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    hidden = torch.randn(16, trial.weight.shape[1], generator=generator)
    plain = _outputs(trial(hidden))
    own = next((out for out in plain if not out.is_floating_point() and out.ndim == 2), None)
    if own is None:
        raise _refusal(model, router, "does not return the experts that it chooses")
    other = torch.stack([torch.randperm(experts, generator=generator)[: own.shape[1]] for _ in own])
    for given in (own, other, own.flip(-1), torch.where(torch.arange(len(own))[:, None] % 2 == 0, other, NO_ROUTE)):
        with _Forced(given, experts):
            outputs = _outputs(trial(hidden))
        taken = next(out for out in outputs if not out.is_floating_point() and out.ndim == 2)
        if not torch.equal(taken, torch.where(given < 0, own, given)):
            raise _refusal(model, router, "does not take the experts that it is given")
        if given is own and not all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True)):
            raise _refusal(model, router, "computes something else when its own choice is given to it")


def _outputs(out: Any) -> list[Tensor]:
    return [value for value in (out if isinstance(out, tuple) else (out,)) if isinstance(value, Tensor)]


def _refusal(model: PreTrainedModel, router: torch.nn.Module, what: str) -> ValueError:
    router_class = type(router).__name__
    return ValueError(f"policy.router_replay=true: {type(model).__name__}'s {router_class} {what}; set it to false")


class Replays(ToldLayout):
    """Mixed into the class of a router: the experts of a micro-batch are those that its layout gives."""

    number: int
    """The decoder layer's number."""
    experts: int
    on_replay: Callable[[Tensor, Tensor], None] | None = None
    """It is called with the router's own choice and the given one, [T, K] each."""

    @torch.compiler.disable
    def forward(self, *args: Any, **keywords: Any) -> Any:
        """The router's output, for the given experts where there are any."""
        plain = super().forward  # pyrefly: ignore[missing-attribute]
        layout = self.layout() if self.layout else None
        routes = layout.cache.get(ROUTES) if layout else None
        if routes is None:
            return plain(*args, **keywords)
        with _Forced(routes[:, self.number], self.experts, self.on_replay):
            return plain(*args, **keywords)


class _Forced(TorchFunctionMode):
    """Has the choice of the K largest among E numbers be the one that is given, but for tokens without one."""

    def __init__(
        self,
        routes: Int[Tensor, "T K"],
        experts: int,
        on_replay: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._routes, self._experts, self._on_replay = routes, experts, on_replay

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        values, indices = result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._experts or indices.shape != self._routes.shape:
            return result  # a choice among groups of experts
        given = self._routes.to(indices)
        if self._on_replay:
            self._on_replay(indices, given)
        indices = torch.where(given < 0, indices, given)
        return torch.return_types.topk((scores.gather(-1, indices).to(values), indices))


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
