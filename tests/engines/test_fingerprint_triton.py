"""Fingerprints of many tensors by Triton's kernel are those computed one at a time: on a GPU, else interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from grpo_rl.engines import fingerprint, fingerprint_triton
from grpo_rl.engines.fingerprint_triton import works_on

pytest.importorskip("triton", reason="Triton has no build for this platform")

SCRIPT = """if True:
    import torch
    from grpo_rl.engines.fingerprint import fingerprint
    from grpo_rl.engines.fingerprint_triton import TritonBatch, works_on

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert works_on(device)
    torch.manual_seed(0)
    shapes = [(70, 600), (33,), (5, 3, 7), (40, 1100), (0, 4)]
    pieces = [(torch.randn(shape).to(dtype), i, 2 * i)
              for i, shape in enumerate(shapes) for dtype in (torch.float32, torch.bfloat16)]
    pieces[0][0][3, 3] = pieces[7][0][2, 5] = -0.0
    pieces[0][0][4, 4] = 1e-45
    batch = TritonBatch()
    later = [batch.add(tensor.to(device), *place) for tensor, *place in pieces[:3]]
    assert int(later[1]) == fingerprint(*pieces[1])
    later += [batch.add(tensor.to(device), *place) for tensor, *place in pieces[3:]]
    assert [int(x) for x in later] == [fingerprint(*piece) for piece in pieces]
"""


@pytest.mark.nightly
def test_a_batch_of_fingerprints_equals_single_ones():
    env = dict(os.environ) if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=env)


def test_where_a_kernel_cannot_be_launched_fingerprints_are_computed_one_at_a_time(monkeypatch, caplog):
    tried = []

    def sums_of(pieces):
        tried.append(pieces)
        raise RuntimeError("fatal error: Python.h: No such file")

    monkeypatch.setattr(fingerprint_triton, "sums_of", sums_of)
    monkeypatch.setattr(fingerprint_triton, "works_on", lambda device: works_on.__wrapped__("cpu"))
    assert fingerprint.batch_on("cuda") is None and len(tried) == 1
    assert "Triton failed: fatal error: Python.h" in caplog.text
