"""2,690 answers of five models, with the verdicts that the reference scorer gave on another machine."""

from __future__ import annotations

import json

import pytest

from grpo_rl.envs.ifeval import check, load_rows

DISAGREEMENTS: dict[tuple[str, int, str, str], str] = {}


@pytest.fixture(scope="module")
def rows(real_data) -> dict[int, dict]:
    return {row["key"]: row for row in load_rows(real_data / "ifeval" / "input_data.jsonl")}


@pytest.fixture(scope="module")
def recorded(real_data, rows) -> list[dict]:
    with open(real_data / "ifeval" / "recorded_verdicts.jsonl", encoding="utf-8") as lines:
        answers = [json.loads(line) for line in lines]
    assert len(answers) == 2690
    assert all(answer["instruction_id_list"] == rows[answer["key"]]["instruction_id_list"] for answer in answers)
    return answers


def judge(row: dict, response: str, loose: bool) -> list[bool]:
    return check(row["instruction_id_list"], row["kwargs"], response, prompt=row["prompt"], loose=loose)


@pytest.fixture(scope="module")
def ours(punkt, rows, recorded) -> list[dict]:
    """Our verdicts, in the same form."""
    return [
        {"strict": judge(row, answer["response"], False), "loose": judge(row, answer["response"], True)}
        for answer in recorded
        for row in [rows[answer["key"]]]
    ]


@pytest.mark.slow
def test_the_reference_scorer_agrees_but_for_what_is_explained(recorded, ours):
    verdicts = 0
    differing = set()
    for theirs, mine in zip(recorded, ours, strict=True):
        for kind in ("strict", "loose"):
            verdicts += len(theirs[kind])
            for name, one, other in zip(theirs["instruction_id_list"], theirs[kind], mine[kind], strict=True):
                if one != other:
                    differing.add((theirs["model"], theirs["key"], name, kind))
    assert verdicts > 8000
    assert differing == set(DISAGREEMENTS)
    assert len(differing) <= verdicts / 1000
