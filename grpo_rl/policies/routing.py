"""Mixtures of experts that take a sampler's choice of experts instead of their own: router replay.

Sampler and trainer round differently, and a token whose router is undecided goes to other experts then: its
log-probability differs by more than rounding. Here only the choice is the sampler's. What the chosen experts weigh, and
its gradient, is the router's own, so that routers are trained as ever.
Letters: T tokens of the micro-batch, L decoder layers, K chosen experts, E experts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.data.group import NO_ROUTE
from grpo_rl.policies.mixers import ToldLayout, tell_layout
from grpo_rl.policies.packing import ROUTES


def replay_routes(model: PreTrainedModel) -> None:
    """Has the model's routers take the experts that a layout's :data:`ROUTES` give."""
    for name, layer, router, experts in _routers_to_replay(model):
        if isinstance(router, Replays):
            continue
        check_router(model, router, experts)
        router.__class__ = _replaying(type(router))
        router.number, router.experts = int(name.rpartition(".")[2]), experts
        tell_layout(layer)


def check_replay(model: PreTrainedModel) -> None:
    """Checks that a model's routers can take others' choices; the model may be without weights.

    Raises:
        ValueError: it has no routers, or one can't; names it.
    """
    found = _routers_to_replay(model)
    if not found:
        raise ValueError(
            f"policy.router_replay=true: {type(model).__name__} has no experts to choose from; set it to false"
        )
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
            raise ValueError(
                f"which module of {type(model).__name__}'s {name} chooses the experts is not clear ({names})"
            )
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
    """Tries a copy of the router with random weights: it has to return the experts that it is given.

    Raises:
        ValueError: it does not; names it.
    """
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


@functools.cache
def _replaying(router_class: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return type(router_class.__name__, (Replays, router_class), {})
