"""Packing of groups, the tokens that each may see, and the models that are refused; values are in test_exactness.py."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import MixtralConfig, PreTrainedModel

from grpo_rl.assembly import devices as build
from grpo_rl.policies.packing import pack
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.probe import Band, Chunks, trial_calls
from grpo_rl.policies.supported import supported_calls
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import random_group
from tests.helpers import forked_groups
from tests.policies.test_exactness import RAGGED, VOCAB, fp64_model, groups_of

SIZES = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip


def test_a_response_sees_neither_its_siblings_nor_another_group():
    groups = groups_of(RAGGED, seed=7)
    policy = TrainPolicy(fp64_model("llama-tied"))
    before = policy.score(groups)[0].split([len(g.response_ids) for g in groups])
    changed = list(groups)
    changed[1] = random_group(1, [4, 7], VOCAB, group_id=1, seed=99)
    after = policy.score(changed)[0].split([len(g.response_ids) for g in groups])
    for g in (0, 2, 3, 4, 5):
        torch.testing.assert_close(before[g], after[g], rtol=0, atol=1e-12)
    group = groups[0]
    ids = group.response_ids.clone()
    ids[: group.offsets[1]] = (ids[: group.offsets[1]] + 1) % VOCAB  # another first response
    alone = policy.score([replace(group, response_ids=ids)])[0]
    first = int(group.offsets[1])
    torch.testing.assert_close(alone[first:], before[0][first:], rtol=0, atol=1e-12)
    assert (alone[:first] - before[0][:first]).abs().max() > 1e-3


def test_what_sequences_begin_with_in_common_is_computed_once():
    """Counted by hand: 12 tokens of the system message, 5 of a question, 14 of three responses and a prompt, ends."""
    packed = pack(forked_groups())
    runs = [(n.position, n.end - n.start, n.parent) for n in packed.layout.nodes]
    system = [(0, 12, -1)]
    question = [(12, 5, 0), (17, 14, 1), (31, 3, 2), (31, 6, 2), (31, 7, 2), (38, 5, 5), (38, 2, 5), (17, 4, 1)]
    other = [(12, 3, 0), (15, 9, 9), (15, 1, 9)]
    assert runs == system + question + other
    assert len(packed.input_ids) == 71
    # 34 tokens of responses stand in several: 14 in two more, 9 in one more; the rest is there once.
    assert packed.row is not None and len(packed.row) == 81 and len(packed.target_ids) == 81 - 2 * 14 - 9
    assert torch.equal(packed.target_ids[packed.row], torch.cat([g.response_ids for g in forked_groups()]))


def test_groups_without_anything_in_common_lie_in_their_own_order_each_prompt_once():
    groups = [random_group(p, lengths, 10_000, i, seed=i) for i, (p, lengths) in enumerate([(9, [5, 0, 30]), (4, [7])])]
    packed = pack(groups)
    everything = torch.cat([x for g in groups for x in (g.prompt_ids, g.response_ids)])
    assert packed.row is None and torch.equal(packed.input_ids, everything)


def test_two_groups_with_one_prompt_share_it_whatever_it_saves():
    """30 tokens for 16 responses of 1,000: sharing costs more than it saves, but each group's prompt stands once."""
    group = random_group(30, [1000] * 8, 10_000)
    other = random_group(30, [1000] * 8, 10_000, group_id=1, seed=1)
    assert len(pack([group, replace(other, prompt_ids=group.prompt_ids)]).input_ids) == 30 + 16_000


def test_a_common_beginning_too_short_to_be_worth_a_node_is_computed_again():
    """Four tokens in common of two long responses, then of two hundred, which they are worth; beside another one."""

    def tokens(size: int) -> int:
        group = random_group(10, [20] * (size + 1), 10_000)
        same = group.response_ids.view(size + 1, 20).clone()
        same[1:, :4] = same[1, :4]
        return len(pack([replace(group, response_ids=same.flatten())]).input_ids)

    assert tokens(2) == 10 + 3 * 20
    assert tokens(200) == 10 + 20 + 4 + 200 * 16


