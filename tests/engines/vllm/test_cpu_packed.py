"""Rows are packed where they belong, and not a word beside it is touched."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.engines.vllm import cpu_packed as vllm_cpu_packed
from grpo_rl.engines.vllm.cpu_packed import LANES, Packed


@pytest.fixture(autouse=True)
def fbgemm():
    try:
        vllm_cpu_packed._transpose()
    except LookupError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("words", [1, 2, 3, 4, 7, 15, 16, 17, 33, 288])
@pytest.mark.parametrize(("row", "count"), [(0, 192), (0, 1), (60, 7), (63, 129), (65, 2), (128, 64), (5, 0), (191, 1)])
def test_rows_are_packed_where_they_belong_and_nothing_else_is_touched(words, row, count):
    blocks, padded = 3, -(-words // 16) * 16
    around = torch.full((blocks * padded * LANES + 2 * LANES,), -7, dtype=torch.int32)
    packed = Packed(around[LANES:-LANES].view(blocks, padded, LANES), words, owner=None)
    expected = around.clone()
    values = torch.arange(count * words, dtype=torch.int32).view(count, words) * 12_345_677
    for i in range(count):
        block, lane = divmod(row + i, LANES)
        for word in range(words):
            expected[LANES + (block * padded + word) * LANES + lane] = values[i, word]
    packed.write(row, values)
    assert torch.equal(around, expected)
    assert torch.equal(packed.read(row, count), values)


def test_what_are_no_rows_of_it_is_refused_by_its_fault():
    packed = Packed(torch.zeros(2, 16, LANES, dtype=torch.int32), words=3, owner=None)
    for values, told in (
        (torch.zeros(2, 3, dtype=torch.int16), r"are \[n, 3\] int32.*\[2, 3\] torch.int16"),
        (torch.zeros(3, 2, dtype=torch.int32).T, r"contiguous.*strides \(1, 2\)"),
        (torch.zeros(2, 4, dtype=torch.int32), r"\[2, 4\]"),
        (torch.zeros(6, dtype=torch.int32), r"\[6\]"),
    ):
        with pytest.raises(ValueError, match=told):
            packed.write(0, values)
    for row in (-1, 127):
        with pytest.raises(ValueError, match=f"rows {row} to {row + 2} of 128"):
            packed.write(row, torch.zeros(2, 3, dtype=torch.int32))
    for blocks in (torch.zeros(2, 2, LANES, dtype=torch.int32), torch.zeros(2, 16, LANES)):
        with pytest.raises(ValueError, match="blocks of 3 words"):
            Packed(blocks, words=3, owner=None)


def test_a_pytorch_without_the_transposition_has_no_packed_weights(monkeypatch):
    monkeypatch.setattr(vllm_cpu_packed, "_transpose", vllm_cpu_packed._transpose.__wrapped__)

    class Library:
        def __getitem__(self, name):
            raise AttributeError(name)

    monkeypatch.setattr(vllm_cpu_packed.ctypes, "CDLL", lambda path: Library())
    with pytest.raises(LookupError, match="has no _ZN6fbgemm"):
        vllm_cpu_packed.packed_weight(None, 2)
