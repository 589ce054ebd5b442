from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from grpo_rl.losses.grpo import LOSSES, METRIC_SUMS
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.training.optimizer import StepResult


def micro_batch(log_prob, trainable, **sums):
    tokens = {"log_prob": log_prob, "sampler_log_prob": [-1.0] * len(log_prob), "trainable": trainable}
    losses = dict.fromkeys((*LOSSES, *METRIC_SUMS), 0.0) | {"ratio": 1.0, "ratio_squared": 1.0} | sums
    return (
        TensorDict({name: torch.tensor(value) for name, value in tokens.items()}, batch_size=[len(log_prob)]),
        TensorDict({name: torch.tensor(value) for name, value in losses.items()}),
    )


def test_means_are_over_tokens_and_losses_over_optimizer_steps():
    record = StepRecord()
    record.add(*micro_batch([-1.0], [True], tokens=1.0, entropy=3.0, loss_objective=1.0))
    record.add(*micro_batch([-1.0] * 3, [True] * 3, tokens=3.0, entropy=1.0, loss_objective=2.0))
    record.complete()
    record.add_result(StepResult(grad_norm=2.0, lr=0.1, skipped=False))
    # Six tokens, of which a tool wrote two.
    record.add(*micro_batch([-1.0] * 6, [True] * 4 + [False] * 2, tokens=4.0, entropy=4.0, loss_objective=3.0))
    record.complete()
    record.add_result(StepResult(grad_norm=4.0, lr=0.2, skipped=False))
    metrics = record.metrics(sampled_tokens=0, step_s=1.0)
    assert metrics["entropy"] == (3 + 1 + 4) / (1 + 3 + 4)
    assert metrics["loss/objective"] == metrics["loss/total"] == (1 + 2 + 3) / 2
    assert (metrics["grad_norm"], metrics["lr"]) == (3.0, 0.2)


def test_correction_weights_are_told_by_mean_share_at_a_bound_and_effective_sample_size():
    # Weights 2, 2, 1, 0: mean 5/4, three of four at a bound, and 5^2 / (4 * 9) of the tokens' worth.
    record = StepRecord()
    record.add(*micro_batch([-1.0] * 2, [True] * 2, tokens=2.0, correction=4.0, correction_squared=8.0, corrected=2))
    record.add(*micro_batch([-1.0] * 2, [True] * 2, tokens=2.0, correction=1.0, correction_squared=1.0, corrected=1))
    record.complete()
    metrics = record.metrics(sampled_tokens=0, step_s=1.0)
    assert (metrics["correction/mean"], metrics["correction/bounded_fraction"]) == (1.25, 0.75)
    assert metrics["correction/ess"] == pytest.approx(25 / 36)


def test_micro_batches_of_a_step_that_begins_again_do_not_count():
    record = StepRecord()
    record.add(*micro_batch([-1.0] * 8, [True] * 8, tokens=8.0, loss_objective=5.0))
    record.begin_again()
    for _ in range(2):
        record.add(*micro_batch([-1.0] * 4, [True] * 4, tokens=4.0, loss_objective=1.0))
    record.complete()
    record.add_result(StepResult(grad_norm=1.0, lr=0.1, skipped=False))
    metrics = record.metrics(sampled_tokens=0, step_s=1.0)
    assert (metrics["train/micro_batches"], metrics["train/out_of_memory"], metrics["loss/objective"]) == (2, 1, 2.0)
    assert metrics["train/micro_batch_tokens"] == 4.0


@pytest.mark.parametrize("ranks", [None, SimpleNamespace(gather=lambda mine: [mine])])
def test_each_micro_batch_is_a_sign_of_life_when_it_is_added_also_with_ranks(ranks):
    alive = []
    record = StepRecord(ranks, goes_on=lambda: alive.append(1))
    for added in (1, 2):
        record.add(*micro_batch([-1.0], [True], tokens=1.0))
        assert len(alive) == added
