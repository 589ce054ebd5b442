"""A served teacher gives the losses of the same teacher in the process; what a server may reply instead is refused."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.data.batching import MicroBatching
from grpo_rl.envs.rewards import json_client
from grpo_rl.envs.rewards.json_client import EndpointError
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.policies.served import ServedTeacher
from grpo_rl.testing import save_tiny_model
from grpo_rl.training.micro_batches import scored_micro_batches
from tests.chat_endpoint import ChatEndpoint
from tests.policies.test_exactness import groups_of

LENGTHS = [(5, [3, 2, 0, 3]), (1, [4, 7]), (9, [1, 1])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Policy and teacher: random models with one tokenizer."""
    return [
        save_tiny_model(tmp_path_factory.mktemp(name), seed=seed) for seed, name in enumerate(("policy", "teacher"))
    ]


class Server(ChatEndpoint):
    """`vllm serve`'s replies, of a model in the process: token ids in, each token's likeliest tokens out."""

    def __init__(self, folder, spoil=lambda reply: reply, fails=0):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.spoil, self.replies, self.models = spoil, [(503, {})] * fails, ["teacher"]
        self.respond = lambda asked: self.spoil(self.complete(asked))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @torch.no_grad()
    def complete(self, asked):
        ids, top = asked["prompt"], asked["prompt_logprobs"]
        log_p = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows = [None]
        for own, log_probs in zip(ids[1:], log_p, strict=False):
            tokens = {*log_probs.topk(top).indices.tolist(), own}
            decoded = {w: self.tokenizer.decode([w]) for w in tokens}
            rows.append({str(w): {"logprob": log_probs[w].item(), "decoded_token": decoded[w]} for w in tokens})
        return {"choices": [{"text": "", "prompt_logprobs": rows}]}


@pytest.fixture
def serve(folders):
    servers = []

    def start(**settings):
        servers.append(Server(folders[1], **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def loss_of(policy, groups, kl):
    """Loss and gradient of a step of distillation."""
    loss, total = GRPOLoss(surrogate="none", kl=kl, kl_coef=1.0, aggregate="token_mean"), 0.0
    policy.model.zero_grad()
    groups = [group.with_advantages(torch.zeros(group.size)) for group in groups]
    for tokens in scored_micro_batches(policy, groups, MicroBatching(20, aggregate="token_mean")):
        out = loss(tokens)
        out["loss"].backward()
        total += out["loss"].item()
    return total, torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["k3+", "reverse", "forward", "jensen_shannon"])
def test_a_served_teacher_gives_the_loss_and_gradient_of_one_in_the_process(folders, serve, kl):
    policy = TrainPolicy.load(folders[0], torch.float32)
    tokens = len(policy.model.get_input_embeddings().weight)
    groups = [replace(group, response_ids=group.response_ids % tokens) for group in groups_of(LENGTHS)]
    local = ReferencePolicy.load(folders[1], torch.float32)
    in_process = local.add_log_probs(groups, 64)
    policy.distillation = None if kl == "k3+" else (local, kl)
    expected = loss_of(policy, in_process, kl)
    server = serve(fails=1)
    # All tokens but one, which is the rest.
    teacher = ServedTeacher(
        server.url, AutoTokenizer.from_pretrained(folders[0]), tokens, 0 if kl == "k3+" else tokens - 1
    )
    served = teacher.add_log_probs(groups, 64)
    for ours, theirs in zip(served, in_process, strict=True):
        torch.testing.assert_close(ours.ref_log_probs, theirs.ref_log_probs, rtol=0, atol=1e-5)
    policy.distillation = None if kl == "k3+" else (teacher, kl)
    total, gradient = loss_of(policy, served, kl)
    assert total == pytest.approx(expected[0], abs=2e-5) and expected[0] > 0.01
    # The rest is 1 less a sum of 255 probabilities in fp32, 6e-8 off, and about 4e-3.
    torch.testing.assert_close(gradient, expected[1], rtol=0, atol=1e-4 * expected[1].abs().max().item())
    # Equal responses are sent once, an empty one never, and one request failed for now.
    distinct = {(*g.prompt_ids.tolist(), *ids.tolist()) for g in groups for ids in g.responses if len(ids)}
    assert len(server.bodies) == len(distinct) + 2  # one more at the start


def cut(reply):
    return {"choices": [{"prompt_logprobs": reply["choices"][0]["prompt_logprobs"][:-1]}]}


def few(reply):
    rows = reply["choices"][0]["prompt_logprobs"]
    return {"choices": [{"prompt_logprobs": [row and dict([max(row.items())]) for row in rows]}]}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda reply: [], "no prompt_logprobs"),
        (lambda reply: {"choices": [{"prompt_logprobs": None}]}, "no prompt_logprobs"),
        (cut, "in the place of"),
        (lambda reply: with_values(reply, logprob=math.nan), "no number from -10000 to 0"),
        (lambda reply: with_values(reply, logprob=3.0), "no number from -10000 to 0"),
        (lambda reply: with_values(reply, logprob="-1"), "no number from"),
        (lambda reply: with_values(reply, logprob=-1e38), "no number from"),
        (lambda reply: with_values(reply, logprob=-(10**400)), "no number from"),
        (few, "1 likeliest tokens, and 2 were asked for"),
        (lambda reply: with_values(reply, decoded_token="another"), "other vocabularies"),
    ],
)
def test_a_reply_without_log_probabilities_is_refused_in_one_line(folders, serve, spoil, why):
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    [group] = groups_of([(1, [2])])
    group = replace(group, response_ids=torch.tensor((ids * 2)[:2]))
    server = serve()
    teacher = ServedTeacher(server.url, tokenizer, 256, top=2)
    server.spoil = spoil
    with pytest.raises(EndpointError, match=why) as refusal:
        teacher.add_log_probs([group], 64)
    assert "\n" not in str(refusal.value)


def with_values(reply, **values):
    rows = [row and {w: entry | values for w, entry in row.items()} for row in reply["choices"][0]["prompt_logprobs"]]
    return {"choices": [{"prompt_logprobs": rows}]}


def test_a_server_that_is_not_there_or_serves_two_models_is_refused_at_the_start(folders, serve, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    monkeypatch.setattr(json_client, "FIRST_WAIT_S", 0.0)
    with pytest.raises(ValueError, match="failed in 6 tries"):
        ServedTeacher("http://127.0.0.1:9/v1", tokenizer, 256)
    with pytest.raises(ValueError, match="no prompt_logprobs"):
        ServedTeacher(serve(spoil=lambda reply: {"choices": [{}]}).url, tokenizer, 256)
    server = serve()
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match="serves a, b; give an endpoint with one"):
        ServedTeacher(server.url, tokenizer, 256)