def small(name: str, **config: object) -> PreTrainedModel:
    """A random model by the name of its class, in training mode."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**SIZES | config)).train()


def rope(kind: str, **settings: object) -> dict:
    return dict(rope_type=kind, rope_theta=1000.0, **settings)


REFUSED = {
    # Frequencies that depend on the longest sequence at hand: a group would be scored by its neighbours' lengths.
    "dynamic-rope": ("LlamaForCausalLM", dict(rope_parameters=rope("dynamic", factor=2.0)), "dynamic"),
    "rope-of-one-kind-of-layer": (
        "Gemma3ForCausalLM",
        dict(
            rope_parameters={"full_attention": rope("dynamic", factor=2.0), "sliding_attention": rope("default")},
            layer_types=["full_attention", "sliding_attention"],
        ),
        "dynamic",
    ),
    # What is no causal attention.
    "bidirectional": ("GemmaForCausalLM", dict(use_bidirectional_attention=True), "causal"),
    # States that a response can't take over.
    "linear-attention-without-a-cache": (
        "MiniMaxForCausalLM",
        dict(num_local_experts=2, layer_types=["full_attention", "linear_attention"]),
        "MiniMaxLightningAttention keeps a state that is neither",
    ),
    "state-space": ("MambaForCausalLM", {}, "layer of its MambaMixer gets no keyword arguments"),
    "state-that-is-forgotten": (
        "JambaForCausalLM",
        dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_dt_rank=4),
        "JambaMambaMixer does not continue from its prompt's state",
    ),
    "state-of-another-kind": ("RecurrentGemmaForCausalLM", {}, "recurrent state"),
    # Attention of the model's own making.
    "alibi": ("BloomForCausalLM", dict(n_layer=2, n_head=6), "attention"),
    "learnt-mask": ("DogeForCausalLM", {}, "attention mask"),
    "layout-kept-back": ("StableLmForCausalLM", {}, "StableLmAttention gets no keyword arguments"),
    # A part of the loss that would be left out.
    "auxiliary-loss": (
        "MixtralForCausalLM",
        dict(num_local_experts=2, output_router_logits=True),
        "output_router_logits.*false in the model's config.json",
    ),
    # Logits that are not the head's product with the last hidden states.
    "layers-before-the-head": (
        "ModernBertDecoderForCausalLM",
        dict(layer_types=["full_attention"] * 2, bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0),
        "lm_head",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "setting"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_would_be_scored_wrongly_is_refused_by_its_name_and_setting_without_its_weights(
    name, config, setting
):
    with torch.device("meta"):
        model = small(name, **config)
    with pytest.raises(ValueError, match=f"{name.removesuffix('ForCausalLM')}.*{setting}"):
        supported_calls(model)


@pytest.mark.parametrize("noise", [dict(dropout=0.5, layerdrop=0.0), dict(dropout=0.0, layerdrop=0.9)], ids=str)
def test_layers_are_recomputed_without_the_dropout_and_layerdrop_of_their_config(noise):
    """OPT's layers drop in their own forward, under the flag that transformers asks whether to recompute them."""
    groups, gradients, forwards = [random_group(vocab=VOCAB)], [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = small("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=48, **noise)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy, seen = TrainPolicy(model), []
        for layer in model.model.decoder.layers:
            layer.register_forward_pre_hook(lambda layer, _, seen=seen: seen.append(layer.training))
        policy.score(groups)[0].sum().backward()
        forwards.append(seen)
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert forwards == [[False] * 2, [False] * 4]  # each layer once, and once more where it is recomputed
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.slow
def test_a_window_that_the_model_draws_into_its_mask_alone_is_applied():
    """PhiMoE hands its attention no window; half of these tokens are further back than it reaches."""
    sizes = dict(num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3)
    scores = []
    for window in (4, 1000):
        torch.manual_seed(0)
        policy = TrainPolicy(small("PhimoeForCausalLM", sliding_window=window, **sizes))
        scores.append(policy.score([random_group(2, [2, 12], VOCAB)])[0].detach())
    near = [0, 1, 2, 3]  # predicted at positions 1, 2 and 1, 2: all of their past is in the window
    torch.testing.assert_close(scores[0][near], scores[1][near])
    assert (scores[0] - scores[1])[6:].abs().max() > 0.01


def test_a_run_refuses_its_model_before_weights_are_read_engines_start_or_a_cluster_is_asked(tmp_path, monkeypatch):
    """The folder has a config and nothing else."""
    MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True).save_pretrained(tmp_path)
    cfg = compose_config("grpo_gsm8k", [f"model.name={tmp_path}", "inference_model.engine=transformers"])
    refusal = "MixtralForCausalLM cannot be trained here: output_router_logits"
    with pytest.raises(ValueError, match=refusal):
        build.plan_devices(Settings.read(cfg), tmp_path)
    async_site = pytest.importorskip("grpo_rl.assembly.site")
    monkeypatch.setattr(async_site, "cluster", None)
    monkeypatch.setattr(async_site, "resolve_model", lambda name: tmp_path)
    with pytest.raises(ValueError, match=refusal), async_site.make_site(Settings.read(cfg)):
        pass


CHANGES = {
    "disabled": (True, lambda model: model.gradient_checkpointing_disable()),
    "enabled late": (False, lambda model: model.gradient_checkpointing_enable({"use_reentrant": False})),
    "training mode": (False, lambda model: model.train()),
    "a layer in training mode": (False, lambda model: model.model.decoder.layers[1].train()),
    "recomputing, in evaluation mode": (True, lambda model: model.eval()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "change"), CHANGES.values(), ids=CHANGES)
def test_a_mode_that_is_changed_under_a_policy_is_refused_and_right_again_under_a_new_one(checkpointing, change):
    """Under each change layers would drop activations again, or recompute nothing, and nothing else would show it."""
    model = small("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=48, dropout=0.5)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, groups = TrainPolicy(model), [random_group(vocab=VOCAB)]
    expected = policy.score(groups)
    change(model)
    with pytest.raises(ValueError, match="OPT.* (checkpointing was switched on or off|put into training mode)"):
        policy.score(groups)
    torch.testing.assert_close(TrainPolicy(model).score(groups), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["CohereForCausalLM", "GraniteForCausalLM", "HyperCLOVAXForCausalLM"])
def test_logits_are_scaled_as_the_class_scales_them(name):
    """Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``, HyperCLOVA X multiplies by it."""
    factor = {"CohereForCausalLM": 0.25, "GraniteForCausalLM": 0.125, "HyperCLOVAXForCausalLM": 8.0}[name]
    model = small(name, logit_scale=0.25, logits_scaling=8.0)
    assert TrainPolicy(model).logit_factor == factor


def test_a_factor_on_the_logits_is_found_whatever_its_name():
    """MiniCPM 3 divides its hidden states by ``hidden_size / dim_model_base`` before the head."""
    model = small("MiniCPM3ForCausalLM", q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
                  v_head_dim=10, head_dim=8, dim_model_base=12)  # fmt: skip
    assert TrainPolicy(model).logit_factor == pytest.approx(12 / model.config.hidden_size)


def test_chunked_attention_is_distinguished_from_a_window():
    model = small("Llama4ForCausalLM", intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=6,
                  layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0])  # fmt: skip
    assert [call.mask for call in trial_calls(model).attention] == [Chunks(6), Band(None)]
