"""One contract, every engine: the same tests run over vLLM and transformers with a tiny random model."""

import shutil
from contextlib import closing, contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo_rl.collectors.groups import group_of_samples
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.envs.base import Prompt
from grpo_rl.weights.push import WeightDeliveryError, WeightSync

PROMPTS = [[5, 6, 7, 8], [9], [5, 6, 7, 8, 10, 11]]
END = 2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random Llama with grouped-query heads and tied weights, its distribution far from uniform."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=128)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    ends = dict(bos_token_id=1, eos_token_id=END, pad_token_id=END)
    config = LlamaConfig(**sizes, **heads, **ends, tie_word_embeddings=True, initializer_range=0.3)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def engine_of(kind, folder, max_model_len, dtype="bfloat16", **of_vllm):
    """An engine of this kind; closed at the end."""
    if kind == "vllm":
        pytest.importorskip("vllm")
        from grpo_rl.engines.vllm.engine import VLLMEngine

        made = VLLMEngine(folder, max_model_len, dtype=dtype, **of_vllm)
    else:
        made = TransformersEngine(folder, max_model_len, dtype=dtype)
    with closing(made):
        yield made


def as_groups(prompts, samples):
    """Unrewarded groups of the samples of each prompt."""
    pairs = enumerate(zip(prompts, samples, strict=True))
    return [group_of_samples(Prompt(i, i, "", torch.tensor(prompt)), sample) for i, (prompt, sample) in pairs]


def draft_always(worker):
    worker._drafts._times = {10**9: 0.0}


@pytest.fixture(scope="module", params=["transformers", "vllm", pytest.param("drafts", marks=pytest.mark.nightly)])
def engine(request, model_folder):
    drafts = {"speculative": "responses"} if request.param == "drafts" else {}
    with engine_of("vllm" if drafts else request.param, model_folder, 64, **drafts) as made:
        if drafts:
            made._llm.collective_rpc(draft_always)
        yield made


@pytest.fixture
def trainer_model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)


def expected_log_probs(model, prompt, response, temperature=1.0):
    """Log-probabilities by a plain forward pass of one sequence in fp32."""
    ids = torch.tensor([list(prompt) + response.tolist()])
    logits = model.float()(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]


def by_response(sample):
    return zip(sample.responses, sample.log_probs.split(sample.offsets.diff().tolist()), strict=True)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_each_prompt_gets_n_responses_with_the_models_log_probs_at_the_temperature(engine, trainer_model, temperature):
    WeightSync(trainer_model, engine, engine.version).push()
    samples = engine.generate(PROMPTS, n=4, sampling=Sampling(temperature=temperature, max_new_tokens=8))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert len(sample.responses) == 4 and sample.version == engine.version and (sample.log_probs <= 0).all()
        for response, log_probs in by_response(sample):
            expected = expected_log_probs(trainer_model, prompt, response, temperature)
            # The engine computes in bf16, and a temperature of 0.5 doubles the rounding; a log-prob at the wrong
            # temperature or position would be off by whole nats.
            assert (log_probs - expected).abs().mean() < 0.1 / min(1, temperature)
            assert (log_probs - expected).abs().max() < 0.5 / min(1, temperature)


def test_a_response_ends_with_the_end_token_or_is_truncated(engine):
    samples = engine.generate(PROMPTS, n=16, sampling=Sampling(temperature=2.0, max_new_tokens=40))
    ended = truncated = 0
    for sample in samples:
        for response, cut in zip(sample.responses, sample.truncated.tolist(), strict=True):
            assert END not in response[:-1].tolist()
            assert cut == (response[-1].item() != END)
            ended, truncated = ended + (not cut), truncated + cut
            if cut:
                assert len(response) == 40
    assert ended and truncated


