"""Adapters on their way to an engine and to disk: merged a tensor at a time, or beside their base; always proven."""

import copy
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.policies import lora
from grpo_rl.policies.loading import target_names
from grpo_rl.policies.lora import LoRA, base_weights, factors
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.run.export import export
from grpo_rl.testing import ScriptedEngine
from grpo_rl.weights.push import WeightDeliveryError, WeightSync, merged_weights
from tests.engines.test_contract import as_groups, engine_of

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]  # only a part of what vLLM fuses
PROMPT = list(range(3, 48))  # longer than a block of the prefix cache


def adapted(tiny_model, dtype=torch.bfloat16, quantization=None):
    """A policy whose adapters matter: what they add is about as large as the weights."""
    lora = LoRA(rank=4, alpha=8, targets=TARGETS)
    return randomize(TrainPolicy.load(tiny_model, dtype, lora=lora, quantization=quantization), seed=1)


def randomize(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def script(prompt, g):
    return []


class TakesAdapters(ScriptedEngine):
    """Holds adapters beside weights, and notes what it is sent."""

    def __init__(self):
        super().__init__(script)
        self.takes_adapters, self.sent = True, []

    def update_weights(self, weights, version):
        weights = list(weights)
        self.sent.append([name for name, _ in weights])
        super().update_weights(weights, version)


def test_merged_weights_are_pefts_under_the_checkpoints_names_and_the_trainer_keeps_its_own(tiny_model):
    policy = adapted(tiny_model, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    adapters = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(before[name])
    expected = dict(theirs.merge_and_unload().named_parameters())
    merged = dict(merged_weights(policy.model))
    assert list(merged) == list(dict(base.named_parameters()))
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-6)
        is_target = name.split(".")[-2] in TARGETS
        assert torch.equal(weight, base.get_parameter(name)) != is_target, name
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_the_sender_makes_every_merged_weight_once_and_never_holds_two_of_them(tiny_model, monkeypatch):
    policy, products = adapted(tiny_model), []
    monkeypatch.setattr(lora, "factors", lambda layer: products.append(layer) or factors(layer))
    own = {parameter.data_ptr() for parameter in policy.model.parameters()}
    most, made = 0, 0

    class Counts(ScriptedEngine):
        def update_weights(self, weights, version):
            def counted():
                nonlocal most, made
                alive = weakref.WeakSet()
                for name, tensor in weights:
                    if tensor.data_ptr() not in own:
                        alive.add(tensor)
                        made += 1
                    most = max(most, len(alive))
                    yield name, tensor
                    del tensor

            for name, tensor in counted():
                self.weights[name] = tensor.clone()
                del tensor
            self.version = version

    WeightSync(policy.model, Counts(script)).push()
    assert made == len(products) == len(TARGETS) * 2 and most == 1


def test_of_adapters_the_base_travels_once_and_they_with_every_push(tiny_model):
    policy, engine = adapted(tiny_model), TakesAdapters()
    sync = WeightSync(policy.model, engine)
    sync.push()
    randomize(policy, seed=2)
    sync.push()
    base = [name for name, _ in base_weights(policy.model)]
    first, second = engine.sent
    assert base == list(dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()))
    assert first == base + second and len(second) == 2 * 2 * len(TARGETS)
    b = policy.model.get_parameter("model.layers.1.mlp.up_proj.lora_B.default.weight")
    assert torch.equal(engine.weights["model.layers.1.mlp.up_proj.lora_B.weight"], 2 * b)  # alpha / rank
    sync.verify()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.lora_A.weight", "model.norm.weight"])
def test_an_engine_with_one_wrong_number_in_adapters_or_base_is_found_out(tiny_model, name):
    class Flipper(TakesAdapters):
        def update_weights(self, weights, version):
            super().update_weights(weights, version)
            self.weights[name].view(-1).view(torch.int16)[3] ^= 1

    with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors .*{name}"):
        WeightSync(adapted(tiny_model).model, Flipper()).push()


def test_an_engine_that_keeps_the_old_adapter_is_found_out(tiny_model):
    class Deaf(TakesAdapters):
        def update_weights(self, weights, version):
            if self.weights:
                weights = []
            super().update_weights(weights, version)

    policy = adapted(tiny_model)
    sync = WeightSync(policy.model, Deaf())
    sync.push()
    randomize(policy, seed=2)
    with pytest.raises(WeightDeliveryError, match="16 of 16 tensors"):
        sync.push()


