"""Two reward functions of the tutorials, to try ``env.reward=`` with: they need no gold answer and no model."""

from collections.abc import Sequence

LENGTH = 20


def reward_len(completion: Sequence[str], **columns: object) -> list[float]:
    """A reward of minus the distance of each completion's length from 20 characters.

    Source: TRL's GRPO quick start, https://huggingface.co/docs/trl/main/en/grpo_trainer.

    >>> reward_len(completion=["Twenty characters it", "Short."])
    [0.0, -14.0]
    """
    return [float(-abs(LENGTH - len(text))) for text in completion]


def sentence_ending(completion: Sequence[str], **columns: object) -> list[float]:
    """1 for each completion that ends with a full stop, an exclamation or a question mark (and white space), else 0.

    >>> sentence_ending(completion=["It works.", "It works", "Does it?"])
    [1.0, 0.0, 1.0]
    """
    return [float(text.rstrip().endswith((".", "!", "?"))) for text in completion]