def test_the_greedy_response_is_the_most_likely(engine, trainer_model):
    WeightSync(trainer_model, engine, engine.version).push()
    (sample,) = engine.generate([PROMPTS[0]], n=1, sampling=Sampling(temperature=0.0, max_new_tokens=3))
    logits = trainer_model.float()(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert logits.max() - logits[sample.responses[0][0]] < 0.1  # bf16 may swap two that are this close


def test_a_seed_gives_the_same_response_again_whatever_is_sampled_next_to_it(engine):
    if "drafts/tokens" in engine.metrics():
        pytest.skip("how often a seed is read depends on what was drafted")

    def sampled(prompts, seed):
        samples = engine.generate(prompts, n=1, sampling=Sampling(max_new_tokens=12, ignore_eos=True, seed=seed))
        return samples[-1].response_ids.tolist()

    alone = sampled(PROMPTS[:1], 7)
    assert sampled([*PROMPTS[1:], PROMPTS[0]], 7) == alone
    assert sampled(PROMPTS[:1], 8) != alone


def test_minimum_length_holds_back_the_end(engine):
    samples = engine.generate(PROMPTS, n=8, sampling=Sampling(temperature=2.0, max_new_tokens=20, min_new_tokens=20))
    assert all(sample.offsets.diff().eq(20).all() for sample in samples)


def test_pushed_weights_are_what_it_samples_from(engine, trainer_model):
    sync = WeightSync(trainer_model, engine, engine.version)
    before = engine.version
    # A peaked new policy: a final norm scaled by 8 makes the logits 8 times as large.
    with torch.no_grad():
        trainer_model.model.norm.weight.mul_(8)
        trainer_model.model.layers[0].self_attn.k_proj.weight.neg_()
    assert sync.push() == before + 1 == engine.version
    (sample,) = engine.generate([PROMPTS[0]], n=4, sampling=Sampling(max_new_tokens=6))
    for response, log_probs in by_response(sample):
        expected = expected_log_probs(trainer_model, PROMPTS[0], response, 1.0)
        assert (log_probs - expected).abs().mean() < 0.5
    assert sample.version == before + 1


@pytest.mark.parametrize("module", ["embed_tokens", "norm", "layers.1.self_attn.k_proj", "layers.0.mlp.down_proj"])
def test_one_changed_number_is_a_failed_delivery_that_names_the_tensor(engine, trainer_model, module):
    sync, name = WeightSync(trainer_model, engine, engine.version), f"model.{module}.weight"
    sync.push()
    with torch.no_grad():
        parameter = trainer_model.get_parameter(name).view(-1)
        parameter[17] = parameter[17] * 1.01 + 0.01
    with pytest.raises(WeightDeliveryError, match=rf"1 of \d+ tensors .*{name}"):
        sync.verify()


def test_sleeping_and_waking_keeps_the_weights(engine, trainer_model):
    sync = WeightSync(trainer_model, engine, engine.version)
    sync.push()
    engine.sleep()
    engine.wake()
    sync.verify()
    assert engine.generate([[5]], n=1, sampling=Sampling(max_new_tokens=2))


def test_a_models_own_generation_defaults_do_not_bend_the_distribution(model_folder, tmp_path):
    """Some models ship a temperature, a nucleus and a repetition penalty; only what is asked for may count."""
    folder = tmp_path / "opinionated"
    shutil.copytree(model_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    GenerationConfig(
        do_sample=True, temperature=0.1, top_p=0.1, top_k=1, repetition_penalty=1.5, eos_token_id=END, pad_token_id=END
    ).save_pretrained(folder)
    engine = TransformersEngine(folder, max_model_len=64)
    (sample,) = engine.generate([PROMPTS[0]], n=32, sampling=Sampling(max_new_tokens=1))
    assert len(sample.response_ids.unique()) > 3  # a tenth of the temperature would leave one
    for response, log_prob in zip(sample.responses, sample.log_probs, strict=True):
        assert abs(log_prob - expected_log_probs(model, PROMPTS[0], response, 1.0)[0]) < 0.5