def test_adapters_are_not_put_on_another_base(tiny_model, tmp_path):
    sync = WeightSync(adapted(tiny_model).model, ScriptedEngine(script))
    path = tmp_path / "checkpoint.pt"
    torch.save(sync.base_fingerprints(), path)
    saved = torch.load(path, weights_only=True)
    sync.check_base(saved)
    other = adapted(tiny_model)
    WeightSync(randomize(other, seed=5).model, ScriptedEngine(script)).check_base(saved)  # only the base counts
    with torch.no_grad():
        other.model.model.norm.weight[3] += 1
    told = r"another base: 1 of 20 tensors .*\(model\.norm\.weight, …\).* If .* quantised"
    with pytest.raises(ValueError, match=told):
        WeightSync(other.model, ScriptedEngine(script)).check_base(saved)
    plain = WeightSync(TrainPolicy.load(tiny_model, torch.bfloat16).model, ScriptedEngine(script))
    plain.check_base({})
    assert plain.base_fingerprints() == {}


def sampled(engine):
    """Responses to a cached prompt."""
    return as_groups([PROMPT], engine.generate([PROMPT], n=8, sampling=Sampling(max_new_tokens=8)))


def gap(policy, engine):
    """Mean |difference| of the sampler's log-probabilities and the trainer's, on responses that it samples now."""
    return gap_of(policy, sampled(engine))


def gap_of(policy, groups):
    with torch.no_grad():
        return (policy.score(groups)[0] - groups[0].log_probs).abs().mean()


@pytest.fixture(scope="module", params=["merged", "adapter", "transformers"])
def engine(request, tiny_model):
    """An engine for each way of taking adapters; fp32, so that only rounding inside kernels is left."""
    kind = "transformers" if request.param == "transformers" else "vllm"
    beside = dict(adapter_rank=4, adapter_targets=TARGETS) if request.param == "adapter" else {}
    with engine_of(kind, tiny_model, 64, "float32", **beside) as made:
        yield made


BESIDE = pytest.mark.parametrize("engine", ["adapter"], indirect=True)


def test_an_engine_samples_from_the_adapters_it_was_sent_last(tiny_model, engine):
    policy = adapted(tiny_model, torch.float32)
    sync = WeightSync(policy.model, engine, engine.version)
    for seed in (1, 2, 3):
        randomize(policy, seed)
        version = sync.push()
        assert engine.version == version
        assert gap(policy, engine) < 1e-3
        assert gap(randomize(policy, seed + 1), engine) > 0.1  # which other adapters are far from
    sync.push()
    sync.verify()


def test_one_changed_number_of_an_adapter_is_a_failed_delivery(tiny_model, engine):
    policy = adapted(tiny_model, torch.float32)
    sync = WeightSync(policy.model, engine, engine.version)
    sync.push()
    for layer in ("self_attn.v_proj", "mlp.down_proj", "mlp.up_proj"):
        for part in "AB":
            name = f"model.layers.1.{layer}.lora_{part}"
            factor = policy.model.get_parameter(f"{name}.default.weight").data.view(-1)
            before = factor[5].item()
            factor[5] += 0.25
            told = name.replace(".", r"\.") if engine.takes_adapters else layer.replace(".", r"\.")
            with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors .*{told}"):
                sync.verify()
            factor[5] = before
    sync.verify()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["tied", "untied", "embedding"])
def test_vllms_head_computes_with_what_was_pushed_and_the_proof_covers_it(tiny_model, tmp_path, monkeypatch, kind):
    """On a CPU it multiplies by a packed copy, which vLLM leaves as it was where the embedding has the weight."""
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm import cpu, worker

    model, tied = AutoModelForCausalLM.from_pretrained(tiny_model), kind != "untied"
    if kind == "embedding":  # vLLM's Gemma 2 has no head, and multiplies by the embedding
        sizes = dict(vocab_size=model.config.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
        heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, initializer_range=0.1))
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path)
    policy = TrainPolicy.load(tmp_path, torch.float32)
    assert (policy.model.lm_head.weight is policy.model.model.embed_tokens.weight) == tied
    with engine_of("vllm", tmp_path, 64, "float32") as engine:
        sync = WeightSync(policy.model, engine)
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(2)
        sync.push()
        assert gap(policy, engine) < 1e-3
        if torch.cuda.is_available():
            return
        runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        (head,) = cpu.packed_heads(runner.get_model())
        with monkeypatch.context() as patch:
            product = head.cpu_linear
            patch.setattr(head, "cpu_linear", lambda x, weight, bias: 2 * product(x, weight, bias))
            with pytest.raises(WeightDeliveryError, match="lm_head" if kind == "untied" else "embed_tokens"):
                sync.verify()
        sync.verify()
        if kind == "tied":
            monkeypatch.setattr(worker, "refresh_heads", lambda model: None)
            with torch.no_grad():
                policy.model.lm_head.weight.mul_(2)
            with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors .*embed_tokens"):
                sync.push()
            assert gap(policy, engine) > 1e-2


