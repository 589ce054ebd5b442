from __future__ import annotations

import pytest

from grpo_rl.envs.rewards.text import repetition_penalty


@pytest.mark.parametrize(
    ("text", "ngram_size", "max_penalty", "expected"),
    [
        ("", 3, -1.0, 0.0),
        ("three different words", 3, -1.0, 0.0),
        # four bigrams, one of them distinct: three quarters came before
        ("no no no no no", 2, -1.0, -0.75),
        # (a b c) (b c a) (c a b) (a b c): one of four
        ("a b c a b c", 3, -1.0, -0.25),
        ("This is this IS", 2, -1.0, -1 / 3),  # this-is, is-this, this-is
        ("a\nb\ta  b", 2, -3.0, -1.0),  # any white space parts words
        ("no no no", 1, -1.5, -1.0),  # two of three words
        ("don't don't", 1, -1.0, -0.5),
        ("yes, yes", 1, -1.0, 0.0),  # a comma makes another word
    ],
)
def test_the_penalty_is_the_share_of_ngrams_that_came_before(text, ngram_size, max_penalty, expected):
    assert repetition_penalty(text, ngram_size=ngram_size, max_penalty=max_penalty) == pytest.approx(expected)
