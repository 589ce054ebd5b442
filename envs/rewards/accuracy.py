"""A reward for a mathematical answer that equals the gold answer."""

from __future__ import annotations

from grpo_rl.envs.task import Unjudgeable


def accuracy(text: str, gold: str | None) -> float:
    r"""1 where the text's last boxed answer equals ``gold`` as mathematics, else 0.

    The judge is `grpo_rl.envs.grading.verification.verify`.

    Source: Open-R1's ``accuracy``, https://github.com/huggingface/open-r1/blob/main/src/open_r1/rewards.py. There
    LaTeX outside a box counts too where there is no box, and a gold answer that can't be parsed earns 1 in some
    versions; here it is no reward at all.

    Raises:
        Unjudgeable: there is no gold answer, or it can't be parsed.

    >>> accuracy(r"So it is \boxed{\frac{126}{800}}.", r"\frac{63}{400}")
    1.0
    """
    # Imported here: it brings math-verify, which the other rewards need not wait for.
    from grpo_rl.envs.grading.verification import verify

    if gold is None:
        raise Unjudgeable("the row has no gold answer")
    verdict = verify(gold, text)
    if verdict is None:
        raise Unjudgeable(f"the gold answer can't be parsed: {gold[:80]!r}")
    return float(verdict)
