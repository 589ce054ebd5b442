"""The names and parts under which weights are sent are those of the files that transformers writes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.evaluation.models import export_checkpoint
from grpo_rl.policies.loading import CheckpointNames, load_whole
from grpo_rl.policies.lora import base_weights
from grpo_rl.testing import ScriptedEngine, save_tiny_model
from grpo_rl.training import checkpoint
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from tests.policies.test_routing import config_of

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def tiny(name):
    config = config_of(name, num_hidden_layers=2, n_group=1, initializer_range=0.02)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Qwen3Moe", "Olmoe", "Mixtral", "Phimoe", "DeepseekV3", "GptOss", "GraniteMoe", "Qwen3"]
)
def test_parts_of_parameters_are_the_tensors_of_the_saved_file(name, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for source in (model, type(model).from_pretrained(tmp_path)):  # one that was read from a file, and one that was not
        names = CheckpointNames(source)
        sent = dict(part for named in base_weights(source) for part in names.views(*named))
        assert sent.keys() == saved.keys()
        for key, part in sent.items():
            assert torch.equal(part, saved[key])


@pytest.mark.slow
def test_a_routers_bias_is_sent_and_exported_in_its_own_dtype(tmp_path):
    model = tiny("DeepseekV3").bfloat16()
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias = torch.nn.Buffer(torch.tensor([3.001, 3.002, 3, 3]))
    assert not torch.equal(bias.bfloat16().float(), bias)
    came = {}

    class Notes(ScriptedEngine):
        def update_weights(self, weights, version):
            came.update(weights)
            super().update_weights(came.items(), version)

    WeightSync(model, Notes(lambda prompt, g: [])).push()
    assert torch.equal(came[BIAS], bias) and came["lm_head.weight"].dtype == torch.bfloat16
    export_model(dict(base_weights(model)), model.config, tmp_path, torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[BIAS], bias)


@pytest.mark.slow
def test_an_exported_checkpoint_has_the_routers_bias_that_no_optimizer_holds(tmp_path):
    source, folder = save_tiny_model(tmp_path / "source"), tmp_path / "exported"  # of which the tokenizer stays
    bias = torch.tensor([3.001, 3.002, 3, 3])
    made = tiny("DeepseekV3")
    made.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    made.bfloat16().save_pretrained(source, state_dict=made.state_dict() | {BIAS: bias})
    model = load_whole(source, dtype=torch.bfloat16)
    model.lm_head.weight.data += 1  # as if it had been trained
    optimizer = PolicyOptimizer(model, "sgd")
    config = {"model": {"name": str(source), "chat_template": None}, "train_model": {"dtype": "bfloat16"}}
    state = {"optimizer": optimizer.state_dict(), "config": json.dumps(config)}
    export_checkpoint(checkpoint.save(tmp_path / "checkpoints", 1, state), folder)
    assert torch.equal(load_file(folder / "model.safetensors")[BIAS], bias)
    exported = load_whole(folder, dtype=torch.bfloat16)
    assert exported.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


@pytest.mark.slow
def test_transformers_engine_takes_a_mixture_by_the_checkpoints_names_and_proves_each_expert(tmp_path):
    tiny("Qwen3Moe").save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, max_model_len=32, dtype="float32")
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(tmp_path))
    sync = WeightSync(model, engine)
    sync.push()
    (samples,) = engine.generate([[3, 4, 5]], 1, Sampling(max_new_tokens=6))
    logits = model(torch.tensor([[3, 4, 5, *samples.response_ids.tolist()]])).logits[0, 2:-1]
    log_probs = logits.log_softmax(-1).gather(-1, samples.response_ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, samples.log_probs)
    engine._model.model.layers[1].mlp.experts.gate_up_proj.data[2, -1, -1] += 1
    with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors differ .*layers\.1\.mlp\.experts\.2\.up_proj"):
        sync.verify()
