"""What stands between the tags of an answer."""

from __future__ import annotations


def last_answer(text: str) -> str | None:
    """What is inside the last ``<answer>…</answer>``; None where there is none.

    >>> last_answer("<answer>1</answer> or rather <answer> 2 </answer></answer>")
    '2'
    """
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    end = text.find("</answer>", start)  # a second one behind it closes nothing
    return text[start + len("<answer>") : end].strip() if start >= 0 else None
