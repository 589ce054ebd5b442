"""The text inside a checkpoint of text and vision is trained alone, and scored as the whole model scores text."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.policies.hub import weight_names
from grpo_rl.policies.loading import check_model, load_whole, model_config, skeleton
from grpo_rl.policies.lora import LoRA, adapted_layers, add_adapters
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.run.export import export
from grpo_rl.testing import save_tiny_model
from grpo_rl.weights.push import WeightSync
from tests.helpers import KeepFp64
from tests.policies.test_exactness import VOCAB, groups_of, plain_road

pytestmark = pytest.mark.slow

GROUPS = groups_of([(5, [3, 0, 9]), (1, [4])])
TEXT = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=128, initializer_range=0.3,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HYBRID = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
SIGLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28)
WHOLES = {
    "Qwen3_5ForConditionalGeneration": (
        HYBRID | dict(layer_types=["linear_attention", "full_attention"]),
        dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=48),
    ),
    "Gemma3ForConditionalGeneration": (
        dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=20),
        SIGLIP | dict(patch_size=14),
    ),
    "Mistral3ForConditionalGeneration": (
        dict(model_type="mistral", sliding_window=None),
        SIGLIP | dict(model_type="pixtral", patch_size=14, head_dim=8),
    ),
    "Gemma4ForConditionalGeneration": (
        dict(
            sliding_window=5, layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB, global_head_dim=16, final_logit_softcapping=3.0,
        ),
        SIGLIP | dict(model_type="gemma4_vision", patch_size=14, head_dim=8, num_key_value_heads=2, global_head_dim=8),
    ),
}  # fmt: skip
"""Class of text and vision -> its settings of the text and of the vision part."""


def whole_model(name: str, **settings: object) -> PreTrainedModel:
    """A tiny random model of text and vision, norms and biases among it, in evaluation mode."""
    text, vision = WHOLES[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(text_config=TEXT | text, vision_config=vision, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", WHOLES)
def test_the_text_alone_is_scored_as_the_whole_model_scores_it(name, tmp_path):
    whole = whole_model(name)
    whole.save_pretrained(tmp_path)
    check_model(tmp_path)
    model = load_whole(tmp_path, dtype=torch.float32)
    assert not [n for n, _ in model.named_parameters() if "visi" in n or "visual" in n or "language_model" in n]
    with KeepFp64():  # linear attention rounds to fp32 otherwise
        actual = TrainPolicy(model.double(), 0.7).score(GROUPS)[0]
    torch.testing.assert_close(actual, plain_road(whole.double(), GROUPS, 0.7)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_what_was_trained_is_pushed_and_exported_as_a_model_of_text_alone(name, tmp_path):
    whole_model(name).save_pretrained(tmp_path / "whole")
    save_tiny_model(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    model = load_whole(tmp_path / "whole", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    engine = TransformersEngine(tmp_path / "whole", 64, dtype="float32")
    assert WeightSync(model, engine).push() == 1  # and is proven
    export(model, tokenizer, tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    assert type(again) is type(model)
    for (theirs, mine), (other, held) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert theirs == other and torch.equal(mine, held), theirs
    assert weight_names(tmp_path / "text") == {name for name, _ in model.named_parameters()}
    assert model_config(tmp_path / "text").model_type == model.config.model_type  # which has no second part


def test_adapters_fit_the_text_and_leave_the_vision_alone(tmp_path):
    whole_model("Gemma3ForConditionalGeneration").save_pretrained(tmp_path)
    lora = LoRA(rank=2, targets=["q_proj", "v_proj"])
    check_model(tmp_path, lora)  # the vision tower has layers of these names too
    model = add_adapters(load_whole(tmp_path, dtype=torch.float32), lora)
    expected = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"]
    assert list(adapted_layers(model)) == expected


def test_a_head_among_the_weights_is_the_models_own_whatever_the_config_says(tmp_path):
    """Mistral 3's config says that head and embedding are one by default, and the part's own that they are not."""
    for tied in (True, False):
        whole_model("Mistral3ForConditionalGeneration", tie_word_embeddings=tied).save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        del settings["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(settings))
        model = load_whole(tmp_path, dtype=torch.float32)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model.config.tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.Qwen2_5_VLConfig, "no causal language model of a Qwen2_5_VLTextConfig alone"),
        (transformers.Cohere2VisionConfig, "make different logits"),  # its text multiplies by `logit_scale`
    ],
)
def test_text_that_would_be_scored_otherwise_alone_is_refused(config, message, tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        skeleton(tmp_path)
