import pytest

from grpo_rl.envs.rewards.text import (
    accuracy,
    answer_format,
    code_format,
    reasoning_steps,
    repetition_penalty,
    tag_count,
)
from grpo_rl.envs.task import Unjudgeable

IN_FORM = "<think>\n3 + 4 = 7\n</think>\n<answer>\n7\n</answer>"
CODE = "<think>\nAdd.\n</think>\n<answer>\n{}\n</answer>"

# text, format with line breaks, format without, tag count
FORMS = [
    (IN_FORM, 1, 1, 1.0),
    (IN_FORM + "\n", 1, 1, 1.0),
    ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1, 1.0),  # empty, but in form
    ("<think>\na\nb\n\nc\n</think>\n<answer>\n7\n\n8\n</answer>", 1, 1, 1.0),
    ("<think>a</think><answer>7</answer>", 0, 1, 0.0),
    ("<think>\na\n</think>\n<answer>7</answer>", 0, 1, 0.5),
    ("<think>\na\n</think>\n\n<answer>\n7\n</answer>", 0, 1, 1.0),  # a line too many: each tag is there all the same
    ("Well. " + IN_FORM, 0, 0, 1.0),
    (IN_FORM + "\nThat was easy.", 0, 0, 1.0),
    ("<answer>\n7\n</answer>\n<think>\na\n</think>\n", 0, 0, 0.75),  # what comes first has no line before it
    ("<think>\n<think>\na\n</think>\n<answer>\n7\n</answer>", 1, 1, 0.75),
    ("<think>Wrong order</answer><answer>Wrong order</think>", 0, 0, 0.0),
    ("", 0, 0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lines", "loose", "tags"), FORMS)
def test_tags_are_found_in_their_order_and_counted(text, lines, loose, tags):
    assert answer_format(text) == lines
    assert answer_format(text, line_breaks=False) == loose
    assert tag_count(text) == tags


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("Just text. It takes one step: 5.", 0),
        ("Step 1: add", 1),
        ("Step one: add", 0),
        ("First, add. Next, halve.", 2),
        ("First add, then halve", 0),
        ("First, a\nSecond, b\nNext, c\nFinally, d", 4),
        ("It is\n1. add\n2. halve\n10. stop", 3),
        ("It is 1. add", 0),
        ("so:\n* add\n* halve\n", 2),
        ("3 - 2\n  - indented", 0),
    ],
)
def test_steps_are_counted_where_they_are_written_as_steps(text, steps):
    assert reasoning_steps(text, enough=5) == steps / 5
    assert reasoning_steps(text) == min(1, steps / 3)


@pytest.mark.parametrize(
    ("answer", "python", "java"),
    [
        ("```python\nprint(7)\n```", 1, 0),
        ("Here:\n```python\nprint(7)\n```\nDone.", 1, 0),
        ("```python\nprint(7)", 0, 0),
        ("```java\nx\n```", 0, 1),
        ("```javascript\nx\n```", 0, 0),
        ("```java\nx\n```\n```python\nx\n```", 1, 1),
    ],
)
def test_code_counts_in_a_closed_block_of_its_language_inside_the_answer(answer, python, java):
    assert code_format(CODE.format(answer)) == python
    assert code_format(CODE.format(answer), language="java") == java
    assert code_format(answer) == 0
    assert code_format(f"<think>\n{answer}\n</think>\n<answer>\n7\n</answer>") == 0


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


@pytest.mark.slow
def test_answers_are_compared_as_mathematics_and_a_gold_answer_that_makes_no_sense_is_no_wrong_answer():
    assert accuracy(r"So it is $\boxed{\frac{126}{800}}$.", r"\frac{63}{400}") == 1.0
    assert accuracy(r"So it is $\boxed{\frac{64}{400}}$.", r"\frac{63}{400}") == 0.0
    for gold in ("", None):
        with pytest.raises(Unjudgeable):
            accuracy(r"\boxed{7}", gold)
