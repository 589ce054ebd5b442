import dataclasses

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.monitor.completions import CompletionsLog, completion_rows
from grpo_rl.monitor.step_parts import StepParts
from grpo_rl.storage.masking import printable
from grpo_rl.testing import random_group
from tests.helpers import responses_by_step


def rows(step: int = 0, advantages: bool = True) -> list[dict]:
    group = dataclasses.replace(
        random_group(prompt=2, lengths=[1, 3], rewards=[0.0, 2.5], group_id=step),
        reward_parts={"correct": torch.tensor([0.0, 2.0]), "format": torch.tensor([0.0, 0.5])},
        versions=torch.tensor([step, step, step + 1, step + 1]),
        truncated=torch.tensor([False, True]),
        advantages=torch.tensor([-1.0, 1.0]) if advantages else None,
    )
    return completion_rows([group], decode=lambda ids: f"<{len(ids)}>", answer=lambda row: 40 + row)


def test_a_row_says_all_about_one_answer():
    said = {"group_id": 3, "row": 3, "prompt": "<2>", "completion": "<3>", "answer": "43", "tokens": 3}
    judged = {"reward": 2.5, "reward_correct": 2.0, "reward_format": 0.5, "advantage": 1.0}
    assert rows(3)[1] == said | judged | {"truncated": True, "policy_version": 3}


def test_a_step_without_advantages_or_a_part_of_the_reward_does_not_break_the_dataset(tmp_path):
    log, parts = CompletionsLog(tmp_path), ["correct", "format", "other"]
    log.log(0, rows(0, advantages=False), parts)
    log.log(1, [row | {"reward_other": 7.0} for row in rows(1)], parts)
    table = pd.read_parquet(log.path)
    assert table["advantage"].isna().tolist() == table["reward_other"].isna().tolist() == [True, True, False, False]
    assert table["reward_other"].tolist()[2:] == [7.0, 7.0]


def test_pandas_reads_the_folder_as_one_table_in_the_order_of_steps(tmp_path):
    log = CompletionsLog(tmp_path)
    for step in (2, 0, 10, 1):
        log.log(step, rows(step))
    (log.path / ".part-00000011.tmp").write_bytes(b"half a part")
    table = pd.read_parquet(tmp_path / "completions.parquet")
    assert table["step"].tolist() == [0, 0, 1, 1, 2, 2, 10, 10]
    assert list(table.columns) == ["step", *rows()[0]]
    assert table["reward"].sum() == pytest.approx(4 * 2.5)


def test_truncating_leaves_the_steps_up_to_the_checkpoint(tmp_path):
    log = CompletionsLog(tmp_path)
    for step in range(5):
        log.log(step, rows(step))
    log.log(0, [rows()[0] | {"completion": "broken \ud83d"}])  # half a character; the same step again
    assert responses_by_step(tmp_path)[0][0]["completion"] == "broken ?"
    (log.path / ".part-00000005.tmp").write_bytes(b"")
    StepParts(log.path).truncate(2)
    assert StepParts(log.path).steps() == [0, 1, 2]
    assert sorted(p.name for p in log.path.iterdir()) == [f"part-0000000{i}.parquet" for i in range(3)]


@pytest.mark.parametrize(
    "hostile, shown",
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jgone", "gone"),
        ("a\x1bPdevice string\x1b\\b", "ab"),
        ("bell\x07 back\x08space\x00", "bell backspace"),
        ("over\rwritten\r\nnext", "overwritten\nnext"),
        ("\u202egnp.exe\u2066", "gnp.exe"),
        ("\x1b(0charset", "charset"),
        ("2 + 2 = 4 ∎ é 数", "2 + 2 = 4 ∎ é 数"),
    ],
)
def test_hostile_text_loses_what_a_terminal_would_obey(hostile, shown):
    assert printable(hostile) == shown


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_no_text_gets_a_control_character_through(text):
    assert all(c == "\n" or (c >= " " and not "\x7f" <= c < "\xa0") for c in printable(text))


def test_turns_of_a_conversation_are_told_apart_where_the_task_replies(tmp_path):
    group = dataclasses.replace(
        random_group(lengths=[4, 2]),
        prompt_ids=torch.tensor([0]),
        response_ids=torch.tensor([0, 1, 2, 3, 4, 5]),
        trainable=torch.tensor([True, False, False, True, True, True]),
    )
    found = completion_rows([group], lambda ids: "".join("abcdef"[i] * (i + 1) for i in ids), turns=True)
    # a | bb ccc | dddd, then eeeee ffffff in one turn.
    assert [row["turn_ends"] for row in found] == [[1, 6, 10], [11]]
    CompletionsLog(tmp_path).log(1, found)
    assert [list(ends) for ends in pd.read_parquet(tmp_path / "completions.parquet")["turn_ends"]] == [[1, 6, 10], [11]]
