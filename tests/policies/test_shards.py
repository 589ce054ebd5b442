"""Parts of tensors go where they belong, or nowhere."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.policies.shards import assign


def test_a_single_row_is_not_repeated_over_a_whole_tensor():
    weight = torch.zeros(4, 3)
    with pytest.raises(AssertionError, match=r"a source of \[1, 3\] for a target of \[4, 3\]"):
        assign(weight, torch.ones(1, 3))
    assert not weight.any()
    assign(weight, torch.ones(4, 3, dtype=torch.float64))
    assert weight.all()
