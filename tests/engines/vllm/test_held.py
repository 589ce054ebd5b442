"""vLLM's layers on a CPU compute with the weights that were sent, whichever way they came; reading back shows them."""

from contextlib import closing

import pytest
import torch
from loop_control import Reads
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_rl.engines.base import Sampling
from grpo_rl.engines.fingerprint import digest
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from grpo_rl.weights.shared_memory import SharedMemoryTransport

packs_bfloat16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM packs no bfloat16 weight on a CPU without AVX-512"
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the weights of a GPU's engine are not packed")

PROMPTS = [[5, 6, 7], [9, 8], list(range(10, 60))]
GREEDY = Sampling(temperature=0.0, max_new_tokens=24, min_new_tokens=24)
SIZES = dict(vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2)  # 200 padded to 256 by vLLM
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.1)
EXPERTS = dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)  # padded to 32 by vLLM
MODELS = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "biased": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "mixture": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=True)),
}


def save(kind, seed, folder):
    torch.manual_seed(seed)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))  # norms and biases differ from each other too
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Here(Reads):
    """An engine of this process, and the receiving end of shared memory as its worker has it."""

    proves_bytes = True

    def __init__(self, folder):
        from grpo_rl.engines.vllm.engine import VLLMEngine
        from grpo_rl.engines.vllm.shared_transfer import SharedMemoryEngine

        super().__init__()
        self.engine = VLLMEngine(folder, max_model_len=100)
        self.llm = self.engine._llm
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        model = self.worker.model_runner.get_model()
        self.receiver = SharedMemoryEngine(None, self.worker.vllm_config, torch.device("cpu"), model)

    def submit(self, method, *args):
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.worker.vllm_config):
            return super().submit(method, *args)

    def start_weight_update(self):
        self.receiver.start_weight_update()

    def update_weights(self, bucket):
        self.receiver.update_weights(bucket)

    def finish_weight_update(self, version):
        self.receiver.finish_weight_update()
        self.llm.reset_prefix_cache()
        super().finish_weight_update(version)

    def abandon_weight_update(self):
        self.receiver.abandon()

    def fingerprints(self, shapes, read_back=False):
        return self.worker.held_fingerprints(shapes, "bfloat16", not read_back)

    def answers(self):
        return [(s.response_ids.tolist(), s.log_probs.tolist()) for s in self.engine.generate(PROMPTS, 1, GREEDY)]

    def close(self):
        self.engine.close()


@pytest.fixture(scope="module", params=["untied", "biased", "mixture"])  # the latter two tied
def saved(request, tmp_path_factory):
    """Two models of a kind, and the answers of an engine that loaded the second one."""
    folders = [save(request.param, seed, tmp_path_factory.mktemp("model") / str(seed)) for seed in range(2)]
    with closing(Here(folders[1])) as engine:
        return folders, engine.answers()


@pytest.mark.cases(1)
@pytest.mark.slow
def test_what_was_pushed_answers_as_what_was_loaded_from_disk(saved):
    folders, second = saved
    with closing(Here(folders[0])) as engine:
        first = engine.answers()
        assert first != second
        for version, (came, expected) in enumerate([(1, second), (0, first), (1, second)], start=1):
            model = AutoModelForCausalLM.from_pretrained(folders[came], dtype=torch.bfloat16)
            bucket_bytes = 1 << (17 - 3 * version)  # the smallest cut tensors
            with closing(SharedMemoryTransport([engine], bucket_bytes)) as transport:
                assert WeightSync(model, transport, version - 1).push() == version
            assert engine.answers() == expected


