"""Fingerprints: every single change shows, shards add up, only bits count; Triton's kernel gives the same."""

import os
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.engines.fingerprint import add, batch_on, fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_change_of_any_single_element_shows(dtype):
    tensor = torch.randn(6, 5).to(dtype)
    whole = fingerprint(tensor)
    for i in range(30):
        changed = tensor.clone()
        changed.view(-1)[i] = changed.view(-1)[i] * 1.5 + 32  # no number of these stays itself
        assert fingerprint(changed) != whole


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99))
def test_row_and_column_shards_add_up_to_the_whole(rows, columns, row, column, seed):
    row, column = min(row, rows), min(column, columns)
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    shards = [
        fingerprint(tensor[r:rr, c:cc], r, c)
        for r, rr in ((0, row), (row, rows))
        for c, cc in ((0, column), (column, columns))
        if rr > r and cc > c
    ]
    assert add(*shards) == fingerprint(tensor)


def test_large_tensors_are_cut_into_chunks_that_add_up():
    tensor = torch.randn(3000, 700).bfloat16()
    halves = add(fingerprint(tensor[:1234]), fingerprint(tensor[1234:], row_start=1234))
    assert halves == fingerprint(tensor)


def test_the_sums_are_exact_at_the_largest_words_and_the_longest_row():
    # Worst case of the fp64 sums: every word -2^15 or 2^15 - 1. Exactness shows as a change of one unit at the end.
    words = torch.full((1, 1 << 18), 32767, dtype=torch.int16)
    less = words.clone()
    less[0, -1] -= 1
    from grpo_rl.engines.fingerprint import _JOIN, _multipliers

    a, b = _multipliers(0, 1, 0, 1 << 18, torch.device("cpu"))
    columns = [[int(x) for x in b[i]] for i in (0, 1)]
    for tensor in (words, less):
        values = tensor[0].tolist()
        sums = [sum(v * m for v, m in zip(values, column, strict=True)) for column in columns]  # Python's are exact
        assert fingerprint(tensor) == (sums[0] + sums[1] * _JOIN) * int(a[0]) % 2**64


def test_the_sign_of_zero_does_not_count():
    assert fingerprint(torch.tensor([0.0, 1.0])) == fingerprint(torch.tensor([-0.0, 1.0]))


SCRIPT = """if True:
    import sys
    import torch
    from grpo_rl.engines.fingerprint import batch_on, fingerprint
    from grpo_rl.engines.fingerprint_triton import TritonBatch, works_on

    device = sys.argv[1]
    assert works_on(device)
    torch.manual_seed(0)
    shapes = [(70, 600), (33,), (5, 3, 7), (40, 1100), (0, 4), (1,), *[(1000, 257), (2, 4096)] * (device == "cuda")]
    pieces = [(torch.randn(shape).to(dtype), i, 2 * i)
              for i, shape in enumerate(shapes) for dtype in (torch.float32, torch.bfloat16)]
    pieces[0][0][3, 3] = pieces[7][0][2, 5] = -0.0
    pieces[0][0][4, 4] = 1e-45
    batch = batch_on(device) if device == "cuda" else TritonBatch()
    assert batch is not None
    later = [batch.add(tensor.to(device), *place) for tensor, *place in pieces[:3]]
    assert int(later[1]) == fingerprint(*pieces[1])
    later += [batch.add(tensor.to(device), *place) for tensor, *place in pieces[3:]]
    assert [int(x) for x in later] == [fingerprint(*piece) for piece in pieces]
"""


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_of_fingerprints_by_triton_equals_single_ones(device):
    if device == "cpu":  # on a GPU a run needs Triton
        pytest.importorskip("triton", reason="Triton has no build for this platform")
    env = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    subprocess.run([sys.executable, "-c", SCRIPT, device], check=True, env=env)


def test_where_a_kernel_cannot_be_launched_fingerprints_are_computed_one_at_a_time(monkeypatch, caplog):
    fingerprint_triton = pytest.importorskip("grpo_rl.engines.fingerprint_triton")
    works_on, sums_of = fingerprint_triton.works_on, MagicMock(side_effect=RuntimeError("fatal error: Python.h"))
    monkeypatch.setattr(fingerprint_triton, "sums_of", sums_of)
    monkeypatch.setattr(fingerprint_triton, "works_on", lambda device: works_on.__wrapped__("cpu"))
    assert batch_on("cuda") is None and sums_of.call_count == 1
    assert "Triton failed: fatal error: Python.h" in caplog.text
