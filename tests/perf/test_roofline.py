"""The floor of a step: counted by hand, and by PyTorch's own counter of operations."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_rl.perf.roofline import ModelSizes, Rates, StepRoofline, floors_s
from grpo_rl.policies.lora import LoRA, add_adapters
from grpo_rl.testing import random_group
from tests.helpers import forked_groups

SIZES = ModelSizes(trunk=100, hidden=4, vocab=10, attention=0, decode_bytes=280, pushed_bytes=300, windows=())
UNIT = Rates(gemm_flops_per_s=1.0, bytes_per_s=1e9)
"""Memory is no hindrance, and seconds are operations."""


LAYERS = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def config(**changes) -> LlamaConfig:
    return LlamaConfig(**LAYERS, **HEADS, **changes)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_count_a_tied_head_once_and_the_embedding_not_at_all(tied):
    sizes = ModelSizes.of(LlamaForCausalLM(config(tie_word_embeddings=tied)).bfloat16())
    # A layer: queries 8·8, keys and values 8·4 each, output 8·8, three matrices 8·12 of the MLP, two norms; at the end
    # a norm.
    trunk = 2 * (64 + 32 + 32 + 64 + 3 * 96 + 16) + 8
    table = 11 * 8
    assert (sizes.trunk, sizes.hidden, sizes.vocab) == (trunk, 8, 11)
    assert sizes.decode_bytes == 2 * (trunk + table)
    assert sizes.pushed_bytes == 2 * (trunk + table * (1 if tied else 2))


def test_adapters_are_left_out_but_where_they_alone_are_pushed_and_a_frozen_trunk_is_four_operations():
    pytest.importorskip("peft")
    plain = ModelSizes.of(LlamaForCausalLM(config()).bfloat16())
    model = add_adapters(LlamaForCausalLM(config()).bfloat16(), LoRA(rank=3, targets=["q_proj"]))
    merged, beside = (ModelSizes.of(model, pushes_adapters) for pushes_adapters in (False, True))
    assert merged == replace(plain, trained=0.0)
    # 2 bytes each, in 2 layers: A is 3·8, B is 8·3.
    assert beside == replace(merged, pushed_bytes=2 * 2 * (3 * 8 + 8 * 3))
    step = StepRoofline(model, pushes_adapters=True, rates=UNIT)
    assert step.sizes == beside
    assert floors_s([random_group(prompt=4, lengths=[3, 2])], replace(SIZES, trained=0.0), UNIT)["train"] == (
        4 * 100 * 9 + 4 * 40 * 5
    )


def test_the_training_floor_is_what_torch_counts_in_a_plain_model_without_attentions_products():
    model = LlamaForCausalLM(config(tie_word_embeddings=False))
    group = random_group(prompt=5, lengths=[7], vocab=11)
    ids = torch.cat([group.prompt_ids, group.response_ids])[None]
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        model.lm_head(hidden[0, 4:-1]).sum().backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    sizes = replace(ModelSizes.of(model), attention=0)
    # The weights of the norms multiply no matrix: 2 in each of 2 layers and 1 at the end, 8 each.
    assert floors_s([group], sizes, UNIT)["train"] == counted + 6 * (5 * 8) * 12


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_multiplies_each_query_with_the_keys_it_sees_and_their_values(window):
    model = MistralForCausalLM(MistralConfig(**config().to_dict() | {"sliding_window": window}))
    group = random_group(prompt=5, lengths=[4, 0, 2], vocab=11)
    seen = 0
    for first, last in ((0, 5), (5, 9), (5, 5), (5, 7)):
        positions = torch.arange(first, last)[:, None] - torch.arange(last)
        seen += int(((positions >= 0) & (positions < (window or 100))).sum())
    sizes = ModelSizes.of(model)
    attention = floors_s([group], sizes, UNIT)["train"] - floors_s([group], replace(sizes, attention=0), UNIT)["train"]
    # Two products forward and four backward, of 2 operations each, for 2 layers of 2 heads of size 4.
    assert attention == 6 * 2 * seen * 2 * 2 * 4


def test_what_responses_begin_with_in_common_is_trained_on_once():
    """71 of these 151 tokens are packed, 3 of them twice as a node of their own would cost more; 44 of 81 predicted."""
    for epochs in (1, 3):
        floor = floors_s(forked_groups(), SIZES, UNIT, epochs=epochs)["train"]
        assert floor == epochs * (6 * 100 * (71 - 3) + 6 * 40 * 44)


def test_of_a_mixtures_experts_those_count_that_a_token_visits():
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    sizes = ModelSizes.of(Qwen3MoeForCausalLM(Qwen3MoeConfig(**LAYERS, **HEADS, **experts)).bfloat16())
    attention, norms, router = 8 * 8 + 2 * 8 * 4 + 8 * 8, 8 + 8 + 4 + 4, 6 * 8
    expert = 3 * 8 * 5
    assert sizes.trunk == 2 * (attention + norms + router + 2 * expert) + 8
    assert sizes.decode_bytes == 2 * (sizes.trunk + 11 * 8)
    assert sizes.pushed_bytes == 2 * (sizes.trunk + 2 * 4 * expert + 2 * 11 * 8)  # all experts, embedding and head
