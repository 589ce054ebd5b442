"""The divergence from a teacher over the full vocabulary equals the dense computation, in value and gradient."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM

from grpo_rl.data.batching import MicroBatching
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies import divergence
from grpo_rl.policies.before_loading import LoRA
from grpo_rl.policies.lora import add_adapters
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.policies.teachers import TaskTeachers
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings
from grpo_rl.training.micro_batches import scored_micro_batches
from tests.helpers import to_fp64
from tests.policies.test_exactness import SIZES, VOCAB, groups_of, plain_distributions

GROUPS = groups_of([(5, [3, 2, 0, 3]), (1, [4, 7]), (9, [1, 1]), (20, [17, 33])])
STUDENTS = {
    "tied": (LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "untied": (Qwen2ForCausalLM, {}),
    "soft cap": (Gemma2ForCausalLM, dict(sliding_window=4, final_logit_softcapping=3.0)),
}
LARGER = dict(hidden_size=96, num_hidden_layers=1, vocab_size=VOCAB + 14)
"""A teacher of other sizes, its vocabulary padded."""


def make(model_class, seed, **config):
    torch.manual_seed(seed)
    return to_fp64(model_class(model_class.config_class(**SIZES | config)))


def compared(policy, groups):
    """The divergence of each token, as training computes it."""
    return policy.score(groups, policy.distillation[0].distributions(groups, policy.device))[2]


def dense(kind, log_p, log_q):
    """The divergence by its definition, from probabilities."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "reverse":
        return (p * (p / q).log()).sum(-1)
    if kind == "forward":
        return (q * (q / p).log()).sum(-1)
    m = (p + q) / 2
    return ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize("kind", divergence.DIVERGENCES)
