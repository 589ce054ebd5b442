from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import AutoTokenizer

from grpo_rl.monitor.token_log import TokenLog, TokenPieces
from grpo_rl.testing import random_group, save_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model")))


def letters(ids):
    return [(chr(97 + i % 26), False) for i in ids]


def scored(*groups):
    ids = torch.tensor([group.group_id for group in groups for _ in group.response_ids])
    count = torch.arange(len(ids), dtype=torch.float32)
    return TensorDict(group_id=ids, log_prob=-count, entropy=10 + count, batch_size=[len(ids)])


def read(folder, step):
    return pd.read_parquet(folder / "tokens.parquet" / f"part-{step:08d}.parquet")


def test_tokens_of_the_first_scored_group_are_recorded_with_both_log_probs(tmp_path):
    left_out, group, other = (random_group(lengths=[1, 2], group_id=i) for i in (4, 5, 6))
    group = replace(
        group,
        log_probs=torch.tensor([-0.5, -0.25, -9.0]),
        trainable=torch.tensor([True, True, False]),
        versions=torch.tensor([2, 2, 3]),
        response_ids=torch.tensor([0, 1, 2]),
    )
    log = TokenLog(tmp_path, 1, letters)
    log.add(scored(other, group))
    log.write(3, [left_out, group, other])
    found = read(tmp_path, 3)
    assert found[["step", "group_id"]].drop_duplicates().to_numpy().tolist() == [[3, 5]]
    assert found["response"].tolist() == [0, 1, 1] and found["position"].tolist() == [0, 0, 1]
    assert found["text"].tolist() == ["a", "b", "c"] and found["token_id"].tolist() == [0, 1, 2]
    assert found["sampler_log_prob"].fillna(7).tolist() == [-0.5, -0.25, 7]  # nobody sampled what a tool wrote
    assert found["log_prob"].tolist() == [-3.0, -4.0, -5.0] and found["entropy"].tolist() == [13.0, 14.0, 15.0]
    assert found["policy_version"].tolist() == [2, 2, 3] and found["trainable"].tolist() == [True, True, False]


def test_the_first_visit_of_a_group_counts_and_no_number_goes_over_to_the_next_step(tmp_path):
    group = random_group(lengths=[2, 1], group_id=5)
    log = TokenLog(tmp_path, 2, letters)
    log.add(scored(group))
    later = scored(group)
    later["log_prob"] -= 1
    log.add(later)
    log.write(1, [group])
    assert read(tmp_path, 1)["log_prob"].tolist() == [0.0, -1.0, -2.0]
    log.write(2, [group])  # all of this step had zero variance
    assert read(tmp_path, 2)["log_prob"].isna().all() and len(read(tmp_path, 2)) == 3


def test_so_many_groups_are_recorded_as_were_asked_for(tmp_path):
    groups = [random_group(lengths=[1, 1], group_id=i) for i in range(4)]
    log = TokenLog(tmp_path, 3, letters)
    log.add(scored(groups[3], groups[2]))
    log.add(scored(groups[1]))
    log.add(scored(groups[0]))  # one more than was asked for
    log.write(1, groups)
    assert read(tmp_path, 1)["group_id"].drop_duplicates().tolist() == [1, 2, 3]
    log.add(scored(groups[3]))
    log.write(2, groups)
    assert read(tmp_path, 2)["group_id"].drop_duplicates().tolist() == [3, 0, 1]


def test_a_character_of_several_tokens_stands_at_the_last_of_them(tokenizer):
    pieces = TokenPieces(tokenizer)  # a token a byte
    ids = tokenizer("é 中!", add_special_tokens=False)["input_ids"]
    assert [piece for piece, _ in pieces(ids)] == ["", "é", " ", "", "", "中", "!"]


def test_special_tokens_stand_by_their_names(tokenizer):
    end = tokenizer.eos_token_id
    ids = [*tokenizer("ab", add_special_tokens=False)["input_ids"], end]
    assert TokenPieces(tokenizer)(ids) == [("a", False), ("b", False), (tokenizer.eos_token, True)]


@given(st.lists(st.integers(1, 255), max_size=40))
def test_the_pieces_of_a_response_are_the_response(tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = TokenPieces(tokenizer)(ids)
    assert len(found) == len(ids) and "".join(piece for piece, special in found if not special) == text


def test_a_word_that_begins_differently_by_itself_is_cut_right():
    class Sentence:
        """Decodes like SentencePiece: a space before each word but the first."""

        def batch_decode(self, many, **_):
            return [" ".join("ab"[i] for i in ids) for ids in many]

    assert TokenPieces(Sentence())([0, 1, 1]) == [("a", False), (" b", False), (" b", False)]
