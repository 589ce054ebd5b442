"""Experts: what a plan needs to know of those of a mixture."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from grpo_rl.perf.roofline import experts_of_a_token
from grpo_rl.policies.routing import stacked_experts


class NotPlannedError(ValueError):
    """A model that can be trained is of a kind whose memory is not counted, so that there is no plan; names it."""


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture; those of a dense model are none.

    Args:
        number: experts of a layer.
        chosen: experts that a token visits in a layer.
        intermediate: numbers between an expert's products.
        parameters: number in all experts of all layers.
    """

    number: int = 1
    chosen: int = 0
    intermediate: int = 0
    parameters: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Experts:
        """The experts of a model, which may have no weights.

        Raises:
            NotPlannedError: its config does not say how many of them a token visits, or its layers have different ones.
        """
        layers = [weights for _, _, weights in stacked_experts(model)]
        if not layers:
            return cls()
        config, name = model.config.get_text_config(), type(model).__name__
        chosen = experts_of_a_token(config)
        if not isinstance(chosen, int):
            raise NotPlannedError(f"{name}'s config does not say how many experts a token visits, which its plan needs")
        numbers = {len(weight) for weights in layers for weight in weights}
        # The last product's weights, [I, H] or [H, I] of each expert, are the smallest: the others' have two factors.
        widths = {min(w.numel() // len(w) for w in weights) // config.hidden_size for weights in layers}
        if len(numbers) > 1 or len(widths) > 1:
            raise NotPlannedError(
                f"{name}'s layers have different experts ({numbers} of {widths}); plans are of equal ones"
            )
        total = sum(weight.numel() for weights in layers for weight in weights)
        return cls(numbers.pop(), chosen, widths.pop(), total)

    def visited(self, tokens: int) -> float:
        """The share of a layer's experts that so many tokens visit together, each choosing by itself.

        >>> Experts(number=8, chosen=2).visited(1), Experts(number=8, chosen=2).visited(2), Experts().visited(9)
        (0.25, 0.4375, 0.0)
        """
        return 1 - (1 - self.chosen / self.number) ** tokens
