"""Every causal language model of transformers is scored like its own padded forward, or refused before its weights.

Each class is built tiny, with settings far from harmless: windows shorter than sequences, heads that are not
hidden_size / num_attention_heads wide, biases, scores far from uniform; once with the dropout that the class has by
default, and once with 0.3 for every setting that looks like noise.
"""

import re
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_rl.data.group import Group
from grpo_rl.policies.mixers import mixers
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.policies.probe import trunk
from grpo_rl.policies.supported import supported_calls
from grpo_rl.testing import random_group
from tests.helpers import KeepFp64, forked_groups
from tests.policies.test_exactness import gradients, plain_road, random_loss

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "model_classes.py"))
NAMES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
VOCAB = 50
WINDOW = 5
SHAPES = [(5, [3, 2, 0, 3]), (1, [4, 7]), (2, [17, 20])]
"""Prompts and responses shorter and longer than the window, an empty response, a one-token prompt."""
NOISE = re.compile(r"drop|jitter")
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=128, initializer_range=0.3, init_std=0.3,
    sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1, attention_bias=True, query_pre_attn_scalar=20,
    logits_scaling=1.6, lm_head_multiplier=0.5,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, is_decoder=True,
    partial_rotary_factor=0.5,
    decoder_layers=2, encoder_layers=2, decoder_attention_heads=6, encoder_attention_heads=6, decoder_ffn_dim=64,
    encoder_ffn_dim=64, ffn_dim=64, ffn_hidden_size=64, word_embed_proj_dim=48, embedding_size=48, n_positions=128,
    n_inner=64, rotary_dim=4, dff=64, num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, shared_expert_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=3, linear_num_heads=4, linear_head_dim=8,
    mamba_n_heads=4, mamba_d_head=24, mamba_d_ssm=96, mamba_d_state=8, mamba_d_conv=3,
    mamba_n_groups=2, mamba_chunk_size=16, mamba_num_heads=4, mamba_head_dim=24, n_mamba_heads=2, mamba_dt_rank=4,
    ssm_state_size=8, state_size=8, conv_kernel=3, n_groups=2, chunk_size=16, time_step_rank=4, conv_L_cache=3,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
)  # fmt: skip
"""Set where a class's config has such a field."""
MLA = dict(head_dim=8, num_key_value_heads=6)
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
GEMMA3N = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
               vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=4,
               activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0])  # fmt: skip
GEMMA4 = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
              vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, global_head_dim=16, num_experts=None,
              moe_intermediate_size=None)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": MLA,
    "DeepseekV2ForCausalLM": MLA,
    "DeepseekV3ForCausalLM": MLA,
    "Glm4MoeLiteForCausalLM": MLA,
    "KimiLinearForCausalLM": MLA,
    "MiniCPM3ForCausalLM": MLA,
    "LongcatFlashForCausalLM": MLA | dict(num_layers=2, expert_ffn_hidden_size=24, zero_expert_num=2, moe_topk=2),
    "YoutuForCausalLM": MLA,
    "HeliumForCausalLM": dict(head_dim=8),
    "Dots1ForCausalLM": dict(n_shared_experts=1),
    "ZayaForCausalLM": dict(num_experts_per_tok=1),
    "CohereCompassForCausalLM": dict(
        rope_parameters={kind: ROPE | {"mrope_section": [2, 2, 2]} for kind in ("sliding_attention", "full_attention")}
    ),
    "DbrxForCausalLM": dict(
        d_model=48,
        attn_config=dict(kv_n_heads=2, rope_theta=1000.0, clip_qkv=0.5, attn_pdrop=0.3),
        ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, moe_jitter_eps=0.3),
    ),
    "BambaForCausalLM": dict(attn_layer_indices=[1]),
    "JambaForCausalLM": dict(attn_layer_period=2, attn_layer_offset=1),
    "Llama4ForCausalLM": dict(
        attention_chunk_size=WINDOW,
        floor_scale=4,
        attn_scale=0.5,
        no_rope_layers=[0, 1, 0, 1],
        intermediate_size_mlp=64,
    ),
    "MiMoV2FlashForCausalLM": dict(num_key_value_heads=1),
    "MiniMaxForCausalLM": dict(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2),
    "Zamba2ForCausalLM": dict(
        layer_types=["linear_attention", "hybrid"],
        layers_block_type=["linear_attention", "hybrid"],
        num_hidden_layers=2,
    ),
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 1]], window_size=WINDOW),
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "GraniteMoeHybridForCausalLM": dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2),
    "Lfm2ForCausalLM": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),
    "Mamba2ForCausalLM": dict(num_heads=6, head_dim=16),
    "NemotronHForCausalLM": dict(layer_types=["full_attention", "mlp", "moe", "linear_attention"], num_hidden_layers=4),
    "Qwen4ExpForCausalLM": dict(
        layer_types=["full_attention", "linear_attention"],
        num_hidden_layers=2,
        ple_embed_dim=16,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
    "ReformerModelWithLMHead": dict(axial_pos_embds=False),
}
"""Settings that some classes need otherwise."""
AS_THEY_ARE = {"XLNetLMHeadModel"}
"""Classes whose config can't be shrunk like this: their default, which is refused and so never needs to be small."""


