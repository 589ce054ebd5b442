"""The plan: bytes and seconds worked out by hand for a 70B Llama, saved tensors of real models, and what it advises."""

import functools
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_rl.cli import main
from grpo_rl.planner.hardware import GIB, Cluster
from grpo_rl.planner.memory import (
    Experts,
    NotPlannedError,
    Shape,
    Training,
    engine_memory,
    kept_state,
    training_moments,
)
from grpo_rl.planner.plan import best_overlapped, make_plan, plan_layout, remedies, sample_s, with_devices
from grpo_rl.planner.scenario import Layout, Scenario
from grpo_rl.policies.attention import compile_pointwise, forward_hidden, use_shared_prefix
from grpo_rl.policies.compiler import has_compiler
from grpo_rl.policies.loading import skeleton
from grpo_rl.policies.lora import LoRA
from grpo_rl.policies.packing import pack
from grpo_rl.settings.compose import FOLDER, compose_config
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import random_group

pytestmark = pytest.mark.slow

LLAMA_70B = Path(__file__).parent / "data" / "llama-70b"
# Queries and their output 8192 x 8192, keys and values 8192 x 1024, three matrices 8192 x 28672, two norms.
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
TABLE = 128256 * 8192
PARAMETERS = 80 * LAYER + 2 * TABLE + 8192


@pytest.fixture(scope="module")
def model():
    return skeleton(LLAMA_70B).bfloat16()


@pytest.fixture(scope="module")
def shape(model):
    return Shape.of(model)


BF16 = ["train_model.dtype=bfloat16"]  # whatever this machine is fast at


def scenario_of(model, cluster, *overrides, mode="async", **lengths):
    words = [f"model.name={LLAMA_70B}", f"mode={mode}", *BF16, *overrides]
    return Scenario(Settings.read(compose_config("grpo_gsm8k", words)), model, Cluster.parse(cluster), **lengths)


LARGE = (
    "train_model.gradient_checkpointing=true", "env.num_envs=64", "env.repeats=16", "train.optim_batch_size=1024",
    "inference_model.max_model_len=1280", "sampling.max_new_tokens=1024", "train.micro_batch_tokens=16384",
)  # fmt: skip


def test_sixteen_bytes_a_parameter_are_kept_between_steps_where_masters_are_sharded(shape):
    # The card's number.
    assert PARAMETERS == 70_553_706_496
    assert (shape.parameters, shape.layer, shape.layers, shape.table) == (PARAMETERS, LAYER, 80, TABLE)
    assert shape.root == 2 * TABLE + 8192 and not shape.tied
    # fp32 masters 4, gradients 4, two moments 8; 70.55e9 * 16 / 64 = 17.64e9.
    assert sum(kept_state(shape, Training(), 64).values()) == PARAMETERS * 16 / 64
    # On one device the bf16 weights are there beside their masters.
    assert sum(kept_state(shape, Training(), 1).values()) == PARAMETERS * 18
    # Without masters all is bf16; SGD has no moments.
    assert sum(kept_state(shape, Training(masters=False), 2).values()) == PARAMETERS * 8 / 2
    assert sum(kept_state(shape, Training(moments=0), 1).values()) == PARAMETERS * 10


def test_adapters_alone_have_gradients_masters_and_moments(model):
    shape = Shape.of(model, LoRA(rank=16, targets=["q_proj", "v_proj"]))
    # A is 16 x 8192; B is 8192 x 16 for queries and 1024 x 16 for values.
    assert shape.adapters == 80 * 16 * (8192 + 8192 + 8192 + 1024)
    state = kept_state(shape, Training(frozen_bytes=2.0), 8)
    assert sum(state.values()) == (2 * PARAMETERS + 16 * shape.adapters) / 8


def split(train, inference, size):
    sizes = [f"inference_model.num_devices={inference}", f"inference_model.tensor_parallel_size={size}"]
    return [*LARGE, f"train_model.num_devices={train}", *sizes]


