"""FlexAttention over shared prefixes equals dense attention under the rule as it is told, and skips what no one sees.

Without a GPU: PyTorch's reference implementation forward and backward, and its compiled CPU kernel forward.
"""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from grpo_rl.policies import attention_flex as flex
from grpo_rl.policies.attention import MASK_CHUNK, attention
from grpo_rl.policies.attention_flex import flex_shared_prefix
from grpo_rl.policies.packing import Layout, pack
from grpo_rl.testing import random_group
from tests.helpers import forked_groups

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]

# Prompt length and response lengths of each group: one-token prompts, empty responses, responses longer than a block.
SHAPES = [(5, [3, 0, 130]), (1, [4, 7]), (140, [1, 60, 1]), (3, [0, 0]), (30, [40])]
CPU = torch.device("cpu")


def layout_of(shapes, others=()) -> Layout:
    groups = [random_group(p, lengths, 1000, group_id=i, seed=i) for i, (p, lengths) in enumerate(shapes)]
    return pack([*groups, *others]).layout


def who_sees_whom(layout: Layout, window: int | None) -> torch.Tensor:
    """The rule: own node or an ancestor of it, not later, not too far back."""
    nodes = layout.nodes
    owner = [i for i, node in enumerate(nodes) for _ in range(node.start, node.end)]
    position = torch.tensor([node.position + t - node.start for node in nodes for t in range(node.start, node.end)])
    lines = []  # each node, its parent, and so on
    for i, node in enumerate(nodes):
        lines.append({i} | (lines[node.parent] if node.parent >= 0 else set()))
    related = torch.tensor([[k in line for k in range(len(nodes))] for line in lines])
    back = position[:, None] - position
    mask = related[owner][:, owner] & (back >= 0)
    return mask if window is None else mask & (back < window)


def dense(query, key, value, mask, scale, softcap=None):
    """Attention with all T * T scores, from its definition."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def qkv(tokens: int, heads: int = 4, kv_heads: int = 2, size: int = 16, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, tokens, size, generator=g, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.fixture
def with_gradients(monkeypatch):
    """PyTorch refuses CPU tensors with gradient at the door; behind it, its reference implementation takes them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def assert_equal(out, expected, inputs):
    """Values, and gradients of a random sum."""
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    up = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found, wanted = (torch.autograd.grad(x, inputs, up) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.cases(4)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 20, 133])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.usefixtures("with_gradients")
def test_values_and_gradients_equal_those_of_dense_attention(window, softcap, kv_heads):
    layout = layout_of(SHAPES, forked_groups())
    inputs = [x.requires_grad_() for x in qkv(layout.tokens, kv_heads=kv_heads)]
    out = flex_shared_prefix(*inputs, layout, 0.3, window, softcap)
    assert_equal(out, dense(*inputs, who_sees_whom(layout, window), 0.3, softcap), inputs)


@pytest.mark.usefixtures("with_gradients")
def test_sinks_and_values_of_another_size_equal_dense_attention():
    """Each head's sink is one more key whose score is given, and whose value is zero."""
    layout = layout_of(SHAPES, forked_groups())
    mask = who_sees_whom(layout, 20)
    query, key, value = qkv(len(mask))
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x.requires_grad_() for x in (query, key, value[..., :6].contiguous(), sinks)]
    key, value = (x.repeat_interleave(2, dim=1) for x in inputs[1:3])
    scores = (inputs[0] @ key.mT * 0.3).masked_fill(~mask, -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(1, 4, len(mask), 1)], -1)
    expected = with_sink.softmax(-1)[..., :-1] @ value
    assert_equal(flex_shared_prefix(*inputs[:3], layout, 0.3, 20, sinks=sinks), expected, inputs)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 1000])
def test_in_chunks_a_token_sees_those_of_its_own_chunk_alone(chunk):
    layout = layout_of(SHAPES, forked_groups())
    inputs = [x.requires_grad_() for x in qkv(layout.tokens)]
    position = layout.positions
    mask = who_sees_whom(layout, None) & (position[:, None] // chunk == position // chunk)
    module = torch.nn.Identity()
    setattr(module, MASK_CHUNK, chunk)
    out = attention(module, *inputs, None, prefix_layout=layout, scaling=0.3)[0].transpose(1, 2)
    assert_equal(out, dense(*inputs, mask, 0.3), inputs)


def test_layouts_windows_and_lengths_of_a_bucket_share_one_kernel(monkeypatch):
    counter = CompileCounter()
    torch.compiler.reset()
    kernel = torch.compile(flex_attention, backend=counter, **flex.COMPILE)
    monkeypatch.setattr(flex, "flex_attention", kernel)  # what a CPU tensor goes through
    for shapes, window in [(SHAPES, None), (SHAPES, 20), ([(9, [400, 3])], 7), ([(256, [128, 128])], None)]:
        layout = layout_of(shapes)
        flex_shared_prefix(*qkv(layout.tokens), layout, 0.3, window)
    assert counter.frame_count == 1
    layout = layout_of([(500, [13])])
    flex_shared_prefix(*qkv(513), layout, 0.3)
    assert counter.frame_count == 2


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles CPU kernels with g++")
def test_the_compiled_cpu_kernel_which_skips_blocks_gives_the_same_values(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(flex, "flex_attention", flex.compiled())
    layout = layout_of(SHAPES, forked_groups())
    inputs = qkv(layout.tokens, dtype=torch.float32)
    for window, softcap in [(None, None), (20, 2.0)]:
        out = flex_shared_prefix(*inputs, layout, 0.3, window, softcap)
        expected = dense(*inputs, who_sees_whom(layout, window), 0.3, softcap)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_block_tables_are_those_that_pytorch_derives_and_contiguous():
    layout = pack([random_group(140, [60] * 4), random_group(9, [200, 0, 300], group_id=1)]).layout
    tables = flex.block_tables(layout.nodes, 1024, None, torch.device("cpu"))
    derived = BlockMask.from_kv_blocks(*tables[1:5], BLOCK_SIZE=flex.BLOCK)
    expected = (derived.q_num_blocks, derived.q_indices, derived.full_q_num_blocks, derived.full_q_indices)
    for ours, theirs in zip(tables[5:9], expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs)
