"""Adapters are scored and trained like peft's own on a padded batch, and their reference is the model without them."""

import copy
import re

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma2ForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM

from grpo_rl.policies.before_loading import LoRA
from grpo_rl.policies.compiler import has_compiler
from grpo_rl.policies.lora import adapted_layers, add_adapters, base_weights, check_readable, targeted
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.weights.push import merged_weights
from tests.helpers import to_fp64
from tests.policies.test_every_model import tiny_config
from tests.policies.test_exactness import SIZES, groups_of, plain_road, random_loss

peft = pytest.importorskip("peft")

FAMILIES = {
    "llama-tied": (LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama-biases": (LlamaForCausalLM, dict(attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, {}),
    "gemma2": (Gemma2ForCausalLM, dict(sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
}
TARGETS = {"all-linear": "all-linear", "some": ["q_proj", "mlp.down_proj"]}
GROUPS = groups_of([(5, [3, 2, 0, 3]), (1, [4, 7]), (9, [1, 1]), (20, [17, 33])])


def randomize(model, seed=1):
    """Adapters with something learnt: both factors random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def adapters_of(model):
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_of_adapters_equal_those_of_pefts_padded_forward(family, targets, checkpointing):
    torch.manual_seed(0)
    model_class, config = FAMILIES[family]
    base = model_class(model_class.config_class(**SIZES | config))
    plain = copy.deepcopy(base)
    settings = dict(r=3, lora_alpha=5, lora_dropout=0.0, task_type="CAUSAL_LM")
    theirs = to_fp64(peft.get_peft_model(plain, peft.LoraConfig(target_modules=TARGETS[targets], **settings)))
    ours = to_fp64(add_adapters(base, LoRA(rank=3, alpha=5, targets=TARGETS[targets])))
    adapters, expected_adapters = adapters_of(randomize(ours)), adapters_of(randomize(theirs))
    assert adapters.keys() == expected_adapters.keys()

    expected = plain_road(theirs, GROUPS, 0.7)
    random_loss(*expected, GROUPS).backward()
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    policy = TrainPolicy(ours, 0.7)
    scored = policy.score(GROUPS)
    random_loss(*scored, GROUPS).backward()
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-9)
    for name, parameter in adapters.items():
        assert parameter.grad.abs().max() > 1e-3, name  # something to compare
        torch.testing.assert_close(parameter.grad, expected_adapters[name].grad, rtol=0, atol=1e-9)
    assert [name for name, p in ours.named_parameters() if p.grad is not None] == list(adapters)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_rslora_and_dora_are_scored_trained_and_merged_as_by_peft(kind):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaForCausalLM.config_class(**SIZES))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **{f"use_{kind}": True})
    theirs = to_fp64(peft.get_peft_model(copy.deepcopy(base), config))
    ours = to_fp64(add_adapters(base, LoRA(rank=3, alpha=5, **{kind: True})))
    adapters, expected_adapters = adapters_of(randomize(ours)), adapters_of(randomize(theirs))
    assert adapters.keys() == expected_adapters.keys()
    expected, scored = plain_road(theirs, GROUPS, 0.7), TrainPolicy(ours, 0.7).score(GROUPS)
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-9)
    for values in (expected, scored):
        random_loss(*values, GROUPS).backward()
    for name, parameter in adapters.items():
        assert parameter.grad.abs().max() > 1e-3, name  # something to compare
        torch.testing.assert_close(parameter.grad, expected_adapters[name].grad, rtol=0, atol=1e-9)
    whole = theirs.merge_and_unload().state_dict()
    for name, weight in merged_weights(ours):
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-12)


def test_fresh_adapters_that_train_the_rows_lengths_are_merged_to_the_bits_of_the_base(tiny_model):
    policy = TrainPolicy.load(tiny_model, torch.bfloat16, lora=LoRA(rank=2, dora=True))
    base = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).named_parameters())
    for name, weight in merged_weights(policy.model):
        assert torch.equal(weight.bfloat16(), base[name]), name


@pytest.mark.slow
def test_fresh_adapters_change_no_score_start_the_same_under_one_seed_and_leave_the_random_state_alone(tiny_model):
    plain = TrainPolicy.load(tiny_model, torch.float32).score(GROUPS)
    model, before = AutoModelForCausalLM.from_pretrained(tiny_model), torch.get_rng_state()
    add_adapters(model, LoRA(rank=2))
    assert torch.equal(torch.get_rng_state(), before)
    policies = [TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=4, seed=seed)) for seed in (0, 0, 1)]
    for policy in policies:
        torch.testing.assert_close(policy.score(GROUPS), plain, rtol=0, atol=0)
    first, again, other = ([p.detach() for p in adapters_of(policy.model).values()] for policy in policies)
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, other))


def test_the_first_scores_of_a_process_drop_what_later_ones_would(tiny_model):
    policy = TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=2, dropout=0.5))
    randomize(policy.model)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append([group.old_log_probs for group in policy.add_log_probs(GROUPS, 64)])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_only_adapters_are_stepped_and_updates_too_small_for_bf16_add_up(tiny_model):
    policy = TrainPolicy.load(tiny_model, torch.bfloat16, lora=LoRA(rank=4))
    randomize(policy.model)
    frozen = {n: p.detach().clone() for n, p in policy.model.named_parameters() if "lora_" not in n}
    start = {n: p.detach().clone() for n, p in adapters_of(policy.model).items()}
    optimizer = PolicyOptimizer(policy.model, lr=1e-5)
    for _ in range(100):
        # The same gradient each time: AdamW moves every number by 1e-5 in its direction.
        policy.model.zero_grad()
        for parameter in adapters_of(policy.model).values():
            parameter.sum().backward()
        optimizer.step()
    masters = optimizer.state_dict()["masters"]
    assert list(masters) == list(start) and all(m.dtype == torch.float32 for m in masters.values())
    for name, master in masters.items():
        torch.testing.assert_close(master, start[name].float() - 1e-3, rtol=0, atol=2e-6)
        torch.testing.assert_close(policy.model.get_parameter(name).detach(), master.bfloat16(), rtol=0, atol=0)
    assert all(torch.equal(policy.model.get_parameter(name), p) for name, p in frozen.items())


@pytest.mark.slow
def test_the_reference_is_the_base_without_dropout_and_no_second_model(tiny_model, monkeypatch):
    base = ReferencePolicy.load(tiny_model, torch.float32)
    policy = TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=4, dropout=0.3))
    randomize(policy.model)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    reference = ReferencePolicy(policy.model)
    assert reference.model is policy.model
    expected, got = (r.add_log_probs(GROUPS, max_tokens=40) for r in (base, reference))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b.ref_log_probs, a.ref_log_probs, rtol=0, atol=0)
        assert not b.ref_log_probs.requires_grad
    with torch.no_grad():
        assert not torch.equal(policy.score(GROUPS)[0], policy.score(GROUPS)[0])


@pytest.mark.slow
def test_after_the_reference_has_scored_training_goes_on_as_before(tiny_model):
    def stepped(with_reference):
        policy = TrainPolicy.load(tiny_model, torch.bfloat16, lora=LoRA(rank=4))
        randomize(policy.model)
        optimizer = PolicyOptimizer(policy.model, lr=1e-3)
        for _ in range(2):
            if with_reference:
                ReferencePolicy(policy.model).add_log_probs(GROUPS, max_tokens=100)
            assert not policy.model.training
            policy.score(GROUPS)[0].sum().backward()
            assert optimizer.step().grad_norm > 0
        return optimizer.state_dict()["masters"]

    assert all(map(torch.equal, stepped(False).values(), stepped(True).values()))


@pytest.mark.nightly
@pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")
def test_compiled_mlps_use_the_adapters_and_are_compiled_once(tiny_model):
    counters, graphs = torch._dynamo.utils.counters, []
    breaks = dict(counters["graph_break"])
    plain = TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=4))
    policy = TrainPolicy.load(tiny_model, torch.float32, compile=True, lora=LoRA(rank=4))
    references = [ReferencePolicy(p.model) for p in (plain, policy)]
    for seed, lengths in enumerate([[3, 1], [40, 0, 17], [200] * 4]):
        groups = [random_group(5, lengths, 50)]
        for p in (plain, policy):
            randomize(p.model, seed).zero_grad()
            random_loss(*(x.double() for x in p.score(groups)), groups).backward()
        torch.testing.assert_close(policy.score(groups), plain.score(groups), rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(adapters_of(policy.model).values(), adapters_of(plain.model).values(), strict=True):
            assert (ours.grad - theirs.grad).norm() < 1e-3 * theirs.grad.norm()
        scored = [reference.add_log_probs(groups, 4096)[0].ref_log_probs for reference in references]
        torch.testing.assert_close(*scored, rtol=1e-4, atol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1 and counters["graph_break"] == breaks


GATED = ["gate_proj", "up_proj", "down_proj"]
"""Linear layers of shared experts and dense layers, which peft takes for the stacked experts of these mixtures."""


def tiny_mixture(name):
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    return model_class(tiny_config(model_class, None))


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("DeepseekV3ForCausalLM", GATED), ("Llama4ForCausalLM", GATED), ("PhimoeForCausalLM", ["o_proj"]),
    ],
)  # fmt: skip
def test_the_targets_that_a_refusal_names_get_adapters_and_no_router_or_expert_does(name, others):
    model = tiny_mixture(name)
    with pytest.raises(ValueError, match=r"(gate|router)\.weight") as refusal:
        targeted(model, "all-linear")
    named = re.search(r"given to \[(.*?)\]", str(refusal.value))[1].split(", ")
    assert set(others) <= set(named)
    linear = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]
    policy = TrainPolicy(add_adapters(model, LoRA(rank=2, targets=named)))
    assert list(adapted_layers(model)) == linear
    policy.score(GROUPS)[0].sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {f"{name}.lora_{x}.default.weight" for name in linear for x in "AB"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Llama4ForCausalLM"])
def test_peft_reads_a_folder_of_adapters_of_a_mixture_as_they_were_trained(name, tmp_path):
    names = targeted(tiny_mixture(name), ["o_proj", *GATED] if name.startswith("Llama") else ["o_proj"])
    check_readable(tiny_mixture(name), names)
    model = randomize(add_adapters(tiny_mixture(name), LoRA(rank=2, targets=names))).eval()
    model.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(tiny_mixture(name), tmp_path).eval()
    ids = GROUPS[-1].prompt_ids[None]
    torch.testing.assert_close(read(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_a_quantised_base_is_scored_by_the_weights_it_stands_for_and_keeps_them(tiny_model, quantization):
    pytest.importorskip("bitsandbytes")
    policy = TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=4), quantization=quantization)
    before = {name: weight.clone() for name, weight in base_weights(policy.model)}
    stands_for = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    exact = TrainPolicy(copy.deepcopy(stands_for))
    changed = [n for n, p in stands_for.named_parameters() if not torch.equal(before[n], p)]
    assert changed == [n for n in before if n.endswith("_proj.weight")]
    stands_for.load_state_dict(before, strict=False)
    plain = TrainPolicy(stands_for)
    with torch.no_grad():
        for ours, theirs, unquantised in zip(*(p.score(GROUPS) for p in (policy, plain, exact)), strict=True):
            error = (ours - theirs).abs().mean()
            assert error < 2e-3 and error < 0.2 * (ours - unquantised).abs().mean()

    randomize(policy.model)
    optimizer = PolicyOptimizer(policy.model, lr=1e-2)
    ReferencePolicy(policy.model).add_log_probs(GROUPS, 100)
    policy.score(GROUPS)[0].sum().backward()
    assert optimizer.step().grad_norm > 0
    with torch.no_grad():
        scored = policy.score(GROUPS)
        assert all(torch.equal(weight, before[name]) for name, weight in base_weights(policy.model))
        assert all(map(torch.equal, policy.score(GROUPS), scored))  # reading the weights left the layers as they were