def test_value_and_gradient_equal_the_dense_computation_in_any_tiles(kind, student, monkeypatch):
    model_class, config = STUDENTS[student]
    (model, plain), teacher = (make(model_class, 0, **config) for _ in range(2)), make(LlamaForCausalLM, 1, **LARGER)
    log_q = plain_distributions(make(LlamaForCausalLM, 1, **LARGER), GROUPS, 0.7)[:, :VOCAB].log_softmax(-1).detach()
    expected = dense(kind, plain_distributions(plain, GROUPS, 0.7), log_q)
    weights = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
    (weights * expected).sum().backward()
    policy = TrainPolicy(model, 0.7)
    policy.distillation = ReferencePolicy(teacher, 0.7), kind
    for rows in (3, 10**6):
        monkeypatch.setitem(divergence.TILE_LOGITS, "cpu", rows * VOCAB)
        model.zero_grad()
        found = compared(policy, GROUPS)
        (weights * found).sum().backward()
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-9)
        for (name, parameter), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, theirs.grad, rtol=0, atol=1e-9, msg=name)
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["base", "teacher"])
def test_adapters_learn_from_their_base_or_another_teacher_by_the_loss(own):
    model = add_adapters(make(LlamaForCausalLM, 0), LoRA(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    policy = TrainPolicy(model, 1.0)
    reference = ReferencePolicy(model if own else make(LlamaForCausalLM, 1), 1.0)
    policy.distillation = reference, "reverse"
    groups = [group.with_advantages(torch.zeros(group.size)) for group in GROUPS]
    loss, total = GRPOLoss(surrogate="none", kl="reverse", kl_coef=1.0, aggregate="token_mean"), 0.0
    for tokens in scored_micro_batches(policy, groups, MicroBatching(30, aggregate="token_mean")):
        out = loss(tokens)
        out["loss"].backward()
        total += out["loss"].item()
    log_q = plain_distributions(make(LlamaForCausalLM, 0 if own else 1), GROUPS, 1.0)
    merged = plain_distributions(model, GROUPS, 1.0)
    assert total == pytest.approx(dense("reverse", merged, log_q).mean().item(), abs=1e-9) and total > 0.01
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.slow
def test_each_task_of_a_mixture_is_compared_with_its_own_teacher():
    policy, references = TrainPolicy(make(LlamaForCausalLM, 0), 1.0), {}
    for name, seed in (("a", 1), ("b", 2)):
        references[name] = ReferencePolicy(make(LlamaForCausalLM, seed), 1.0)
    tasks = {"a": [0, 2], "b": [1, 3], "c": []}
    teachers = TaskTeachers(references, lambda groups: tasks)
    policy.distillation, found = (teachers, "reverse"), teachers.add_log_probs(GROUPS, 64)
    mixed = compared(policy, GROUPS).split([len(group.response_ids) for group in GROUPS])
    for name, own in tasks.items():
        for i in own:
            policy.distillation = references[name], "reverse"
            torch.testing.assert_close(mixed[i], compared(policy, [GROUPS[i]]), rtol=0, atol=1e-9)
            [alone] = references[name].add_log_probs([GROUPS[i]], 64)
            torch.testing.assert_close(found[i].ref_log_probs, alone.ref_log_probs, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_teacher_that_reads_more_of_the_question_is_compared_at_the_same_responses():
    policy, reference = (kind(make(LlamaForCausalLM, 0), 1.0) for kind in (TrainPolicy, ReferencePolicy))
    hint = torch.tensor([7, 8, 9])
    reference.reads = lambda group: replace(group, prompt_ids=torch.cat([group.prompt_ids, hint]))
    policy.distillation = reference, "forward"
    log_q = plain_distributions(make(LlamaForCausalLM, 0), [reference.reads(group) for group in GROUPS], 1.0)
    expected = dense("forward", plain_distributions(make(LlamaForCausalLM, 0), GROUPS, 1.0), log_q)
    torch.testing.assert_close(compared(policy, GROUPS), expected, rtol=0, atol=1e-9)
    assert expected.min() > 1e-3
    # A reference's routers choose by themselves, also for the tokens that it alone reads.
    routed = [
        replace(group, routes=group.response_ids[:, None, None], prompt_routes=group.prompt_ids[:, None, None])
        for group in GROUPS
    ]
    scored = torch.cat([group.ref_log_probs for group in reference.add_log_probs(routed, 64)])
    ids = torch.cat([group.response_ids for group in GROUPS])
    torch.testing.assert_close(scored, log_q.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-9)


REFUSED = [
    (["ref_model.top=5"], "ref_model.top is read by loss.kl"),
    (["ref_model.name=http://127.0.0.1:9/v1", "sampling.temperature=0.7"], "sampling.temperature=1"),
    (["ref_model.name=http://127.0.0.1:9/v1", "sampling.top_p=0.9"], "top_p, top_k and min_p"),
    (["ref_model.name=http://127.0.0.1:9/v1", "loss.kl=reverse"], "set ref_model.top=20"),
    (["ref_model.name=http://127.0.0.1:9/v1", "ref_model.refresh=average"], "leave ref_model.refresh"),
    (["ref_model.hint=right"], "a text with {gold} in it"),
    (["loss.kl=forward", "train_model.parallel=fsdp", "train_model.num_devices=2"], "parallel=ddp"),
    (["env.mixture={gsm8k: {weight: 1, teacher: a/b}, math: 1}"], "env.mixture.math has no teacher"),
    (["loss=maxrl", "loss.kl_in=reward", "loss.kl=k1"], "takes no negative rewards"),
    (["loss=clip_cov", "loss.covariance_low=5"], "no token is between"),
    (["loss.turn_credit=1", "loss=gspo"], "can't go with loss.ratio=sequence"),
    (["loss.turn_credit=1", "loss=gpg"], "none of each group by itself"),
    (["inference_model.speculative=ngram", "sampling.top_p=0.9"], "leave top_p, top_k and min_p out"),
    (["inference_model.speculative=ngram", "inference_model.engine=transformers"], "needs inference_model.engine=vllm"),
    (["policy.target_entropy=0.5", "policy.entropy_coef=1.5"], "entropy_coef_max"),
]


@pytest.mark.parametrize(("overrides", "why"), REFUSED)
def test_settings_that_contradict_each_other_are_refused(overrides, why):
    with pytest.raises(ValueError, match=why):
        Settings.read(compose_config("grpo_gsm8k", ["mode=sync", "policy.kl_coef=0.1", *overrides]))


def test_tokens_that_a_model_masks_out_count_nothing():
    log_p = torch.tensor([[0.25, 0.75, 0.0]]).log().requires_grad_()
    log_q = torch.tensor([[0.5, 0.5, 0.0]]).log()
    for kind, function in divergence.DIVERGENCES.items():
        value = function(log_p, log_q)
        torch.testing.assert_close(value, dense(kind, log_p[:, :2], log_q[:, :2]))
        (gradient,) = torch.autograd.grad(value, log_p)
        assert gradient.isfinite().all(), kind
