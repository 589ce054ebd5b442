"""Cuts and ends of sampling, the same in every engine: kept sets, stop strings, end-of-sequence ids."""

import json
from dataclasses import replace
from itertools import product
from string import ascii_lowercase

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.engines.base import Sampling
from grpo_rl.engines.transformers import StopString, text_decoder
from grpo_rl.testing import save_tiny_model
from tests.engines.test_contract import engine_of

pytestmark = pytest.mark.slow

ENDS = (0, 5)
PAIRS = tuple(map("".join, product(ascii_lowercase, repeat=2)))
"""Stop strings of two tokens; about every hundredth token of a random model completes one."""
PROMPTS = [[5, 6, 7, 8], [9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer of bytes and two end-of-sequence ids."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(ENDS), "top_k": 7}))
    return folder


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request, folder):
    with engine_of(request.param, folder, 256, sampling=Sampling(top_k=3, stop=PAIRS)) as made:
        yield made


def defined(logits, sampling):
    """The kept set by the definition, one token's logits at a time: temperature, min-p, top-k, top-p."""
    p = (logits / sampling.temperature).softmax(-1)
    order = [i for i in p.argsort(descending=True).tolist() if p[i] >= sampling.min_p * p.max()]
    order = order[: sampling.top_k or None]
    p, kept, mass = p / p[order].sum(), [], 0.0
    for token in order:  # until they have the mass; the one that reaches it is in
        kept.append(token)
        mass += p[token].item()
        if mass >= sampling.top_p:
            break
    return set(kept)


CUTS = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_token_comes_with_the_set_that_it_was_drawn_from(engine, folder, cut):
    sampling = replace(Sampling(max_new_tokens=12), **CUTS[cut])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps, alike = [], []
    for prompt, sample in zip(PROMPTS, engine.generate(PROMPTS, 4, sampling), strict=True):
        assert sample.kept is not None and len(sample.kept.counts) == len(sample.response_ids)
        sets = iter(sample.kept.ids.split(sample.kept.counts.tolist()))
        log_probs = iter(sample.log_probs.tolist())
        for response in sample.responses:
            ids = torch.tensor([[*prompt, *response.tolist()]])
            for token, logits in zip(response.tolist(), model(ids).logits[0, len(prompt) - 1 : -1], strict=True):
                kept, expected = next(sets).tolist(), defined(logits, sampling)
                assert token in kept and len(set(kept)) == len(kept)
                alike.append(len(expected & set(kept)) / len(expected | set(kept)))
                restricted = (logits[kept] / sampling.temperature).log_softmax(-1)
                gaps.append(abs(next(log_probs) - restricted[kept.index(token)].item()))
    # The engine computes in bf16, which moves a border now and then; those of another order would be others throughout.
    assert sum(alike) / len(alike) > 0.93 and sum(gaps) / len(gaps) < 0.05


def test_where_nothing_is_cut_off_there_are_no_kept_sets(engine):
    (sample,) = engine.generate([PROMPTS[0]], 2, Sampling(max_new_tokens=4))
    assert sample.kept is None
    (greedy,) = engine.generate([PROMPTS[0]], 1, Sampling(temperature=0.0, top_k=2, max_new_tokens=4))
    assert greedy.kept is None and (greedy.log_probs < -1e-3).any(), "of the whole distribution, at temperature 1"


def test_requests_that_cut_and_others_may_be_under_way_together(engine):
    wide, narrow = Sampling(max_new_tokens=6, ignore_eos=True), Sampling(max_new_tokens=6, ignore_eos=True, top_k=2)
    for request, sampling in enumerate((wide, narrow, wide, replace(narrow, temperature=0.0))):
        engine.submit(request, PROMPTS[0], sampling)
    finished = {}
    while len(finished) < 4:
        finished |= dict(engine.step())
    assert [finished[i].kept is None for i in range(4)] == [True, False, True, True]
    assert finished[1].kept.counts.tolist() == [2] * 6


def test_a_response_ends_with_the_token_that_completes_a_stop_string(engine, folder):
    sampling = Sampling(temperature=2.0, max_new_tokens=150, stop=PAIRS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"stop": 0, "eos": 0, "length": 0}
    for sample in engine.generate(PROMPTS, 12, sampling):
        for response, truncated in zip(sample.responses, sample.truncated.tolist(), strict=True):
            text = tokenizer.decode(response, skip_special_tokens=True)
            before = tokenizer.decode(response[:-1], skip_special_tokens=True)
            assert not any(pair in before for pair in PAIRS)
            stopped = any(pair in text for pair in PAIRS)
            assert len(response) == 150 or stopped or response[-1].item() in ENDS
            assert truncated == (not stopped and response[-1].item() not in ENDS)
            ends["length" if truncated else "stop" if stopped else "eos"] += 1
    assert ends["stop"] > 3, ends


def test_every_end_of_sequence_id_of_the_generation_config_ends_a_response_or_none_of_them(engine):
    hot = Sampling(temperature=2.0, max_new_tokens=200)
    samples = engine.generate(PROMPTS, 16, hot)
    last = {int(r[-1]) for s in samples for r, cut in zip(s.responses, s.truncated.tolist(), strict=True) if not cut}
    assert last == set(ENDS)
    assert not any(id in r[:-1] for s in samples for r in s.responses for id in ENDS)
    for sample in engine.generate(PROMPTS, 8, replace(hot, ignore_eos=True)):
        assert sample.offsets.diff().eq(200).all() and sample.truncated.all()
        assert any(id in sample.response_ids for id in ENDS)


def test_where_top_k_is_the_whole_vocabulary_kept_sets_are_empty(engine, folder):
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    (sample,) = engine.generate([PROMPTS[0]], 2, Sampling(max_new_tokens=4, top_k=vocabulary))
    assert sample.kept.counts.tolist() == [0] * len(sample.response_ids)


def test_an_engine_on_a_gpu_that_returns_kept_sets_is_asked_in_the_terms_it_takes():
    """vLLM refuses requests without a top-k there, and greedy ones."""
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm.sampling import sampling_params

    nucleus = sampling_params(4, Sampling(top_p=0.9), ENDS, return_sampling_mask=True)
    assert nucleus.top_k > 10**6 and nucleus.top_p == 0.9 and nucleus.temperature == 1.0
    greedy = sampling_params(1, Sampling(temperature=0.0), ENDS, return_sampling_mask=True)
    assert (greedy.top_k, greedy.temperature, greedy.seed) == (1, 1.0, 0)
    plain = sampling_params(1, Sampling(temperature=0.0), ENDS)
    assert plain.temperature == 0 and plain.stop_token_ids == list(ENDS)
    assert plain.seed == 0  # vLLM would draw one on a GPU


def test_kept_sets_that_vllm_leaves_out_are_an_error_and_not_the_whole_distribution():
    pytest.importorskip("vllm")
    from types import SimpleNamespace as Namespace

    from grpo_rl.engines.vllm.sampling import samples_of

    response = Namespace(token_ids=[5, 6], logprobs=Namespace(logprobs=[-1.0, -2.0]), finish_reason="stop")
    for mask in (None, Namespace(token_ids=[[5, 9]])):
        response.sampling_mask = mask
        output = Namespace(outputs=[response])
        with pytest.raises(RuntimeError, match="did not return the kept sets"):
            samples_of(output, 0, Sampling(top_p=0.5), 10)
        assert samples_of(output, 0, Sampling(), 10).kept is None
        with pytest.raises(RuntimeError, match=r"vLLM \S+ did .*top_p=1.0, top_k=9 and min_p=0.0 .*start the engine"):
            samples_of(output, 0, Sampling(top_k=9), 10)
        for top_k in (10, 11):  # of ten tokens it cuts none off, and vLLM drops it
            kept = samples_of(output, 0, Sampling(top_k=top_k), 10).kept
            assert kept is not None and kept.counts.tolist() == [0, 0] and not len(kept.ids)


def test_a_stop_string_may_begin_within_a_token_and_end_within_another_or_be_a_special_one(folder):
    """In a tokenizer of bytes "é" is two tokens, and the text has it once the second is there."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("caféx")["input_ids"]
    stop = StopString(tokenizer.backend_tokenizer, [7], ["fé"])
    assert [stop.completed_by(i) for i in ids[:5]] == [False, False, False, False, True]
    special = StopString(text_decoder(folder), [5, 6], ["<end>"])
    assert [special.completed_by(token) for token in (7, 0)] == [False, True]
