"""Distillation: the KL to a teacher on the policy's own tokens is the whole loss."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from grpo_rl.assembly.training import make_loss, make_reference, with_hint
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.ifeval.task import IFEval
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import random_group

TEACHER = ["loss=distill", "policy.kl_coef=1", "ref_model.name=teacher", "mode=sync"]


def test_the_reference_that_is_given_a_hint_reads_the_gold_answer_behind_the_question(tokenizer):
    env = LLMEnv(GSM8K([{"question": "2 + 3?", "answer": "#### 5"}]), tokenizer, 1, 2)
    prompt = env.next_prompts()[0].ids
    group = replace(random_group(lengths=[2, 3], group_id=0), row=0, prompt_ids=prompt)
    hinted = with_hint(env, "The answer is {gold}.", group)
    read, plain = tokenizer.decode(hinted.prompt_ids), tokenizer.decode(prompt)
    assert read == plain.replace("2 + 3?", "2 + 3?\n\nThe answer is 5.") and read != plain
    assert torch.equal(hinted.response_ids, group.response_ids)


def test_a_hint_is_refused_where_no_row_has_a_gold_answer():
    settings = Settings.read(compose_config("grpo_ifeval", [*TEACHER, "ref_model.hint='is {gold}'"]))
    env = SimpleNamespace(task=IFEval([]))
    with pytest.raises(ValueError, match="no row of ifeval has one"):
        make_reference(settings, None, None, None, env)


def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher():
    # Each token of a vocabulary of four, weighed by its probability: the mean over infinitely many samples.
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.0, -0.5, 0.2], dtype=torch.float64).log_softmax(0)
    log_prob = logits.log_softmax(0)
    tokens = TensorDict(
        log_prob=log_prob,
        entropy=torch.ones(4, dtype=torch.float64),
        sampler_log_prob=log_prob.detach(),
        ref_log_prob=teacher,
        advantage=torch.tensor([5.0, -5.0, 1.0, 3.0], dtype=torch.float64),  # rewards have no part in it
        trainable=torch.ones(4, dtype=torch.bool),
        weight=log_prob.detach().exp(),
        batch_size=[4],
    )
    out = make_loss(Settings.read(compose_config("grpo_gsm8k", TEACHER)))(tokens)
    (gradient,) = torch.autograd.grad(out["loss"], logits, retain_graph=True)
    kl = (log_prob.exp() * (log_prob - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(out["loss"], kl, rtol=0, atol=1e-12)  # and the value is the KL
    assert out["loss_objective"] == 0
