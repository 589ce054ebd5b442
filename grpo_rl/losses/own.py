"""Terms of the loss that are functions of the user's own, checked on a toy batch. Letter: N tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_rl.by_name import one_line

SURROGATE_TAKES = (
    "log_ratio", "advantage", "log_prob", "clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg",
)  # fmt: skip
"""The parameters that a surrogate of the user's own may have; see `grpo_rl.losses.surrogate.surrogate_loss`."""
KL_TAKES = ("log_prob", "ref_log_prob", "log_ratio")
"""The parameters that a KL estimate of the user's own may have; see `grpo_rl.losses.kl.kl_estimate`."""

# Per token: a fresh token, one without an advantage, ratios on both sides of 1 and far beyond any clip.
_LOG_RATIO = (0.0, 0.0, 0.0, 0.1, -0.1, 0.7, -0.7, 12.0, -12.0, 12.0)
_ADVANTAGE = (1.0, -0.5, 0.0, 1.0, 1.0, -1.0, -1.0, 0.5, 0.5, -0.5)
_LOG_PROB = -1.5


class OwnTerm:
    """A function of the user's own that gives one value per token; it gets the arguments that its signature names.

    The value of a token must follow from what is known of this token: a function that looks at the others, as one that
    divides by their mean does, would give another gradient with other micro-batches. What concerns several tokens is
    chosen beside it: ``loss.ratio`` (a response's ratio), ``loss.aggregate`` (means), ``loss.advantage``.

    Args:
        function: returns [N] from tensors of [N] and numbers.
        key: the setting, for messages.
        takes: names of what it may take.
        settings: the numbers among these.

    Raises:
        ValueError: it asks for something else, fails on the toy batch, or what it returns can't be trained on.

    >>> OwnTerm(lambda log_ratio, advantage: -log_ratio.exp() * advantage, "loss.surrogate", SURROGATE_TAKES).takes
    ('log_ratio', 'advantage')
    >>> OwnTerm(lambda advantage: -advantage, "loss.surrogate", SURROGATE_TAKES)
    Traceback (most recent call last):
    ...
    ValueError: loss.surrogate=grpo_rl.losses.own:<lambda>: no gradient reaches the policy; compute with ...
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        key: str,
        takes: tuple[str, ...],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.function, self.name = function, f"{getattr(function, '__module__', '?')}:{name}"
        self._where, self._settings = f"{key}={self.name}", dict(settings or {})
        self.takes = self._taken(takes)
        self._check()

    def __call__(self, **given: Any) -> Tensor:
        """The value of each token; the arguments are those of the project's own functions, by name."""
        return self.function(**{name: given[name] for name in self.takes})

    def _taken(self, takes: tuple[str, ...]) -> tuple[str, ...]:
        if not callable(self.function):
            raise ValueError(f"{self._where} is {self.function!r:.80}; it must be a function")
        parameters = inspect.signature(self.function).parameters.values()
        by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if other := [name for name in required if name not in takes or name not in by_name]:
            raise ValueError(
                f"{self._where} asks for {', '.join(other)}; what it can get by name is {', '.join(takes)}"
            )
        return tuple(name for name in takes if name in by_name)

    def _check(self) -> None:
        leaf, batch = self._toy()
        try:
            values = self(**self._settings, **batch)
        except Exception as error:
            raise ValueError(f"{self._where} raised {one_line(error)}") from error
        count = len(_LOG_RATIO)
        if not isinstance(values, Tensor) or values.shape != (count,):
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
            raise ValueError(f"{self._where} returned {got} for {count} tokens; return [{count}], a value per token")
        if values.dtype != leaf.dtype:
            raise ValueError(f"{self._where} returned {values.dtype} for {leaf.dtype}; keep the dtype of its arguments")
        fresh = self._toy()[1]
        if changed := [name for name in batch if not torch.equal(batch[name], fresh[name])]:
            raise ValueError(f"{self._where} changes {', '.join(changed)} in place; compute new tensors")
        self._check_numbers(leaf, values)
        each = [{name: value[at : at + 1] for name, value in fresh.items()} for at in range(count)]
        alone = [self(**self._settings, **token) for token in each]
        if not torch.allclose(torch.cat([value.reshape(1) for value in alone]), values, atol=1e-6):
            raise ValueError(
                f"{self._where} gives a token another value where other tokens are beside it, so that the gradient "
                "would depend on the split into micro-batches; leave means over tokens to loss.aggregate, "
                "loss.ratio and loss.advantage"
            )

    def _check_numbers(self, leaf: Tensor, values: Tensor) -> None:
        (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True) if values.requires_grad else (None,)
        for what, tensor in (("value", values), ("gradient", gradient)):
            if tensor is not None and not tensor.isfinite().all():
                at = int((~tensor.isfinite()).nonzero()[0])
                raise ValueError(
                    f"{self._where}: the {what} is {tensor[at].item():g} at a log-ratio of {_LOG_RATIO[at]:g} and an "
                    f"advantage of {_ADVANTAGE[at]:g}; such tokens occur, clamp before exp"
                )
        if gradient is None or not gradient.any():
            raise ValueError(
                f"{self._where}: no gradient reaches the policy; compute with log_ratio or log_prob, not detached"
            )

    def _toy(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's log-probs, which want a gradient, and the tensors of a batch that follow from them."""
        log_ratio, advantage = torch.tensor(_LOG_RATIO), torch.tensor(_ADVANTAGE)
        leaf = torch.full_like(log_ratio, _LOG_PROB).requires_grad_()
        other = _LOG_PROB - log_ratio
        batch = {"log_ratio": leaf - other, "advantage": advantage, "log_prob": leaf * 1.0, "ref_log_prob": other}
        return leaf, {name: value for name, value in batch.items() if name in self.takes}
