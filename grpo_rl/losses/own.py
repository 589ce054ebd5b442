"""Terms of the loss that are functions of the user's own. Letter: N tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

SURROGATE_TAKES = (
    "log_ratio", "advantage", "log_prob", "clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg",
)  # fmt: skip
"""The parameters that a surrogate of the user's own may have; see `grpo_rl.losses.surrogate.surrogate_loss`."""
KL_TAKES = ("log_prob", "ref_log_prob", "log_ratio")
"""The parameters that a KL estimate of the user's own may have; see `grpo_rl.losses.kl.kl_estimate`."""


class OwnTerm:
    """A function of the user's own that gives one value per token; it gets the arguments that its signature names.

    The value of a token must follow from what is known of this token: a function that looks at the others, as one that
    divides by their mean does, would give another gradient with other micro-batches. For what concerns several tokens
    there are ``loss.ratio`` (a response's ratio), ``loss.aggregate`` (means) and ``loss.advantage``.

    Args:
        function: returns [N] from tensors of [N] and numbers.
        key: the setting, for messages.
        takes: names of what it may take.

    Raises:
        ValueError: it asks for something else.

    >>> OwnTerm(lambda log_ratio, advantage: -log_ratio.exp() * advantage, "loss.surrogate", SURROGATE_TAKES).takes
    ('log_ratio', 'advantage')
    """

    def __init__(self, function: Callable[..., Tensor], key: str, takes: tuple[str, ...]) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.function, self.where = function, f"{key}={getattr(function, '__module__', '?')}:{name}"
        parameters = inspect.signature(function).parameters
        asked = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if other := [p.name for p in asked if p.default is p.empty and p.name not in takes]:
            raise ValueError(f"{self.where} asks for {', '.join(other)}; it can have {', '.join(takes)}")
        self.takes = tuple(name for name in takes if name in parameters)

    def __call__(self, **given: Any) -> Tensor:
        """The value of each token; the arguments are those of the project's own functions, by name.

        Raises:
            ValueError: it returns something else, which would be spread over all tokens.
        """
        values, tokens = self.function(**{name: given[name] for name in self.takes}), given["log_prob"]
        if not isinstance(values, Tensor) or values.shape != tokens.shape:
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
            raise ValueError(f"{self.where} returned {got} for {len(tokens)} tokens; return a value per token")
        return values