def tiny_config(model_class: type[PreTrainedModel], noise: float | None) -> PreTrainedConfig:
    """The class's default config with small sizes, and ``noise`` for every rate of dropout, layerdrop or jitter."""
    if model_class.__name__ in AS_THEY_ARE:
        return model_class.config_class()
    return tiny(model_class.config_class, noise, OWN.get(model_class.__name__, {}))


def tiny(config_class: type[PreTrainedConfig], noise: float | None, own: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    if (text := default.get_text_config()) is not default:
        name = next(name for name in default.sub_configs if getattr(default, name) is text)
        return config_class(**{name: tiny(type(text), noise, own).to_dict()})
    switches = {"use_sliding_window": True} if hasattr(default, "use_sliding_window") else {}
    default = config_class(**switches)
    fields = {name: value for name, value in SIZES.items() if has_field(default, name)}
    if has_field(default, "layer_types") and (kinds := set(default.layer_types or ())):
        kinds |= {"sliding_attention"} if "sliding_window" in fields and "full_attention" in kinds else set()
        fields |= dict(layer_types=sorted(kinds, reverse=True) * 2, num_hidden_layers=2 * len(kinds))
    if noise is not None:
        numbers = {name for name, value in default.to_dict().items() if not isinstance(value, str | bool | list | dict)}
        fields |= {name: noise for name in numbers if NOISE.search(name)}
    return config_class(**fields | own)


def has_field(config: PreTrainedConfig, name: str) -> bool:
    """True if the config has such a field that can be set, under this name or one of its own."""
    own = getattr(type(config), config.attribute_map.get(name, name), None)
    computed = isinstance(own, property) and own.fset is None
    return (name in config.to_dict() or name in config.attribute_map) and not computed


CANNOT_RUN = {
    ("Gemma3nForConditionalGeneration", None): "timm",  # which is not installed
    ("Gemma4AssistantForCausalLM", None): "no attribute 'vocab_size'",  # drafts for another model
    ("Gemma4UnifiedAssistantForCausalLM", None): "no attribute 'vocab_size'",
    ("DiffLlamaForCausalLM", 0.3): "does not support `attention_dropout > 0`",
}
"""Models that transformers itself can't build here, with its words for it, without noise or with it alone."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for a class: ``equal`` or ``refused``; ``wrong`` or ``crashed``; ``unbuilt``, which says nothing."""

    kind: str
    detail: str


def groups() -> list[Group]:
    ragged = [random_group(p, lengths, VOCAB, group_id=i, seed=3 + i) for i, (p, lengths) in enumerate(SHAPES)]
    return ragged + [replace(group, group_id=group.group_id + len(ragged)) for group in forked_groups(VOCAB)]


def unrounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64, whose own casts to fp32 do nothing, neither when a layer is recomputed."""

    def wrapped(forward: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            with KeepFp64():
                return forward(*args, **kwargs)

        return call

    for module in model.double().modules():
        if module is trunk(model) or isinstance(module, GradientCheckpointingLayer):
            module.forward = wrapped(module.forward)
    return model


def verdict(name: str, noise: float | None) -> Verdict:
    """The verdict on the class of this name."""
    model_class = getattr(transformers, name)
    try:
        config = tiny_config(model_class, noise)
        with torch.device("meta"):
            skeleton = model_class(config)
    except Exception as error:
        return Verdict("unbuilt", f"{type(error).__name__}: {error}")
    refusal = ""
    try:
        supported_calls(skeleton)
    except ValueError as error:
        refusal = str(error)
        if name not in refusal:
            return Verdict("crashed", refusal)
    except Exception as error:
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    if refusal and "trial forward" not in refusal:
        return Verdict("refused", refusal)
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > 5e6:
        return Verdict("unbuilt", f"{size} parameters are not tiny")
    model = random_model(model_class, config)
    try:
        expected = plain_road(model, groups(), 0.7)
    except Exception as error:  # a config that can't be computed says nothing of the gate
        return Verdict("unbuilt", f"{type(error).__name__}: {error}")
    if refusal:
        return Verdict("refused", refusal)
    try:
        return compared(model, expected)
    except Exception as error:
        return Verdict("crashed", f"{type(error).__name__}: {error}")


def random_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights, biases and norms among them, in evaluation mode and fp64."""
    torch.manual_seed(0)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "eager"  # the others know no fp64
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return unrounded(model).eval()


def compared(model: PreTrainedModel, expected: tuple[Tensor, Tensor]) -> Verdict:
    """True if policy and reference equal the plain forward in value and gradient, whatever was drawn."""
    expected_gradients = gradients(model, random_loss(*expected, groups()))
    model.train()  # as a user may hand it over
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TrainPolicy(model, 0.7)
    got = policy.score(groups())
    actual_gradients = gradients(model, random_loss(*got, groups()))
    torch.manual_seed(1)
    again = policy.score(groups())
    reference = ReferencePolicy(model, 0.7).score(groups())
    if not all(map(torch.equal, got, again)):
        return Verdict("wrong", f"two scores differ by {(got[0] - again[0]).abs().max():.2g} nats")
    # Without gradients, PyTorch may reduce a mixer's products in another order.
    if (apart := (got[0] - reference[0]).abs().max().item()) > (1e-9 if any(mixers(model)) else 0):
        return Verdict("wrong", f"policy and reference differ by {apart:.2g} nats")
    error = max(float((a - b).detach().abs().max()) for a, b in zip(got, expected, strict=True))
    slope = max(float((actual_gradients[n] - expected_gradients[n]).abs().max()) for n in expected_gradients)
    slope /= max(1.0, *(float(g.abs().max()) for g in expected_gradients.values()))
    detail = f"scores differ by {error:.1g} nats, gradients by {slope:.1g} of the largest"
    return Verdict("equal" if error < 1e-9 and slope < 1e-9 else "wrong", detail)


def table(verdicts: dict[tuple[str, float | None], Verdict]) -> str:
    """All verdicts, and how many there are of each kind."""
    lines = [
        f"{v.kind:8} {name:40} noise={noise}: {v.detail}" for (name, noise), v in sorted(verdicts.items(), key=str)
    ]
    counts = Counter(v.kind for v in verdicts.values())
    kinds = ("equal", "refused", "wrong", "crashed", "unbuilt")
    return "\n".join([*lines, ", ".join(f"{kind}: {counts[kind]}" for kind in kinds)])


def check(names: list[str]) -> dict[tuple[str, float | None], Verdict]:
    """The verdicts on these classes, without and with noise, printed; none is wrong, crashed, or unbuilt unawares."""
    verdicts = {(name, noise): verdict(name, noise) for name in names for noise in (None, 0.3)}
    print(table(verdicts))
    bad = [f"{key}: {v.kind}, {v.detail}" for key, v in verdicts.items() if v.kind in ("wrong", "crashed")]
    for (name, noise), v in verdicts.items():
        if v.kind == "unbuilt":
            known = CANNOT_RUN.get((name, noise)) or CANNOT_RUN.get((name, None))
            bad += [f"{name}, noise {noise}: {v.detail}"] * (known is None or known not in v.detail)
    assert not bad, "\n".join(bad)
    return verdicts


def has_mixers(name: str) -> bool:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        return any(mixers(model_class(tiny_config(model_class, None))))


def kind_of(name: str) -> str:
    """The kind of an equal class's layers, as the page on models has it."""
    model_class = getattr(transformers, name)
    if has_mixers(name):
        return "with a state from token to token (hybrids and state-space models)"
    return "attention, mixture of experts" if model_class._can_set_experts_implementation() else "attention"


def model_page(verdicts: dict[tuple[str, float | None], Verdict] | None = None) -> str:
    """The page on all models, from these verdicts or new ones."""
    return TOOL["page"](verdicts or check(NAMES), kind_of, transformers.__version__)


def test_the_page_on_model_classes_names_each_class_once_and_counts_them():
    text = TOOL["PAGE"].read_text()
    version, on_page = TOOL["of_page"](text)
    counts = Counter(on_page.values())
    assert f"**{counts['equal']} classes are equal, {counts['refused']} are refused, none is wrong**" in text
    assert f"{counts['unbuilt']} can't be built here" in text
    assert len(re.findall(r"`\w+`(?=[:, ])", text.partition("## Equal")[2])) == len(on_page)
    if version != transformers.__version__:
        pytest.skip(
            f"the page is on transformers {version}; tools/model_classes.py writes one on the installed version"
        )
    assert sorted(on_page) == NAMES, "run python tools/model_classes.py"


@pytest.mark.nightly
def test_every_model_of_transformers_is_scored_like_its_own_forward_or_refused():
    verdicts = check(NAMES)
    assert len(NAMES) >= 173
    assert Counter(v.kind for v in verdicts.values())["equal"] >= 185  # a gate that refused all would be of no use
    if TOOL["of_page"](TOOL["PAGE"].read_text())[0] == transformers.__version__:
        assert model_page(verdicts) == TOOL["PAGE"].read_text(), "run python tools/model_classes.py"
