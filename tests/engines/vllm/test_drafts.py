"""Drafts: the policy's own distribution and log-probabilities, fewer forwards."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from grpo_rl.assembly.sync import vllm_options
from grpo_rl.engines.base import Sampling
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from tests.engines.test_contract import draft_always
from tests.engines.vllm.test_hybrids import MODELS, save

pytest.importorskip("vllm")
TEMPERATURE = 0.05
"""A temperature at which the tiny model, whose weights are random, prefers some tokens."""


NIGHTLY = [pytest.param(kind, 20_000, marks=pytest.mark.nightly) for kind in (None, "ngram", "responses")]


@pytest.mark.parametrize(("kind", "count"), [("responses", 2_000), *NIGHTLY])
def test_first_second_and_tenth_tokens_have_the_models_distribution(tiny_model, kind, count):
    from grpo_rl.engines.vllm.engine import VLLMEngine

    prompt, length = [5, 6, 7, 8, 5, 6, 7, 8], 10
    sampling = Sampling(TEMPERATURE, max_new_tokens=length, min_new_tokens=length, ignore_eos=True)
    with closing(VLLMEngine(tiny_model, 64, dtype="float32", speculative=kind)) as engine:
        if kind:
            engine._llm.collective_rpc(draft_always)
        (samples,) = engine.generate([prompt], count, sampling)
        metrics = engine.metrics()
    if kind:
        assert metrics["drafts/tokens"] > count and 0.1 < metrics["drafts/accepted_fraction"] < 1

    responses = samples.response_ids.view(count, length)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = torch.cat([
            model(torch.cat([torch.tensor([prompt]).expand(len(part), -1), part], 1)).logits[:, len(prompt) - 1 : -1]
            for part in responses.split(500)
        ])  # fmt: skip
    log_probs = (logits / TEMPERATURE).log_softmax(-1)
    own = log_probs.gather(-1, responses[..., None]).squeeze(-1)
    torch.testing.assert_close(samples.log_probs.view(count, length), own, atol=1e-3, rtol=0)
    # Each token's place in its distribution, given what is before it: uniform, if it was sampled from that.
    below = (log_probs.double().exp().cumsum(-1).gather(-1, responses[..., None]).squeeze(-1)) - own.double().exp()
    place = below + own.double().exp() * torch.rand(count, length, generator=torch.Generator().manual_seed(0)).double()
    for position in (0, 1, 9):
        assert chisquare(torch.histc(place[:, position].float(), 20, 0, 1)).pvalue > 1e-4, position


def test_drafts_are_made_up_to_the_number_of_sequences_for_which_they_pay(monkeypatch):
    from grpo_rl.engines.vllm import drafts

    # A forward takes as long as 30 tokens, and longer with each: if half of 4 are kept, 5 b + 30 < 3 (b + 30) until 30.
    monkeypatch.setattr(drafts.DraftMeter, "_forward_s", lambda self, tokens: 30 + tokens)
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4), max_num_reqs=64, max_num_tokens=1000,
        propose_draft_token_ids=lambda scheduled, sampled: [[1, 2] for _ in sampled],
    )  # fmt: skip
    meter = drafts.DraftMeter(runner)
    assert meter.most_live == 16
    assert runner.propose_draft_token_ids(None, [[7]] * 16 + [[]]) == [[1, 2]] * 17
    assert runner.propose_draft_token_ids(None, [[7, 8]] * 17) == [[]] * 17
    assert meter.metrics() == {"drafts/tokens": 34, "drafts/accepted_fraction": 0.5, "drafts/most_live": 16}
    # Once a twentieth was kept of many, 5 b + 30 < 1.2 (b + 30) until 1.6; of all, < 5 (b + 30) for any number.
    for kept, most in ((100, 1), (2000, 64)):
        meter.drafted, meter.kept = 2000, kept
        assert meter.most_live == most


def test_drafts_reach_the_engine_which_refuses_models_that_carry_a_state(tmp_path, tiny_model):
    from grpo_rl.engines.vllm.engine import VLLMEngine

    settings = Settings.read(compose_config("grpo_gsm8k", ["inference_model.speculative=ngram", "mode=sync"]))
    cpu = (torch.device("cpu"),)
    options = vllm_options(settings, tiny_model, Devices(cpu, cpu, cpu))
    assert (options["speculative"], options["draft_tokens"]) == ("ngram", 4)
    save(*MODELS["convolution"][:2], tmp_path)
    with pytest.raises(ValueError, match="attention alone"):
        VLLMEngine(tmp_path, 64, speculative="ngram")
