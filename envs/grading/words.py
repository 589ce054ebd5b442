"""Agreement of a short answer with the gold answer, word by word, as SQuAD and HotpotQA measure it."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """The text in lower case, without ASCII punctuation, articles and spare spaces, as SQuAD and HotpotQA compare.

    Source: https://github.com/hotpotqa/hotpot/blob/master/hotpot_evaluate_v1.py

    >>> normalize_answer("The  U.S. Army, an army")
    'us army army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> bool:
    """True if both are the same once normalised."""
    return normalize_answer(prediction) == normalize_answer(gold)


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over normalised words; ``yes`` and ``no`` are right or wrong as a whole.

    Source: as :func:`normalize_answer`.

    One word of two is right, and the gold answer's only one is found: precision 1/2, recall 1.

    >>> round(f1("Barack Obama", "Obama"), 3), f1("yes, it is", "yes")
    (0.667, 0.0)
    """
    predicted, wanted = normalize_answer(prediction), normalize_answer(gold)
    if predicted != wanted and {predicted, wanted} & {"yes", "no", "noanswer"}:
        return 0.0
    predicted_words, wanted_words = predicted.split(), wanted.split()
    same = (Counter(predicted_words) & Counter(wanted_words)).total()
    return 2 * same / (len(predicted_words) + len(wanted_words)) if same else 0.0
