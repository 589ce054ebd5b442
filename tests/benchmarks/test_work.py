"""Arms of the benchmarks get the same work, and their figures are what they say."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.testing import random_group

pytestmark = pytest.mark.nightly


def test_trl_gets_every_response_once_padded_to_the_longest_of_the_step(script):
    groups = [
        random_group(prompt=3, lengths=[1, 7], group_id=0).with_advantages(torch.tensor([1.0, -1.0])),
        random_group(prompt=4, lengths=[2, 4], group_id=1, seed=1).with_advantages(torch.tensor([2.0, -2.0])),
    ]
    batches = script("peers").trl_batches(groups, batch=2, pad_id=99)
    assert [batch["completion_ids"].shape for batch in batches] == [(2, 7), (2, 7)]
    seen = {}
    for batch in batches:
        for prompt, prompt_mask, ids, mask, advantage in zip(*batch.values(), strict=True):
            assert (ids[mask == 0] == 99).all() and mask.diff().le(0).all(), "responses are padded on the right"
            assert (prompt[prompt_mask == 0] == 99).all() and prompt_mask.diff().ge(0).all(), "prompts on the left"
            seen[float(advantage)] = (prompt[prompt_mask == 1].tolist(), ids[mask == 1].tolist())
    expected = {
        float(advantage): (group.prompt_ids.tolist(), ids.tolist())
        for group in groups
        for advantage, ids in zip(group.advantages, group.responses, strict=True)
    }
    assert seen == expected
    with pytest.raises(ValueError, match="4 responses can't be cut into batches of 3"):
        script("peers").trl_batches(groups, batch=3, pad_id=99)


@pytest.mark.parametrize("name", ["grpo_rl", "trl_fused", "naive"])
@pytest.mark.parametrize("entropy_counts", [False, True])
def test_every_head_makes_the_same_gradients(script, name, entropy_counts):
    head = script("head")
    if name in head.PEERS:
        pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(5, 8, generator=generator),
        torch.randn(11, 8, generator=generator),
        torch.randint(11, (5,), generator=generator),
        torch.randn(5, generator=generator),
    ]
    hidden, weight = (leaf.double().requires_grad_() for leaf in inputs[:2])
    log_p = (hidden @ weight.T).log_softmax(-1)
    loss = -(log_p[range(5), inputs[2]] * inputs[3]).mean()
    if entropy_counts:
        loss = loss + head.ENTROPY_COEF * (log_p.exp() * log_p).sum(-1).mean()
    loss.backward()
    gradients = head.forward_backward(head.HEADS[name](), inputs, entropy_counts)
    for gradient, leaf in zip(gradients, (hidden, weight), strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-6)