def test_a_layer_keeps_what_its_backward_pass_reads(shape):
    # Two norms: 4 bytes in, 2 normalised, 2 out. Attention: queries and output of 8192, keys and values of 1024, in
    # bf16, and 64 sums in fp32. The MLP: four of 28672 in bf16.
    assert shape.kept_per_token(False, "cpu") == 2 * 8192 * 8 + 2 * (2 * 8192 + 2 * 1024) + 4 * 64 + 2 * 4 * 28672
    # Fused: a norm's input and output, three of the MLP.
    fused = 2 * 8192 * 4 + 2 * (2 * 8192 + 2 * 1024) + 4 * 64 + 3 * 2 * 28672
    assert shape.kept_per_token(True, "cpu") == fused
    assert shape.kept_per_token(True, "cuda") == fused + 2 * 8192


def saved_bytes(model, groups) -> int:
    """Bytes of all storages that a forward pass keeps for the backward pass, weights left aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        forward_hidden(use_shared_prefix(model), pack(groups))
    return sum(storage.nbytes() for storage in held.values())


SMALL = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "head_dim": 8}

SMALL_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*itertools.product(["llama", "qwen3", "qwen3_moe"], [torch.bfloat16, torch.float32]), ("fused", torch.bfloat16)],
)
def test_a_layer_of_a_real_model_keeps_as_many_bytes_as_planned(kind, dtype):
    config, of = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (functools.partial(Qwen3MoeConfig, **SMALL_EXPERTS), Qwen3MoeForCausalLM),
    }.get(kind, (LlamaConfig, LlamaForCausalLM))
    groups = [random_group(prompt=30, lengths=[20, 50], vocab=50), random_group(prompt=9, lengths=[40], group_id=1)]
    tokens = sum(group.num_tokens for group in groups)
    models = [of(config(**SMALL, num_key_value_heads=2, num_hidden_layers=n)).to(dtype).train() for n in (2, 5)]
    if kind == "fused":
        if not has_compiler("cpu"):
            pytest.skip("no compiler")
        for model in models:
            compile_pointwise(model)
    measured = (saved_bytes(models[1], groups) - saved_bytes(models[0], groups)) / 3 / tokens
    planned = Shape.of(models[0]).kept_per_token(kind == "fused", "cpu")
    if kind == "fused":
        assert measured == pytest.approx(planned, rel=0.05)
    else:
        # What is left are the norms' reciprocal roots: two of each token and, of normalised heads, one for each of 8.
        assert planned + 4 * 2 <= measured <= planned + 4 * (2 + 8)


def test_an_engines_cache_is_what_weights_and_work_leave_of_its_budget(shape):
    # Keys and values, 80 layers, heads of 128 in bf16: 2 * 80 * 128 * 2 bytes for each head that a device has.
    by_size = {size: engine_memory(shape, size, 80 * GIB, 0.9).kv_per_token for size in (1, 4, 8, 16)}
    assert by_size == {1: 8 * 40960, 4: 2 * 40960, 8: 40960, 16: 40960}  # of more ranks than heads each has one
    engine = engine_memory(shape, 8, 80 * GIB, 0.9)
    assert engine.weights == 2 * PARAMETERS / 8
    assert engine.cache == 0.9 * 80 * GIB - engine.weights - engine.work
    assert engine.tokens * engine.kv_per_token <= engine.cache < (engine.tokens + 16) * engine.kv_per_token
    assert engine_memory(shape, 1, 80 * GIB, 0.9).tokens == 0


def activations(shape, ranks, tokens):
    """Bytes of activations in a layer's backward pass, with checkpointing."""
    moments = training_moments(shape, Training(checkpointing=True), ranks, tokens)
    return next(m.parts["activations"] for m in moments if m.moment == "a layer's backward pass")


def test_checkpointing_keeps_one_vector_of_each_layer_and_one_layer(shape):
    # 80 inputs of 8192 numbers in bf16, then one layer, and gradients: two of the stream, three inside its MLP.
    layer = shape.kept_per_token(False, "cuda") + 2 * 2 * 8192 + 3 * 2 * 28672
    assert activations(shape, 64, 1000) == 1000 * (80 * 2 * 8192 + layer)


