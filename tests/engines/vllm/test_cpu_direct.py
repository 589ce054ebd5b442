"""The direct road of weights into vLLM on a CPU leads to what vLLM's own loading leads to, or is not taken."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_rl.engines.base import Sampling, digest
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from grpo_rl.weights.shared_memory import SharedMemoryTransport

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the weights of a GPU's engine are not packed")

PROMPTS = [[5, 6, 7], [9, 8], list(range(10, 60))]
GREEDY = Sampling(temperature=0.0, max_new_tokens=24, min_new_tokens=24)
SIZES = dict(
    vocab_size=200,  # padded to 256 by vLLM
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    initializer_range=0.1,
)
MODELS = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "biased": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
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


class Here:
    """An engine of this process, and the receiving end of shared memory as its worker has it."""

    name, dtype, takes_adapters, proves_bytes = "engine 0", torch.bfloat16, False, True

    def __init__(self, folder):
        import grpo_rl.engines.vllm.asynchronous  # noqa: F401  from here on every packed weight knows what it was packed from
        from grpo_rl.engines.vllm.engine import VLLMEngine
        from grpo_rl.engines.vllm.shared_transfer import SharedMemoryEngine

        self.engine = VLLMEngine(folder, max_model_len=100)
        self.llm = self.engine._llm
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        model = self.worker.model_runner.get_model()
        self.receiver = SharedMemoryEngine(None, self.worker.vllm_config, torch.device("cpu"), model)

    def submit(self, method, *args):
        from vllm.config import set_current_vllm_config

        call = Future()
        try:
            with set_current_vllm_config(self.worker.vllm_config):
                call.set_result(getattr(self, method)(*args))
        except Exception as error:
            call.set_exception(error)
        return call

    def start_weight_update(self):
        self.receiver.start_weight_update()

    def update_weights(self, bucket):
        self.receiver.update_weights(bucket)

    def finish_weight_update(self, version):
        self.receiver.finish_weight_update()
        self.llm.reset_prefix_cache()
        self.engine.version = int(version)

    def abandon_weight_update(self):
        self.receiver.abandon()

    def fingerprints(self, shapes, read_back=False):
        from grpo_rl.engines.vllm.asynchronous import SharedMemoryReceiver

        return SharedMemoryReceiver.held_fingerprints_of(self.worker, shapes, "bfloat16", not read_back)

    def pause(self): ...
    def resume(self): ...

    def weight_version(self):
        return self.engine.version

    def answers(self):
        return [(s.response_ids.tolist(), s.log_probs.tolist()) for s in self.engine.generate(PROMPTS, 1, GREEDY)]


def answers_from_disk(folder):
    engine = Here(folder)
    try:
        return engine.answers()
    finally:
        engine.engine.close()


def push(engine, folder, version, bucket_bytes=1 << 14):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    transport = SharedMemoryTransport([engine], bucket_bytes)
    try:
        held = transport.send(((n, p.detach()) for n, p in model.named_parameters()), version)["engine 0"]
        assert held.version == version
        wrong = [n for n, p in model.named_parameters() if held.fingerprints[n] != transport.fingerprint(n, p)]
        assert not wrong
    finally:
        transport.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "biased"])  # the latter tied
def test_what_came_directly_answers_as_what_was_loaded_from_disk(kind, tmp_path, monkeypatch):
    folders = [save(kind, seed, tmp_path / str(seed)) for seed in range(2)]
    second = answers_from_disk(folders[1])
    engine = Here(folders[0])
    try:
        first = engine.answers()
        assert first != second and not engine.receiver.is_direct
        push(engine, folders[1], 1)
        assert engine.receiver.is_direct and engine.answers() == second
        loads = []
        monkeypatch.setattr(engine.receiver, "_load", loads.append)
        push(engine, folders[0], 2)
        assert not loads and engine.answers() == first
        push(engine, folders[1], 3, bucket_bytes=1 << 11)  # cuts through blocks of packed rows
        assert not loads and engine.answers() == second
    finally:
        engine.engine.close()


@pytest.mark.slow
def test_a_bit_that_flips_in_a_packed_weight_is_found_when_it_is_read_back(tmp_path):
    engine = Here(save("tied", 0, tmp_path / "0"))
    model = AutoModelForCausalLM.from_pretrained(save("tied", 1, tmp_path / "1"), dtype=torch.bfloat16)
    transport = SharedMemoryTransport([engine], 1 << 14)
    try:
        sync = WeightSync(model, transport)
        assert [sync.push(), sync.push()] == [1, 2]  # the second one directly
        sync.verify()
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"):
            (there,) = engine.receiver._places.get(name).packed
            block, lane = divmod(there.first, 64)
            there.packed.blocks[block, 3, lane] ^= 1  # the last bit of one weight
            shapes = {n: p.shape for n, p in model.named_parameters()}
            said = transport.said(shapes)["engine 0"].fingerprints
            assert all(said[n] == digest(p) for n, p in model.named_parameters())  # a note does not know of it
            with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors differ .*\({name}\)"):
                sync.verify()
            there.packed.blocks[block, 3, lane] ^= 1
        sync.verify()
    finally:
        transport.close()
        engine.engine.close()


@pytest.mark.slow
def test_what_is_written_directly_for_the_first_time_is_read_back_on_that_push(tmp_path, monkeypatch):
    from grpo_rl.engines.vllm.cpu_packed import Packed

    def beside(packed, row, values):
        write(packed, row, values)
        packed.blocks[0, 0, 0] += 1

    folders = [save("tied", seed, tmp_path / str(seed)) for seed in range(4)]
    engine, write = Here(folders[0]), Packed.write
    try:
        push(engine, folders[1], 1)
        assert engine.receiver.is_direct
        monkeypatch.setattr(Packed, "write", beside)
        with pytest.raises(WeightDeliveryError, match=r"written by the direct road .*model\.layers\.0\."):
            push(engine, folders[2], 2)
        assert not engine.receiver.is_direct
        push(engine, folders[2], 2)  # by vLLM's own road
        monkeypatch.undo()
        reads = []
        read = Packed.read
        monkeypatch.setattr(Packed, "read", lambda *args: reads.append(args) or read(*args))
        push(engine, folders[3], 3)
        assert reads
        reads.clear()
        push(engine, folders[1], 4)
        assert not reads, "once is enough: it takes as long as to write"
    finally:
        engine.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "biased"])  # the latter tied
def test_in_one_process_later_pushes_go_to_their_places_and_are_read_from_there(kind, tmp_path, monkeypatch):
    """The first by vLLM's own road; what came by the second is read by products once more, to prove the direct one."""
    from grpo_rl.engines.vllm import engine as vllm

    folders = [save(kind, seed, tmp_path / str(seed)) for seed in range(2)]
    weights = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in folders]
    second = answers_from_disk(folders[1])
    here = Here(folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    products, reloads, by_product = [], [], vllm.read_by_product
    monkeypatch.setattr(vllm, "read_by_product", lambda *args: products.append(args) or by_product(*args))
    reload = here.worker.model_runner.reload_weights
    monkeypatch.setattr(
        here.worker.model_runner, "reload_weights", lambda **args: reloads.append(args) or reload(**args)
    )
    try:
        first, sync = here.answers(), WeightSync(model, here.engine)
        for push, (came, expected) in enumerate([(1, second), (0, first), (1, second)], start=1):
            products.clear(), reloads.clear()
            model.load_state_dict(weights[came])
            sync.push()
            assert (bool(products), bool(reloads)) == (push < 3, push < 2) and here.answers() == expected
        for name in ("model.layers.1.self_attn.v_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
            place = here.worker._places.get(name)
            forms = [place.plain.view(-1)] if place.plain is not None else []
            forms += [there.packed.blocks[there.first // 64, 3, there.first % 64 :] for there in place.packed]
            assert len(forms) == 1 + (kind == "biased" and "embed" in name)
            for held in forms:
                bits = held.view(torch.int16)
                bits[0] ^= 1  # the last bit of one weight
                with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors differ .*\({name}\)"):
                    sync.verify()
                bits[0] ^= 1
        sync.verify()
        assert not products
        # By products too, a head that is right does not vouch for the table beside it.
        here.worker._places.get("model.embed_tokens.weight").plain[0, 0] += 1
        here.worker._places = None
        with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors differ .*embed_tokens"):
            sync.verify()
        assert products
    finally:
        here.engine.close()


@pytest.mark.slow
def test_in_one_process_what_the_direct_road_puts_elsewhere_is_found_out(tmp_path, monkeypatch):
    from grpo_rl.engines.vllm.cpu_packed import Packed

    def beside(packed, row, values):
        write(packed, row, values)
        packed.blocks[0, 0, 0] ^= 1

    here, write = Here(save("tied", 0, tmp_path / "0")), Packed.write
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype=torch.bfloat16)
    try:
        sync = WeightSync(model, here.engine)
        for pushes in (1, 2):  # the next is the first one that is put there, and one that is read there too
            for _ in range(pushes):
                sync.push()
            with monkeypatch.context() as patch:
                patch.setattr(Packed, "write", beside)
                with pytest.raises(WeightDeliveryError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
                    sync.push()
        sync.push()
        with monkeypatch.context() as patch:
            patch.setattr(type(here.worker._places.get("model.norm.weight")), "write", lambda *_: None)
            with torch.no_grad():
                model.model.norm.weight.add_(1)
            with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors differ .*\(model\.norm\.weight\)"):
                sync.push()
        sync.push()
        # A layer that multiplies by something else than at first is not taken for what lies in the old place.
        layer = here.worker.model_runner.get_model().model.layers[1].mlp.down_proj
        product = layer.cpu_linear
        monkeypatch.setattr(layer, "cpu_linear", lambda x, weight, bias: 2 * product(x, weight, bias))
        with pytest.raises(WeightDeliveryError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
            sync.verify()
    finally:
        here.engine.close()


@pytest.mark.slow
def test_a_model_with_a_layer_that_is_not_known_goes_on_by_vllms_own_road(tmp_path, monkeypatch):
    from grpo_rl.engines.vllm import cpu_direct as vllm_cpu_direct

    folders = [save("tied", seed, tmp_path / str(seed)) for seed in range(2)]
    second = answers_from_disk(folders[1])
    monkeypatch.setattr(vllm_cpu_direct, "NORMS", ())
    engine = Here(folders[0])
    try:
        first = engine.answers()
        for version, (folder, expected) in enumerate(((folders[1], second), (folders[0], first)), start=1):
            push(engine, folder, version)
            assert not engine.receiver.is_direct and engine.answers() == expected
        loaded = {name: (shape, came ^ 1) for name, (shape, came) in engine.receiver._loaded.items()}
        with pytest.raises(LookupError, match="goes into RMSNorm"):
            vllm_cpu_direct.Places(engine.receiver.model, loaded)
        monkeypatch.undo()
        with pytest.raises(LookupError, match="model.embed_tokens.weight is not where it was looked for"):
            vllm_cpu_direct.Places(engine.receiver.model, loaded)
        del loaded["model.layers.1.input_layernorm.weight"]
        with pytest.raises(LookupError, match=r"model.layers.1.input_layernorm.weight is not made of"):
            vllm_cpu_direct.Places(engine.receiver.model, loaded)
    finally:
        engine.engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(192, 96), (100, 72), (64, 48), (640, 576)])
def test_a_weight_written_into_onednns_memory_is_multiplied_by(rows, columns, dtype):
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from grpo_rl.engines.vllm.cpu_packed import packed_weight

    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2))
    handler, other = (ops.create_onednn_mm(weight.t(), 32) for weight in (old, new))
    packed, words = packed_weight(handler, dtype.itemsize), new.view(torch.int32)
    assert torch.equal(packed.read(0, rows), old.view(torch.int32))
    x = torch.randn(5, columns, generator=generator).to(dtype)
    before = ops.onednn_mm(handler, x, None)
    for first, count in ((7, 30), (0, 7), (37, rows - 37)):  # not at the borders of blocks
        packed.write(first, words[first : first + count])
    after = ops.onednn_mm(handler, x, None)
    assert torch.equal(after, ops.onednn_mm(other, x, None)) and not torch.equal(after, before)


def test_a_layer_that_keeps_its_weight_beside_the_packed_one_answers_for_the_packed_one():
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    from grpo_rl.engines.vllm.asynchronous import _held_digest  # and from here on notes are taken

    current_platform.import_kernels()
    model = torch.nn.Sequential(torch.nn.Linear(96, 192, bias=False).bfloat16()).requires_grad_(False)
    (layer,) = model
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    packed, x = digest(layer.weight), torch.randn(2, 96).bfloat16()
    before = layer.cpu_linear(x, layer.weight, None)
    layer.weight.add_(1)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), before)
    assert _held_digest(model, "0.weight", torch.bfloat16) == packed != digest(layer.weight)