@pytest.mark.cases(1)
@packs_bfloat16
@pytest.mark.slow
def test_in_one_process_the_first_push_is_read_by_products_and_later_ones_by_digests(saved, monkeypatch):
    from grpo_rl.engines.vllm import held

    folders, second = saved
    weights = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in folders]
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    products, by_product = [], held.read_by_product
    monkeypatch.setattr(held, "read_by_product", lambda *args: products.append(args) or by_product(*args))
    with closing(Here(folders[0])) as here:
        runner = here.worker.model_runner
        first, sync = here.answers(), WeightSync(model, here.engine)
        for number, (came, expected) in enumerate([(1, second), (0, first), (1, second)], start=1):
            products.clear()
            model.load_state_dict(weights[came])
            sync.push()
            assert bool(products) == (number == 1) and here.answers() == expected
        sync.verify()
        assert products
        layer = runner.get_model().model.layers[1].self_attn.o_proj
        product = layer.cpu_linear
        with monkeypatch.context() as patch:
            patch.setattr(layer, "cpu_linear", lambda x, weight, bias: 2 * product(x, weight, bias))
            told = r"1 of \d+ tensors differ .*\(model\.layers\.1\.self_attn\.o_proj"
            with pytest.raises(WeightDeliveryError, match=told):
                sync.verify()
        # A right head proves nothing of the table beside it, nor the other way round.
        table = runner.get_model().model.embed_tokens.weight.data
        table[0, 0] += 1
        with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors differ .*embed_tokens"):
            sync.verify()
        for name in ("model.layers.1.self_attn.v_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
            with monkeypatch.context() as patch:
                patch.setattr(here.engine, "update_weights", altering(name, here.engine.update_weights))
                with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors differ .*\({name}\)"):
                    sync.push()


@pytest.mark.nightly
def test_each_expert_answers_for_what_it_computes_with(tmp_path, monkeypatch):
    from grpo_rl.engines.vllm import own_forms

    reads, unpacked = [], own_forms.unpacked
    monkeypatch.setattr(own_forms, "unpacked", lambda *args: reads.append(args) or unpacked(*args))
    with closing(Here(save("mixture", 0, tmp_path / "model"))) as here:
        model = AutoModelForCausalLM.from_pretrained(save("mixture", 1, tmp_path / "other"), dtype=torch.bfloat16)
        sync = WeightSync(model, here.engine)
        for number in (1, 2):  # the first is read back, the second answers by digests
            reads.clear()
            sync.push()
            assert bool(reads) == (number == 1)
        (samples,) = here.engine.generate([PROMPTS[0]], 4, Sampling(max_new_tokens=8, min_new_tokens=8))
        for ids, sampled in zip(samples.responses, samples.log_probs.view(4, 8), strict=True):
            logits = model(torch.tensor([PROMPTS[0] + ids.tolist()])).logits[0, len(PROMPTS[0]) - 1 : -1]
            ours = logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            assert (ours - sampled).abs().mean() < 0.05
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        layer = here.worker.model_runner.get_model().model.layers[1].mlp.experts.routed_experts
        layer.w2_weight.data[2].view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
        with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors differ .*\({name}\)"):
            sync.verify()
        # What was recorded when it was packed no longer counts: the digest is of what is read back.
        place = own_forms.expert_place(here.worker.model_runner.get_model(), name)
        assert here.fingerprints({name: [64, 24]}) == {name: digest(place.part_of(place.read()))}
        with monkeypatch.context() as patch:
            patch.setattr(here.engine, "update_weights", altering(name, here.engine.update_weights))
            with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors differ .*\({name}\)"):
                sync.push()


def altering(name, update):
    """An engine's way of taking weights that flips the last bit of one number on the way."""

    def altered(weights, version):
        def flipped():
            for n, tensor in weights:
                tensor = tensor.detach().clone()
                if n == name:
                    tensor.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
                yield n, tensor

        update(flipped(), version)

    return altered


@packs_bfloat16
def test_a_layer_that_keeps_its_weight_next_to_the_packed_one_answers_for_the_packed_one():
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    from grpo_rl.engines.vllm.cpu import record_packing
    from grpo_rl.engines.vllm.held import held_digest

    record_packing()

    current_platform.import_kernels()
    model = torch.nn.Sequential(torch.nn.Linear(96, 192, bias=False).bfloat16()).requires_grad_(False)
    (layer,) = model
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    packed, x = digest(layer.weight), torch.randn(2, 96).bfloat16()
    before = layer.cpu_linear(x, layer.weight, None)
    layer.weight.add_(1)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), before)
    assert held_digest(model, "0.weight", torch.bfloat16) == packed != digest(layer.weight)