def test_a_reference_apart_holds_bf16_weights_and_no_gradients(model):
    scenario = scenario_of(model, "16xH100", "policy.kl_coef=0.1", "ref_model.num_devices=1")
    assert scenario.reference_bytes(8) == 2 * PARAMETERS / 8
    assert scenario.with_overrides({"ref_model.refresh": "average"}).reference_bytes(8) == 6 * PARAMETERS / 8
    served = scenario.with_overrides({"ref_model.name": "http://localhost:8000/v1"})
    assert not served.has_reference and served.reference_bytes(8) == 0
    parts = next(role.parts for role in make_plan(with_devices(scenario)[0]).roles if role.name == "ref")
    assert parts["weights"] == 2 * PARAMETERS
    assert not {"gradients", "optimizer", "fp32 masters"} & parts.keys()


def test_the_largest_micro_batch_fits_and_one_step_more_does_not(model):
    plan = make_plan(with_devices(scenario_of(model, "64xH100", *LARGE))[0])
    ranks, usable = plan.layout.train, plan.roles[0].usable
    assert plan.fits
    assert plan.scenario.trainer(ranks, plan.largest_tokens).total <= usable
    assert plan.scenario.trainer(ranks, plan.largest_tokens + 256).total > usable


def test_the_split_with_the_shortest_step_is_found(model):
    asked = scenario_of(model, "64xH100", *LARGE, "inference_model.gpu_memory_utilization=0.9")
    best = best_overlapped(asked)
    assert best and best.layout.train + best.layout.inference == 64 and best.fits
    for train in (best.layout.train - best.layout.engine_size, best.layout.train + best.layout.engine_size):
        settings = best.overrides | {"train_model.num_devices": train, "inference_model.num_devices": 64 - train}
        other = make_plan(asked.with_overrides(settings))
        assert not other.fits or other.step_s >= best.step_s / 1.01
    sample, rest = best.seconds["sample"], sum(s for phase, s in best.seconds.items() if phase != "sample")
    assert best.step_s == max(sample, rest)


ONE = "1xMine,memory_gib=1700,tflops=900,memory_gb_s=3000,link_gb_s=1,network_gb_s=1"


def test_an_engine_that_sleeps_has_what_the_trainer_leaves_between_steps_and_the_trainer_all(model):
    overrides = [*LARGE, "inference_model.gpu_memory_utilization=0.17", "policy.kl_coef=0.1"]
    awake = make_plan(scenario_of(model, ONE, *overrides, mode="sync"))
    asleep = make_plan(scenario_of(model, ONE, *overrides, "inference_model.sleep=true", mode="sync"))
    assert awake.roles[0].needed - asleep.roles[0].needed == pytest.approx(0.17 * 1700 * GIB)
    assert awake.missing.keys() == {"train"} and asleep.fits
    # 18 bytes a parameter, and the reference's 2, stay while it samples: 0.95 * 1700 GiB less 1314 GiB are 301.
    more = make_plan(asleep.scenario.with_overrides({"inference_model.gpu_memory_utilization": 0.5}))
    assert more.missing == {"inference": pytest.approx((0.5 - 0.95) * 1700 + 20 * PARAMETERS / GIB)}
    assert "inference_model.gpu_memory_utilization=0.15" in remedies(more)["inference"]
    assert "inference_model.sleep=true" in remedies(awake)["train"]


def test_with_one_trainer_alone_sampling_and_training_take_turns(model):
    engines = ["train_model.num_devices=1", "inference_model.num_devices=4", "inference_model.tensor_parallel_size=2"]
    assert "here are 1 and 2; use mode=async" in make_plan(scenario_of(model, "8xH100", *engines, mode="sync")).refused
    plan = make_plan(scenario_of(model, "8xH100", *engines[:2], mode="sync"))
    assert not plan.refused and plan.step_s == sum(plan.seconds.values())