@pytest.mark.nightly
@BESIDE
def test_what_vllm_cached_under_an_earlier_adapter_is_not_read_under_a_later_one(tiny_model, engine, monkeypatch):
    """Even if the cache is not dropped: keys and values are kept by the name of the adapter that made them."""
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    policy = adapted(tiny_model, torch.float32)
    sync = WeightSync(policy.model, engine, engine.version)
    for seed in (1, 2):
        randomize(policy, seed)
        sync.push()
        assert gap(policy, engine) < 1e-3


@BESIDE
def test_conversations_are_answered_by_the_adapter_too(tiny_model, engine):
    policy = adapted(tiny_model, torch.float32)
    WeightSync(policy.model, engine, engine.version).push()
    engine.submit(7, PROMPT, Sampling(max_new_tokens=8))
    finished = []
    while not finished:
        finished = engine.step()
    assert gap_of(policy, as_groups([PROMPT], [finished[0][1]])) < 1e-3


@BESIDE
def test_weights_sent_layer_by_layer_to_other_processes_arrive_as_well(tiny_model, engine, monkeypatch):
    monkeypatch.setattr(engine, "_is_one_worker", False)  # as with tensor parallelism
    policy = adapted(tiny_model, torch.float32)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.25)
    sync = WeightSync(policy.model, engine, engine.version)
    sync.push()
    sync.verify()
    assert gap(policy, engine) < 1e-3


def test_an_adapter_that_vllm_lost_is_an_error_and_no_answer_by_the_base(tiny_model):
    policy = adapted(tiny_model, torch.float32)
    with engine_of("vllm", tiny_model, 64, "float32", adapter_rank=4, adapter_targets=TARGETS) as engine:
        sync = WeightSync(policy.model, engine)
        version = sync.push()
        runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.lora_manager.remove_all_adapters()
        with pytest.raises(LookupError, match="holds no adapter"):
            sync.verify()
        with pytest.raises(Exception, match=f"policy-{version}"):
            engine.generate([PROMPT], n=1, sampling=Sampling(max_new_tokens=1))


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_base_reaches_the_engine_as_the_trainer_computes_with_it(tiny_model, quantization):
    pytest.importorskip("bitsandbytes")
    # In fp32: rounding to bf16 would cover how little int8 weights are off.
    policy = adapted(tiny_model, torch.float32, quantization)
    merged = TransformersEngine(tiny_model, max_model_len=64, dtype="float32")
    WeightSync(policy.model, merged).push()
    groups = sampled(merged)
    ours, unquantised = (gap_of(p, groups) for p in (policy, adapted(tiny_model, torch.float32)))
    assert ours < 2e-3 and ours < 0.2 * unquantised, (ours, unquantised)
    beside = TakesAdapters()
    WeightSync(policy.model, beside, beside.version).push()
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.k_proj.weight"  # quantised, and no adapter's
    assert torch.equal(beside.weights[name], dict(base_weights(policy.model))[name].bfloat16())
    assert not torch.equal(beside.weights[name], original.get_parameter(name))


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("how", ["merged", "adapter"])
def test_exports_compute_what_the_policy_computes(tiny_model, tmp_path, how, quantization):
    if quantization:
        pytest.importorskip("bitsandbytes")
    policy = adapted(tiny_model, torch.float32, quantization)
    export(policy.model, AutoTokenizer.from_pretrained(tiny_model), tmp_path, how)
    files = {path.name for path in tmp_path.iterdir()}
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        policy.model.set_attn_implementation("sdpa")
        expected = policy.model(ids).logits
        if how == "merged":
            assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
            assert not any("adapter" in name for name in files)
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            assert loaded.config._attn_implementation == "sdpa" and not hasattr(loaded.config, "quantization_config")
        else:
            assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
            assert "model.safetensors" not in files
            if quantization:
                base = TrainPolicy.load(tiny_model, torch.float32, lora=LoRA(rank=0), quantization=quantization).model
                base.set_attn_implementation("sdpa")
            else:
                base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
            loaded = peft.PeftModel.from_pretrained(base.train(), tmp_path).train()
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("push", ["adapter", "merged"])
def test_a_real_models_sampler_agrees_with_its_trainer_under_pushed_adapters(default_model, push):
    """They agree within what rounding explains, as without adapters too (tests/engines/test_sampler_mismatch.py)."""
    pytest.importorskip("vllm")
    lora = LoRA(rank=16, push=push)
    policy = TrainPolicy.load(default_model, torch.bfloat16, lora=lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(4e-2 * torch.randn(parameter.shape, generator=generator))
    beside = dict(adapter_rank=16, adapter_targets=target_names(default_model, lora)) if push == "adapter" else {}
    with engine_of("vllm", default_model, 256, **beside) as engine:
        WeightSync(policy.model, engine).push()
        groups = sampled(engine)
        assert gap_of(policy, groups) < 0.1  # on this prompt of nonsense; 0.06 without adapters
        policy.model.disable_adapters()
        assert gap_of(policy, groups) > 0.2  # adapters that change what is said
