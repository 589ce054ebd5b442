"""The batch sizes of an engine, by its requests and its memory."""

from __future__ import annotations

LARGE_GPU = 70 << 30
"""Bytes of memory from which on a GPU computes 16,384 tokens in a batch, and not 8,192."""
MOST_SEQUENCES = 1024
LEAST_SEQUENCES = 16
LOGITS_SHARE = 1 / 16
"""Share of an engine's memory that its logits may take."""


def batch_tokens(memory: float) -> int:
    """Tokens that vLLM computes at most in one batch, prompts in parts if need be, on a GPU of so many bytes.

    They are vLLM's own numbers for batches without a waiting user; its engines in processes of their own take fewer.
    """
    return 16384 if memory >= LARGE_GPU else 8192


def logits_bytes(vocab: int) -> int:
    """Bytes of one response's logits: four fp32 numbers for each word, through temperature, softmax and sampling."""
    return 4 * 4 * vocab


def graph_sizes(most_sequences: int) -> list[int]:
    """Numbers of responses for which vLLM captures a CUDA graph of decoding; others are padded to the next one.

    They are vLLM's own up to 512, where it stops, and go on up to the engine's largest number.

    >>> sizes = graph_sizes(1000)
    >>> len(sizes), sizes[:5], sizes[-3:]
    (82, [1, 2, 4, 8, 16], [976, 992, 1000])
    >>> graph_sizes(3)
    [1, 2, 3]
    """
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, most_sequences, 16)]
    return [size for size in steps if size < most_sequences] + [most_sequences]


def sequences(responses: int, vocab: int, memory: float | None = None) -> int:
    """Responses that an engine computes at a time, where it is sent so many.

    The KV cache sets no limit here: vLLM starts as many as have room in it, and goes on with others when some end.

    Args:
        memory: bytes of the engine's share of its GPU; None on a CPU.

    >>> sequences(96, 50_000), sequences(5_000, 150_000, 40 << 30), sequences(5_000, 150_000, 12 << 30)
    (96, 1024, 335)
    """
    most = MOST_SEQUENCES if memory is None else min(MOST_SEQUENCES, int(LOGITS_SHARE * memory) // logits_bytes(vocab))
    return max(LEAST_SEQUENCES, min(responses, most))