def test_a_reference_on_a_device_of_its_own_is_planned_next_to_one_trainer(model):
    device = "16xMine,memory_gib=4000,tflops=900,memory_gb_s=3000,link_gb_s=400,network_gb_s=50"
    own = scenario_of(model, device, "policy.kl_coef=0.1", "ref_model.num_devices=1")
    plan = make_plan(with_devices(own)[0])
    assert plan.layout.train == plan.layout.ref == 1
    # Without, several train, and each scores the reference.
    plan = make_plan(with_devices(scenario_of(model, device, "policy.kl_coef=0.1"))[0])
    assert plan.layout.train > 1 and plan.layout.ref == 0 and plan.roles[0].parts["reference"]


def test_a_push_takes_as_long_as_the_way_between_trainers_and_engines(model):
    asked = scenario_of(model, "16xH100")

    # 2 bytes a parameter, at 450 GB/s in a node of 8 and at 50 GB/s beyond it.
    def push(ranks, inference):
        return plan_layout(asked, Layout(ranks, 0, inference or ranks, 1, colocated=not inference)).seconds["sync"]

    assert push(4, 4) == push(8, 0) == pytest.approx(max(2 * PARAMETERS / 450e9, push(1, 0)))
    assert push(8, 8) == push(4, 5) == push(9, 0) == pytest.approx(2 * PARAMETERS / 50e9)


def test_one_device_that_trains_and_samples_at_the_same_time_is_planned_with_both(model):
    def plan_of(share, mode="async"):
        overrides = [*LARGE, f"inference_model.gpu_memory_utilization={share}"]
        return make_plan(scenario_of(model, ONE, *overrides, mode=mode))

    plan = plan_of(0.1)
    assert plan.fits and plan.shared and plan.layout.colocated and plan.layout.total == 1 and not plan.refused
    # The engine's share and what weights are sent through, beside the trainer's own; reading them takes six passes.
    assert plan.held["vLLM"] == pytest.approx(0.1 * 1700 * GIB) and plan.held["weights on their way"] == 1 << 28
    assert plan.seconds["sync"] == pytest.approx(6 * 2 * PARAMETERS / 3000e9)
    assert plan.step_s == sum(plan.seconds.values())
    turns = plan_of(0.1, mode="sync")
    assert not turns.shared and turns.seconds["sync"] == pytest.approx(4 * 2 * PARAMETERS / 3000e9)
    small = plan_of(0.05)
    assert small.missing.keys() == {"inference"}
    assert "inference_model.gpu_memory_utilization=0.1" in remedies(small)["inference"]
    large = plan_of(0.5)
    assert large.missing.keys() == {"train"}
    advice = remedies(large)["train"]
    assert any(text.startswith("inference_model.gpu_memory_utilization=") for text in advice), advice
    assert not any("sleep" in text for text in advice)


