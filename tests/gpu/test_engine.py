"""vLLM on a GPU: what is pushed is held bit for bit, also after a sleep, and the proof is the host's."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from grpo_rl.engines.base import Samples, Sampling, seeded
from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.training.checkpoint import rng_state
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from tests.engines.test_contract import engine_of
from tests.tiny_runs import same

pytestmark = pytest.mark.gpu

MODEL = dict(
    vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
ENGINE = dict(max_model_len=128, gpu_memory_utilization=0.1, max_num_seqs=16)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    config = Qwen3Config(**MODEL, tie_word_embeddings=request.param)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def engine(folder):
    with engine_of("vllm", folder, **ENGINE, can_sleep=True) as made:
        yield made


@pytest.fixture
def trainer(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")


def change(model: torch.nn.Module, seed: int) -> None:
    """Adds noise to every weight."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=torch.float32)
            parameter.add_((0.01 * noise).to(parameter.dtype))


def on_host(model: torch.nn.Module) -> dict[str, int]:
    """Fingerprints of all weights, computed one at a time on the CPU."""
    return {name: fingerprint(parameter.detach().cpu()) for name, parameter in model.named_parameters()}


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_after_every_push_all_tensors_are_held_as_the_host_computes_them_and_one_changed_number_is_found(
    engine, trainer
):
    sync = WeightSync(trainer, engine, engine.version)
    for seed in range(4):  # the first push is loaded by vLLM, later ones are written in place
        change(trainer, seed)
        sync.push()
        assert engine.fingerprints(shapes(trainer)) == on_host(trainer)
    with torch.no_grad():
        trainer.get_parameter("model.layers.1.self_attn.k_proj.weight")[3, 4] += 0.5
    with pytest.raises(WeightDeliveryError, match=r"1 of \d+ tensors .*k_proj"):
        sync.verify()


def test_pushed_weights_are_what_graphs_compute_with(engine, trainer):
    """A captured graph reads the addresses of its weights: a push has to write there."""
    sync = WeightSync(trainer, engine, engine.version)
    prompt = [5, 6, 7, 8]

    def off(model: torch.nn.Module, sample: Samples) -> float:
        """Mean |difference| of the engine's log-probabilities from those of a model, in nats."""
        ids = torch.tensor([prompt + sample.response_ids.tolist()], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        return float((sample.log_probs - expected).abs().mean())

    sync.push()
    for seed in (10, 11):
        before = copy.deepcopy(trainer)
        with torch.no_grad():
            trainer.model.norm.weight.mul_(3)  # a more peaked policy: its log-probabilities differ by nats
        change(trainer, seed)
        sync.push()
        (sample,) = engine.generate([prompt], n=1, sampling=Sampling(temperature=1.0, max_new_tokens=24))
        assert off(trainer, sample) < 0.5 * off(before, sample)


def test_a_sleeping_engine_frees_memory_and_wakes_with_its_weights_and_takes_new_ones(engine, trainer):
    sync = WeightSync(trainer, engine, engine.version)
    change(trainer, 20)
    sync.push()
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    engine.wake()
    assert asleep - before > 1 << 30, "the cache of a tenth of the GPU is more than a GiB"
    sync.verify()
    change(trainer, 21)
    sync.push()
    assert engine.fingerprints(shapes(trainer)) == on_host(trainer)
    assert engine.generate([[5]], n=1, sampling=Sampling(max_new_tokens=2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_an_engine_and_its_proof_adds_up(folder, trainer):
    with engine_of("vllm", folder, **ENGINE, tensor_parallel_size=2) as made:
        sync = WeightSync(trainer, made)
        for seed in (30, 31):
            change(trainer, seed)
            sync.push()
            sync.verify()
        assert made.fingerprints(shapes(trainer)) == on_host(trainer)
        assert made.generate([[5, 6]], n=2, sampling=Sampling(max_new_tokens=4))


def test_a_seed_gives_the_same_responses_and_greedy_ones_leave_the_random_state_as_it_was(engine):
    def sampled():
        with seeded(3):
            return [
                samples.response_ids.tolist() for samples in engine.generate([[5, 6]], 4, Sampling(max_new_tokens=8))
            ]

    first, before = sampled(), rng_state()
    engine.generate([[5, 6]], 1, Sampling(temperature=0.0, max_new_tokens=8))
    assert sampled() == first and same(before, rng_state())


def test_a_request_that_cuts_nothing_off_gets_no_sets_and_an_engine_that_ends_leaves_another_its_memory(engine, folder):
    with engine_of("vllm", folder, **ENGINE, sampling=Sampling(top_p=0.7)) as cutting:
        (cut,) = cutting.generate([[5, 6]], 2, Sampling(top_p=0.7, max_new_tokens=8))
        assert cut.kept_counts.min() > 0
        outputs = cutting._llm.generate([{"prompt_token_ids": [5, 6]}], cutting._parameters(2, Sampling(), None))
        assert all(not any(response.sampling_mask.token_ids) for response in outputs[0].outputs)
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    before = engine.generate([[5, 6]], 1, greedy)
    engine.sleep()
    engine.wake()
    assert engine.generate([[5, 6]], 1, greedy)[0].response_ids.equal(before[0].response_ids)
