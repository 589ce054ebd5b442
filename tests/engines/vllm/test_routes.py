"""The experts that vLLM chooses are recorded, and replaying them takes away what they add to rounding."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace as Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.data.group import NO_ROUTE
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.policies.attention import use_shared_prefix
from grpo_rl.policies.policy import TrainPolicy
from tests.engines.test_contract import as_groups, engine_of

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="these are recorded on a CPU"),
]
LAYERS, EXPERTS, CHOSEN = 4, 16, 4
PROMPTS = [list(range(5, 80)), [3, 9, 4]]  # more than two blocks of the KV cache, and less than one
SAMPLING = Sampling(max_new_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random mixture of experts."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=200, hidden_size=64, num_hidden_layers=LAYERS, max_position_embeddings=128, eos_token_id=0)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=32, norm_topk_prob=True)
    config = Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(made := tmp_path_factory.mktemp("mixture"))
    return made


def own_choice(model, ids):
    """The experts that a plain forward of transformers chooses for each token, sorted, [tokens, layers, experts]."""
    chosen = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda router, args, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1).sort(-1).values


def groups_of(engine, n):
    """A group for each prompt; sampled all together, and then each response by itself."""
    together = engine.generate(PROMPTS, n, SAMPLING)
    for i in range(n):
        engine.submit(i, PROMPTS[1], SAMPLING)
    alone = {}
    while len(alone) < n:
        alone |= dict(engine.step())
    return as_groups(PROMPTS + n * PROMPTS[1:], [*together, *alone.values()])


def test_recorded_experts_are_those_of_a_plain_forward(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Few at a time: requests wait for others, whose blocks of the cache they then get.
    with engine_of("vllm", folder, 120, "float32", max_num_seqs=2, router_replay=True) as engine:
        tokens = 0
        for group in groups_of(engine, 5):
            assert group.prompt_routes.shape == (len(group.prompt_ids), LAYERS, CHOSEN)
            assert group.routes.shape == (len(group.response_ids), LAYERS, CHOSEN)
            for g, ids in enumerate(group.responses):
                own = own_choice(model, [*group.prompt_ids.tolist(), *ids.tolist()])
                routes = group.routes[group.offsets[g] : group.offsets[g + 1]]
                assert torch.equal(routes[:-1].long().sort(-1).values, own[len(group.prompt_ids) : -1])
                assert (routes[-1] == NO_ROUTE).all()
                assert torch.equal(group.prompt_routes.long().sort(-1).values, own[: len(group.prompt_ids)])
                tokens += len(ids)
        assert tokens > 300
        runner = engine._llm.llm_engine.model_executor.driver_worker.worker._routes
        assert not runner._finished  # all were asked for, none is kept
        engine.submit(0, PROMPTS[1], SAMPLING)
        engine.step()
        engine.abort()
        engine.generate(PROMPTS, 1, SAMPLING)
        assert not runner._finished


def test_replayed_experts_bring_the_trainer_closer_to_the_sampler(folder):
    with engine_of("vllm", folder, 120, router_replay=True) as engine:
        groups = groups_of(engine, 8)
    model = use_shared_prefix(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), router_replay=True)
    policy = TrainPolicy(model)
    sampled = torch.cat([group.log_probs for group in groups])
    with torch.no_grad():
        replayed = (policy.score(groups)[0] - sampled).abs()
        own = (policy.score([replace(group, routes=None, prompt_routes=None) for group in groups])[0] - sampled).abs()
    print(f"mean |sampler - trainer|: {own.mean():.4f} with the trainer's experts, {replayed.mean():.4f} replayed")
    print(f"largest: {own.max():.3f}, {replayed.max():.3f}")
    assert replayed.mean() < 0.7 * own.mean()


@pytest.mark.parametrize("end", ["cancelled", "aborted", "taken"])
def test_routes_that_nobody_takes_are_forgotten_behind_the_abort(end):
    """The request's caller may have been cancelled: vLLM then ends it itself, and says so to no one."""
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine

    calls = []

    class Core:
        errored = False

        async def generate(self, request, parameters, name, lora_request):
            try:
                if end == "cancelled":
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                calls.append("abort")
                raise
            logprobs, spans = Namespace(logprobs=[-1.0]), [Namespace(version="default", start=0, end=1)]
            reason = "abort" if end == "aborted" else "stop"
            response = Namespace(token_ids=[7], logprobs=logprobs, finish_reason=reason, weight_versions=spans)
            yield Namespace(outputs=[response], prompt_token_ids=[5])

        async def collective_rpc(self, method, args=()):
            calls.append((method, *args))
            rows = torch.zeros(2, 1, 2, dtype=torch.int8).numpy()
            return [[(rows.tobytes(), "int8", rows.shape)]] if method == "take_routes" else []

    engine = object.__new__(AsyncVLLMEngine)
    settings = dict(name="engine", deadline_s=5.0, max_model_len=9, _keep_cache=False, _recording=None, _adapter=None)
    vars(engine).update(settings, _llm=Core(), _records_routes=True, _forgetting=set(), _can_free=False)
    vars(engine).update(_arguments={}, _end_ids=(), _vocabulary=9)

    async def run():
        request = asyncio.ensure_future(engine.generate("r", [5], 1, Sampling()))
        await asyncio.sleep(0.05)
        if end == "cancelled":
            request.cancel()
        (result,) = await asyncio.gather(request, return_exceptions=True)
        await asyncio.gather(*engine._forgetting)
        return result

    result = asyncio.run(run())
    expected = {
        "cancelled": ["abort", ("forget_routes", ["r"])],
        "aborted": [("forget_routes", ["r"])],
        "taken": [("take_routes", "r", [2])],
    }
    assert calls == [("record_routes",), *expected[end]]
    if end == "taken":
        assert isinstance(result, Samples) and result.routes is not None and result.prompt_routes is not None
        assert result.routes.shape == result.prompt_routes.shape == (1, 1, 2)
    else:
        assert isinstance(result, asyncio.CancelledError if end == "cancelled" else RuntimeError)