def test_seconds_of_training_are_operations_over_rates(model):
    device = "64xMine,memory_gib=80,tflops=1000,memory_gb_s=1e9,link_gb_s=1e9,network_gb_s=1e9"
    overrides = [*split(32, 32, 8), "train_model.gradient_checkpointing=false"]
    plan = make_plan(scenario_of(model, device, *overrides, prompt_tokens=256, response_tokens=1024))
    # Two groups of 256 + 16 * 1024 tokens on each of 32 ranks, 6 operations a parameter of the layers, the last norm
    # and, of responses, the head; attention: 12 a query's number and key that it sees, in 80 layers.
    prompt, responses = 256, 16 * 1024
    trunk = PARAMETERS - 2 * TABLE
    keys = 80 * (256 * 257 // 2 + 16 * sum(range(257, 1281)))
    operations = 2 * (6 * trunk * (prompt + responses) + 6 * TABLE * responses + 12 * 8192 * keys)
    assert plan.seconds["train"] == pytest.approx(operations / (0.4 * 1e15), rel=1e-3)


def test_a_slow_network_is_what_training_waits_for(model):
    plan = make_plan(scenario_of(model, "64xH100,network_gb_s=1", *split(32, 32, 8)))
    # Two micro-batches: gathered in bf16 twice, reduced in fp32, 31 parts of 32 from elsewhere.
    state = 2 * sum(kept_state(plan.scenario.shape, Training(), 32).values()) / 3350e9
    assert plan.seconds["train"] == pytest.approx(2 * 8 * PARAMETERS * 31 / 32 / 1e9 + state)


def test_what_lacks_memory_is_reported_with_settings_that_were_tried(model):
    overrides = ["train_model.gradient_checkpointing=false", "inference_model.gpu_memory_utilization=0.9"]
    plan = make_plan(scenario_of(model, "64xH100", *split(40, 24, 8), *overrides))
    assert set(plan.missing) == {"train"}
    assert plan.missing["train"] == pytest.approx(
        (plan.scenario.trainer(40, plan.scenario.micro_batch_tokens(40)).total - 0.95 * 79.6 * GIB) / GIB
    )
    settings = remedies(plan)["train"]
    assert "train_model.gradient_checkpointing=true" in settings
    for written in settings:
        changes = dict(setting.split("=", 1) for setting in written.split())
        changed = {key: json.loads(value) for key, value in changes.items()}
        assert "train" not in make_plan(plan.scenario.with_overrides(changed)).missing, written


def test_an_engine_that_is_too_small_is_told_a_larger_one(model):
    overrides = [*split(40, 24, 1), "inference_model.gpu_memory_utilization=0.9"]
    plan = make_plan(scenario_of(model, "64xH100", *overrides))
    # 141.1 GB of weights, the largest batch and a cache for 1280 tokens in 0.9 * 79.6 GiB.
    engine = plan.engine
    lacks = engine.weights + engine.work + 1280 * 8 * 40960 - 0.9 * 79.6 * GIB
    assert plan.missing == {"inference": pytest.approx(lacks / GIB)}
    assert "inference_model.tensor_parallel_size=2" in remedies(plan)["inference"]


def test_a_cluster_is_a_count_a_device_and_numbers_that_are_finite_and_above_0():
    one, eight = Cluster.parse("h200"), Cluster.parse("8xA100-80GB,network_gb_s=12.5,node=4")
    assert (one.count, one.device.name, one.device.memory_gb_s, one.device.node) == (1, "H200", 4800, 8)
    assert (eight.count, eight.device.name, eight.device.network_gb_s, eight.device.node) == (8, "A100-80GB", 12.5, 4)
    own = Cluster.parse("2xMine,memory_gib=10,tflops=1,memory_gb_s=2,link_gb_s=3,network_gb_s=4")
    assert (own.count, own.device.name, own.device.memory_gib, own.device.node) == (2, "Mine", 10, 8)
    for number in ("tflops=nan", "node=0", "network_gb_s=inf"):
        with pytest.raises(ValueError, match=f"{number.partition('=')[0]} has to be finite and above 0"):
            Cluster.parse(f"8xH100,{number}")


@pytest.mark.parametrize("cluster", ["here", "h100"])
def test_one_device_is_planned_in_turns_where_no_mode_is_given(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_rl.planner.commands.has_no_gpu", lambda: True)
    words = ["plan", f"model.name={LLAMA_70B}", "inference_model.engine=transformers", f"cluster={cluster}"]
    assert main(words) == 1  # it does not fit


def test_latent_attention_and_experts_of_an_unknown_number_are_not_planned():
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    latent = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    with torch.device("meta"):
        deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, num_key_value_heads=2, n_routed_experts=8))
    with pytest.raises(NotPlannedError, match="kv_lora_rank"):
        Shape.of(deepseek)
    whole = Settings.read(compose_config("grpo_gsm8k", ["mode=sync", "policy.kl_coef=0.1", "loss.kl=reverse"]))
    with pytest.raises(NotPlannedError, match="loss.kl=reverse holds whole distributions"):
        Scenario(whole, deepseek, Cluster.parse("1xH100")).shape  # noqa: B018
    model = mixture(num_hidden_layers=2)
    vars(model.config)["num_experts_per_tok"] = None
    with pytest.raises(NotPlannedError, match="how many experts a token visits"):
        Experts.of(model)