def test_a_vllm_that_is_laid_out_in_another_way_loads_weights_by_its_own_road(monkeypatch, caplog):
    from grpo_rl.engines.vllm import cpu_direct as vllm_cpu_direct
    from grpo_rl.engines.vllm.engine import find_places

    def renamed(self, model, loaded):
        raise AttributeError("'RMSNorm' object has no attribute 'weight'")

    monkeypatch.setattr(vllm_cpu_direct.Places, "__init__", renamed)
    assert find_places(torch.nn.Linear(2, 2), {"weight": (torch.Size([2, 2]), 0)}) is None
    assert "has no attribute 'weight'" in caplog.text


def test_in_one_process_a_layer_comes_directly_as_a_whole_or_not_at_all(monkeypatch):
    """vLLM would wait for the parts of a fused layer that were put there directly, and load none of the others."""
    from grpo_rl.engines.vllm import engine as vllm

    written, loaded = [], []
    names = [f"layers.{i}.{leaf}.weight" for i in range(2) for leaf in ("q_proj", "k_proj")]
    places = {
        name: SimpleNamespace(shape=torch.Size([2]), write=lambda *_, name=name: written.append(name)) for name in names
    }
    receiver = vllm.WeightReceiver()
    receiver._places = SimpleNamespace(get=places.get, still_hold=lambda: True)
    receiver.model_runner = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        get_model=lambda: torch.nn.Linear(2, 2),
        reload_weights=lambda weights_iterator: loaded.extend(name for name, _ in weights_iterator),
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(vllm, "find_places", lambda model, loaded: None)
    sizes = dict.fromkeys(names, 2) | {"layers.1.k_proj.weight": 3}  # which does not fit
    receiver.receive_weights((name, torch.zeros(size, dtype=torch.bfloat16)) for name, size in sizes.items())
    assert (written, loaded) == (names[:2], names[2:])
