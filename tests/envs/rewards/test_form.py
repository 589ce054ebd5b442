from __future__ import annotations

import pytest

from grpo_rl.envs.rewards.text import answer_format, code_format, reasoning_steps, tag_count

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