# Qwen3-30B-A3B: 8 of 128 experts, each three matrices 2048 x 768; 32 heads of 128, 4 of keys and values; 48 layers.
A3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
EXPERT = 3 * 2048 * 768
BESIDE_EXPERTS = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048  # attention and norms
A3B_TABLE = 151936 * 2048
MIXTURE = 48 * (BESIDE_EXPERTS + 128 * 2048 + 128 * EXPERT) + 2 * A3B_TABLE + 2048


def mixture(**changes):
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(A3B | changes))).bfloat16()


@pytest.fixture(scope="module")
def a3b():
    return mixture()


def test_memory_is_that_of_all_experts_and_work_that_of_those_a_token_visits(a3b):
    shape = Shape.of(a3b)
    assert shape.parameters == MIXTURE == 30_532_122_624  # the card: 30.5B, 3.3B activated
    assert (shape.layer, shape.root) == (BESIDE_EXPERTS + 128 * 2048 + 128 * EXPERT, 2 * A3B_TABLE + 2048)
    assert shape.largest == 128 * 2 * 2048 * 768
    assert (shape.experts.number, shape.experts.chosen, shape.experts.intermediate) == (128, 8, 768)
    assert shape.experts.parameters == 48 * 128 * EXPERT
    assert shape.intermediate == 0  # no shared experts
    assert shape.sizes.trunk == 48 * (BESIDE_EXPERTS + 128 * 2048 + 8 * EXPERT) + 2048
    assert round((shape.sizes.trunk + 2 * A3B_TABLE) / 1e9, 1) == 3.4  # with the embedding, which the card leaves out
    kept = kept_state(shape, Training(), 16)
    assert kept["fp32 masters"] == kept["gradients"] == kept["optimizer"] / 2 == 4 * MIXTURE / 16
    assert shape.sizes.pushed_bytes == 2 * MIXTURE
    engine = engine_memory(shape, 4, 80 * GIB, 0.9)
    assert engine.weights == 2 * MIXTURE / 4


@pytest.mark.nightly
def test_a_micro_batch_keeps_the_vectors_of_every_expert_that_a_token_visits(a3b):
    """Against a model that visits one expert less: all that an expert's token keeps, and its part of the peak."""
    shapes = [Shape.of(model) for model in (a3b, mixture(num_experts_per_tok=7))]
    kept = [shape.kept_per_token(True, "cuda") for shape in shapes]
    # In bf16 input and output 2048, factors, activation and product 4 x 768; 4 places and 2 weights.
    expert = 2 * (2 * 2048 + 4 * 768) + 4 * 8 + 2 * 4
    assert kept[0] - kept[1] == expert
    peaks = [activations(shape, 16, 1000) for shape in shapes]
    # With checkpointing one layer is kept, and its gradients: three vectors inside the expert, two of the stream.
    assert peaks[0] - peaks[1] == 1000 * (expert + 2 * (3 * 768 + 2 * 2048))


def test_dense_layers_and_shared_experts_of_a_mixture_are_counted():
    plain, first_dense = (Shape.of(mixture(num_hidden_layers=4, mlp_only_layers=dense)) for dense in ([], [0]))
    # The dense layer has an MLP of width 6144, and neither experts nor a router.
    assert first_dense.parameters == plain.parameters - 128 * EXPERT - 128 * 2048 + 3 * 2048 * 6144
    assert (first_dense.layer, first_dense.root) == (plain.layer, plain.root)
    with torch.device("meta"):
        config = Qwen2MoeConfig(**(A3B | {"num_hidden_layers": 2}), shared_expert_intermediate_size=5632)
        shared = Shape.of(Qwen2MoeForCausalLM(config).bfloat16())
    assert (shared.intermediate, shared.experts.intermediate) == (5632, 768)


def test_only_linear_layers_of_a_mixture_under_adapters_are_quantised(a3b):
    shape = Shape.of(a3b, LoRA(rank=8, targets=["q_proj"]))
    weights = kept_state(shape, Training(frozen_bytes=0.5), 1)["weights"]
    beside = MIXTURE - 48 * 128 * EXPERT
    assert weights == 2 * 48 * 128 * EXPERT + 0.5 * beside + 2 * 48 * 8 * (2048 + 4096)


