"""Sampling: the settings by which an engine samples, and the sizes of its batches by requests and memory."""

from dataclasses import dataclass

LARGE_GPU = 70 << 30
"""Bytes of memory from which on a GPU computes 16,384 tokens in a batch, and not 8,192."""
MOST_SEQUENCES = 1024
LEAST_SEQUENCES = 16
LOGITS_SHARE = 1 / 16
"""Share of an engine's memory that its logits may take."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    Args:
        temperature: logits are divided by it; 0 is greedy.
        top_p: mass of the nucleus; 1 samples from the whole distribution.
        max_new_tokens: a response that reaches this many tokens without ending is truncated.
        min_new_tokens: no end of sequence before this many tokens; benchmarks use it to fix the work.
        top_k: only the so many likeliest tokens are sampled; 0: all.
        min_p: only tokens of at least this share of the likeliest one's probability are sampled; 0: all.
        stop: a response ends with the token that completes one of these strings in its text; the token stays, as it
            was sampled.
        ignore_eos: a response goes on behind an end-of-sequence token.
        seed: of this request's own random numbers, so that the same engine draws the same response again; None: the
            engine's.

    Engines apply the temperature, then min-p, then top-k, then top-p to what is left, as vLLM does.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        # At less than this vLLM samples at this all the same, and logits divided by 1e-320 are infinite.
        if self.temperature and not 0.01 <= self.temperature <= 2:
            raise ValueError(
                f"sampling.temperature is {self.temperature}; it must be 0, which is greedy, or in [0.01, 2]"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must be in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"sampling.min_p is {self.min_p}; it must be in [0, 1), 0 keeping all tokens")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"sampling.stop is {self.stop!r}; it must be a list of strings, none of them empty")

    @property
    def cuts(self) -> bool:
        """True if tokens are cut off, so that samples come with their kept sets; greedy ones never do.

        >>> Sampling(top_p=0.9).cuts, Sampling().cuts, Sampling(temperature=0.0, top_k=5).cuts
        (True, False, False)
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def batch_tokens(memory: float) -> int:
    """Tokens that vLLM computes at most in one batch, prompts in parts if need be, on a GPU of so many bytes.

    They are vLLM's own numbers for batches without a waiting user; its engines in processes of their own take fewer.
    """
    return 16384 if memory >= LARGE_GPU else 8192


def logits_bytes(vocab: int) -> int:
    """Bytes of one response's logits: four fp32 numbers for each word, through temperature, softmax and sampling."""
    return 4 * 4 * vocab


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
