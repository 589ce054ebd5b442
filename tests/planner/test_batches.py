"""The plan of batches against what the parts of a run do with the same config, and where a division breaks."""

import io

import pytest
from rich.console import Console

from grpo_rl.data.batching import micro_batches
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.planner.batches import equal_micro_batches, plan_batches
from grpo_rl.planner.drawing import COLUMNS, picture
from grpo_rl.settings.compose import FOLDER, compose_config
from grpo_rl.settings.derived import IndivisibleBatchError, indivisible_batches
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import random_group

pytestmark = pytest.mark.slow

CONFIGS = sorted(path.stem for path in FOLDER.glob("grpo_*.yaml"))


def config(*overrides):
    return Settings.read(compose_config("grpo_gsm8k", overrides), divides=False)


def drawn(plan, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(plan, "a title"))
    return console.export_text()


def plan_of(*overrides, **lengths):
    return plan_batches(config(*overrides), **lengths)


def test_the_default_config_is_reported_in_its_numbers():
    # 4 prompts x 8 responses; a group is 128 + 8 x 256 = 2176 tokens, so 8192 hold three of the step's four groups, and
    # balanced micro-batches hold two each. 100,000 / 32 = 3125.
    plan = plan_of()
    assert (plan.responses, plan.batches, plan.batch_groups, plan.group_tokens) == (32, 1, 4, 2176)
    assert plan.micro_batches == (2, 2)
    assert (plan.collections, plan.optimizer_steps) == (3125, 3125)
    text = " ".join(drawn(plan).split())
    for sentence in (
        "1 optimizer step of 32 responses (4 groups)",
        "3,125 collections, 3,125 optimizer steps, 100,000 responses",
        "sample 32 → step 1 → push weights",
    ):
        assert sentence in text


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        (  # 64 responses a collection: 2 for 100 responses, each with 2 steps of 32 responses in each of 2 epochs
            ["env.num_envs=8", "train.epochs=2", "train.total_dialog_turns=100", "train.gradient_accumulation_steps=4"],
            [
                "2 optimizer steps of 32 responses (4 groups), in each of 2 epochs",
                "2 collections, 8 optimizer steps, 128 responses (100 rounded up)",
                "exactly 4 micro-batches",
                "sample 64 → steps 1 to 2 → steps 3 to 4 → push weights",
            ],
        ),
        (  # 128 + 32 x 256 = 8320 tokens, and 8192 are allowed
            ["env.repeats=32", "train.optim_batch_size=128"],
            ["a group is never split: 32 responses take 8,320 tokens, more than train.micro_batch_tokens"],
        ),
        (
            ["train.max_resamples=2"],
            [
                "at most 3,125 collections, 3,125 optimizer steps: 100,000 responses or a few more",
                "sample 32 or more → step 1",
            ],
        ),
        (
            ["train.epochs=2", "loss=tis", "policy.kl_coef=0.1"],
            ["sample 32 → score reference → score policy → step 1 → step 2"],
        ),
        (["loss=tis"], ["sample 32 → step 1"]),  # one optimizer step has them when it is trained on
        (["train_model.devices=[1]", "inference_model.devices=[0]"], ["cuda:1 trains", "cuda:0 samples"]),
    ],
)
def test_what_a_config_changes_is_drawn(overrides, sentences):
    text = " ".join(drawn(plan_of(*overrides, gpus=2)).split())
    for sentence in sentences:
        assert sentence in text


def test_the_plan_is_what_the_buffer_hands_out():
    plan = plan_of("env.num_envs=12", "env.repeats=4", "train.optim_batch_size=16", "train.epochs=3")
    buffer = GroupBuffer(plan.prompts, plan.batch_groups)
    buffer.extend([random_group(lengths=[1] * 4, group_id=i) for i in range(12)])
    batches = list(buffer.batches(plan.epochs))
    assert len(batches) == plan.optimizer_steps / plan.collections == 9
    assert {sum(group.size for group in batch) for batch in batches} == {plan.batch_responses}


@pytest.mark.parametrize("count", [None, 1, 3, 9])
def test_micro_batches_of_equal_groups_are_those_of_a_run(count):
    groups = [random_group(prompt=3, lengths=[4, 4], group_id=i, seed=i) for i in range(7)]
    for budget in (5, 11, 23, 40, 100):
        split = micro_batches(groups, budget, count and min(count, 7))
        assert equal_micro_batches(7, 11, budget, count) == tuple(len(groups) for groups in split)


@pytest.mark.parametrize("name", [*CONFIGS, "40 x 3", "1 x 500"])
def test_every_config_and_size_is_drawn_within_eighty_columns(name):
    of_ones_own = {
        "grpo_agent": ["env.command=agent", "env.scorer=gsm8k"],
        "grpo_prompt_response": ["env.reward=grpo_rl.envs.rewards.examples:reward_len"],
        "40 x 3": ["env.num_envs=40", "env.repeats=3", "train.optim_batch_size=120", "train.epochs=12"],
        "1 x 500": ["env.num_envs=1", "env.repeats=500", "train.optim_batch_size=500", "policy.kl_coef=0.1"],
    }
    cfg = compose_config(name if name in CONFIGS else "grpo_gsm8k", of_ones_own.get(name, []))
    plan = plan_batches(Settings.read(cfg), gpus=8)
    lines = drawn(plan).splitlines()
    assert not plan.errors and len(lines) < 60
    assert max(map(len, lines)) <= COLUMNS < 80


WRONG = {
    "cut": (["train.optim_batch_size=20"], {"train.optim_batch_size": (16, 32), "env.repeats": (5, 10)}),
    "left_over": (
        ["env.num_envs=3", "train.optim_batch_size=16"],
        {"train.optim_batch_size": (8, 24), "env.num_envs": (2, 4)},
    ),
    "more_than_there_is": (["train.optim_batch_size=64"], {"train.optim_batch_size": (32,), "env.num_envs": (8,)}),
    "smaller_than_a_group": (["train.optim_batch_size=4"], {"train.optim_batch_size": (8,), "env.repeats": (4,)}),
    "micro_batches": (["train.gradient_accumulation_steps=9"], {"train.gradient_accumulation_steps": (4,)}),
    "run": (["train.total_dialog_turns=9"], {"train.total_dialog_turns": (32,)}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("overrides", "fits"), WRONG.values(), ids=WRONG)
def test_a_wrong_division_names_the_nearest_values_that_fit(overrides, fits):
    (error,) = indivisible_batches(config(*overrides))
    assert error.fits == fits
    assert error.remedy in " ".join(drawn(plan_of(*overrides)).split())
    with pytest.raises(IndivisibleBatchError) as raised:
        Settings.read(compose_config("grpo_gsm8k", overrides))
    assert str(raised.value) == str(error) and error.remedy in str(error)
    for key, values in error.fits.items():
        for value in values:
            others = [word for word in overrides if not word.startswith(f"{key}=")]
            Settings.read(compose_config("grpo_gsm8k", [*others, f"{key}={value}"]))


def test_lengths_can_be_given_and_must_fit_into_the_context():
    assert plan_of(prompt_tokens=10, response_tokens=20).group_tokens == 170
    assert not plan_of("train.micro_batch_tokens=2176").over_budget  # 128 + 8 x 256
    assert plan_of("train.micro_batch_tokens=2175").over_budget
    with pytest.raises(ValueError, match="a prompt of 1000 tokens and a response of 256 do not fit into .*=1024"):
        plan_of(prompt_tokens=1000)
