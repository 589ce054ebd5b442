"""NaN and infinity are planted in a tiny model's step, and have to be found: tensor, layer, group and prompt."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import run_script
from transformers import AutoTokenizer

from grpo_rl.data.batching import MicroBatching
from grpo_rl.diagnosis.nonfinite import locate_nonfinite
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.monitor.stored_tokens import read_step
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches
from grpo_rl.training.optimizer import NonFiniteError, PolicyOptimizer

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo.py"
BATCHING = MicroBatching(max_tokens=4096)
MARK = 200
"""A token that only group 2 has, in its prompt."""


def batch_of(policy):
    """Three groups whose sampler is the policy itself."""
    groups = [random_group(prompt=5, lengths=[3, 4], vocab=100, group_id=i, seed=i) for i in range(3)]
    groups[2] = replace(groups[2], prompt_ids=groups[2].prompt_ids.index_fill(0, torch.tensor([1]), MARK))
    with torch.no_grad():
        groups = [replace(g, log_probs=policy.score([g])[0]) for g in groups]
    return [g.with_advantages(torch.tensor([1.0, -1.0])) for g in groups]


class Step:
    """An optimizer step that does not succeed, and what is said of it."""

    def __init__(self, model, dtype=torch.float32, compile=False):
        self.policy = TrainPolicy.load(model, dtype, compile=compile)
        self.optimizer = PolicyOptimizer(self.policy.model, lr=1e-3)
        self.batch = batch_of(self.policy)

    def explain(self):
        return locate_nonfinite(
            self.policy, GRPOLoss(), self.optimizer, self.batch, BATCHING, lambda g: f"group {g.group_id}"
        )

    def take(self):
        finite = True
        for tokens in scored_micro_batches(self.policy, self.batch, BATCHING):
            loss = GRPOLoss()(tokens)["loss"]
            finite &= bool(loss.isfinite())
            loss.backward()
        return self.optimizer.step(finite, self.explain)

    def plant(self, path, change):
        """Changes what a module returns where the marked token stands."""
        ids = {}
        self.policy.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: ids.update(now=args[0]))

        def hook(_module, _args, output):
            marked = (ids["now"] == MARK)[..., None]
            return change(output, marked) if marked.any() else None

        self.policy.model.get_submodule(path).register_forward_hook(hook)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_layer_group_and_token_of_a_forward_pass_are_named(tiny_model, dtype, value):
    step = Step(tiny_model, dtype)
    step.plant("model.layers.0.mlp.down_proj", lambda out, marked: out.masked_fill(marked, value))
    trouble = step.take().trouble
    assert "the gradient is not finite, first seen in model.embed_tokens.weight" in trouble
    assert "It comes from group 2: log_prob of token 0 of response 0 is nan" in trouble
    assert "it first appears in the output of model.layers.0.mlp.down_proj." in trouble
    assert all(x.isfinite().all() for x in step.policy.model.parameters())


@pytest.mark.parametrize("path", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"])
def test_what_no_log_probability_shows_is_found_in_the_layer_nearest_to_the_loss(tiny_model, path):
    backward = "attn" in path

    def poison(output, marked):
        if not backward:  # a prompt's second token has no way to a response behind the last attention
            return output.masked_fill(marked, math.nan)
        output.register_hook(lambda gradient: gradient.masked_fill(marked, math.inf))

    step = Step(tiny_model)
    step.plant(path, poison)
    found = f"group 2: the loss is finite, and {'the gradient of ' * backward}the output of {path}"
    assert found in step.take().trouble


def test_a_wrong_number_of_the_sampler_is_named_by_its_own_name(tiny_model):
    for change, found in [
        (lambda x: x.index_fill(0, torch.tensor([4]), math.nan),  # the second token of the second response
         "sampler_log_prob of token 1 of response 1 is nan, which was not finite before it was scored"),
        (lambda x: x - 100,  # e^100 is not in fp32
         "loss_objective is inf, though every log-probability is finite (log-ratios from 100 to 100"),
    ]:  # fmt: skip
        step = Step(tiny_model)
        step.batch[1] = replace(step.batch[1], log_probs=change(step.batch[1].log_probs))
        assert f"group 1: {found}" in step.take().trouble


@pytest.mark.nightly
def test_inside_compiled_modules_too(tiny_model):
    step = Step(tiny_model, torch.bfloat16, compile=True)
    step.plant("model.layers.0.mlp.act_fn", lambda out, marked: out.masked_fill(marked, math.nan))
    assert "group 2: log_prob of token 0 of response 0 is nan" in (found := step.explain())
    assert found.endswith("in the output of model.layers.0.mlp.act_fn.")


def test_running_out_of_memory_over_it_does_not_hide_the_step_that_failed(tiny_model):
    step = Step(tiny_model)

    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    step.policy.model.get_submodule("model.layers.0.mlp").register_forward_hook(full)
    assert step.explain() == "Where it comes from could not be traced: out of memory."


def test_weights_that_were_broken_before_are_named(tiny_model):
    step = Step(tiny_model)
    with torch.no_grad():
        step.policy.model.get_submodule("model.layers.1.mlp").up_proj.weight[0, 0] = math.inf
    assert "Weights hold non-finite numbers in model.layers.1.mlp.up_proj.weight" in step.take().trouble
    assert step.explain() == "The weights themselves hold it: model.layers.1.mlp.up_proj.weight, 1 in all."


def test_where_no_group_has_it_alone_that_is_said_and_no_trace_is_left(tiny_model):
    step, other = Step(tiny_model), Step(tiny_model)
    assert step.explain().startswith("None of the 3 groups has it by itself")
    assert not any(module._forward_hooks for module in step.policy.model.modules())
    assert step.take().grad_norm == other.take().grad_norm
    ours, theirs = step.policy.model.parameters(), other.policy.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_script_names_the_question_at_once_and_stops_where_it_goes_on(
    tiny_model, tiny_run, tmp_path, monkeypatch, capsys
):
    rows = [{"question": f"How much is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (three,) = AutoTokenizer.from_pretrained(tiny_model)("3", add_special_tokens=False)["input_ids"]
    scored = TrainPolicy.score

    def broken(policy, groups):
        log_prob, entropy = scored(policy, groups)
        bad = torch.cat([torch.full((len(g.response_ids),), three in g.prompt_ids) for g in groups])
        return torch.where(bad, math.nan, log_prob), entropy

    monkeypatch.setattr(TrainPolicy, "score", broken)
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    overrides = [
        *tiny_run, f"model.name={tiny_model}", f"env.path={tmp_path / 'train.jsonl'}", "train.optim_batch_size=16",
        "train.total_dialog_turns=160", "train.max_bad_steps=2", "policy.entropy_coef=0.01", "train.lineage=true",
        "train.micro_batch_tokens=8192",
    ]  # fmt: skip
    message = r"2 steps in a row: .*row 3, 'How much is 3 \+ 3\?'\): log_prob of token 0"
    with pytest.raises(NonFiniteError, match=message):
        run_script(SCRIPT, overrides, tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("An optimizer step of step 1 is left out: ") == 1 and "How much is 3 + 3?" in said
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]
    # The step that stopped the run has its lineage too, in which NaN is a number and null is not.
    stored = read_step(tmp_path / "run", 2)
    (update,) = stored.updates
    nan = {i for i, (log_prob, _) in update.scored.items() if log_prob.isnan().any()}
    assert {group.row for group in stored.groups if group.group_id in nan} == {3}
    assert len(update.scored) == len(stored.groups) == 4