def test_decoding_reads_the_experts_that_all_responses_visit_together(a3b):
    shape, device = Shape.of(a3b), Cluster.parse("8xH100").device
    scenario = scenario_of(
        a3b, "8xH100", "env.num_envs=1", "env.repeats=2", "train.optim_batch_size=2", prompt_tokens=1
    )
    engine = replace(scenario.engine(8), sequences=2)
    taken = sample_s(shape, engine, scenario.batches, 1.0, device, 1, 8)
    once = sample_s(shape, replace(engine, sequences=1), scenario.batches, 1.0, device, 1, 8)
    # Two responses of 512 tokens visit 8 and, of the other 120, 8 / 128 of them: 7.5 experts more than one.
    tokens = scenario.batches.response_tokens
    read = tokens * 2 * (shape.sizes.trunk + A3B_TABLE) / (8 * device.rates().bytes_per_s)
    more = tokens * 2 * 48 * 7.5 * EXPERT / (8 * device.rates().bytes_per_s)
    assert taken == pytest.approx(read + more, rel=0.01)
    assert once == pytest.approx(2 * read, rel=0.01)  # one after the other


QWEN = {
    "0_5b": (494_032_768, (151936, 896, 4864, 24, 14, 2, True)),
    "1_5b": (1_543_714_304, (151936, 1536, 8960, 28, 12, 2, True)),
    "7b": (7_615_616_512, (152064, 3584, 18944, 28, 28, 4, False)),
}
"""Parameters of Qwen2.5 models, as their checkpoints have them, and the shapes that they come from."""
SCRIPTS = ("sota/grpo.py", "sota/grpo_async.py")
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("qwen_0_5b_1gpu", "1xH100"), ("qwen_1_5b_1gpu", "1xH100"), ("plan_1_5b_1gpu", "1xH100"),
        ("plan_1_5b_2gpus", "2xH100"), ("plan_1_5b_3gpus", "3xH100"), ("plan_7b_8gpus", "8xH100"),
        ("plan_70b_64gpus", "64xH100"), ("plan_70b_128gpus", "128xH100"),
    ],
)  # fmt: skip
def test_a_planned_recipe_fits_the_cluster_that_it_names(recipe, cluster, tmp_path):
    folder = LLAMA_70B
    for size, (parameters, numbers) in QWEN.items():
        if f"_{size}_" in recipe:
            folder = tmp_path
            config = dict(zip(SHAPE, numbers, strict=True))
            Qwen2Config(**config, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
            assert Shape.of(skeleton(folder).bfloat16()).parameters == parameters
    mode = "sync" if "_5b" in recipe else "async"
    cfg = compose_config("grpo_gsm8k", [f"+experiment={recipe}", f"model.name={folder}", f"mode={mode}", *BF16])
    asked = Scenario(cfg := Settings.read(cfg), skeleton(folder).bfloat16(), Cluster.parse(cluster))
    plan = make_plan(asked)
    assert plan.fits, plan.missing
    assert plan.largest_tokens >= cfg.train.micro_batch_tokens
    assert plan.layout.total == asked.cluster.count
    assert not plan.refused
    text = (FOLDER / "experiment" / f"{recipe}.yaml").read_text()
    assert cluster in text
    (command,) = re.findall("^# Run: (.*)$", text, re.MULTILINE)
    *start, script, override = command.split()
    assert override == f"+experiment={recipe}"
    assert start[0] == ("sbatch" if asked.cluster.count > 8 else "torchrun" if plan.layout.train > 1 else "python")
    assert script == ("sota/slurm/grpo.sbatch" if start[0] == "sbatch" else SCRIPTS[asked.overlaps])


@pytest.mark.nightly
def test_how_many_can_train_is_told_where_there_are_too_few_groups(capsys):
    assert main(["plan", f"model.name={LLAMA_70B}", "cluster=64xH100"]) == 1
    assert "No more than 4 can train, as a step has so many groups" in capsys.readouterr().out
