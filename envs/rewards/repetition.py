"""A penalty for responses that repeat themselves."""

from __future__ import annotations


def repetition_penalty(text: str, *, ngram_size: int = 3, max_penalty: float = -1.0) -> float:
    """``max_penalty`` times the share of n-grams that occurred before; 0 where the text is shorter than one n-gram.

    Words are what white space parts, in lower case: of a text without spaces nothing is seen.

    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", https://arxiv.org/abs/2502.03373, appendix C.2, as a
    penalty of the whole response: Open-R1's ``repetition_penalty``.

    Args:
        text: of the response.
        ngram_size: words in an n-gram.
        max_penalty: at most 0; what a text of one n-gram without end would earn.

    Raises:
        ValueError: ``ngram_size`` is no whole number or below 1, or ``max_penalty`` above 0.

    Six bigrams, of which "this is" and "is a" come twice:

    >>> repetition_penalty("this is a this is a test", ngram_size=2, max_penalty=-3.0)
    -1.0
    """
    if not isinstance(ngram_size, int) or ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size}; it must be a whole number, at least 1")
    if not max_penalty <= 0:
        raise ValueError(f"max_penalty={max_penalty}; a penalty is 0 or less")
    words = text.lower().split()
    total = len(words) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len(set(zip(*(words[start:] for start in range(ngram_size)), strict=False)))
    return max_penalty * (total - distinct) / total or 0.0
