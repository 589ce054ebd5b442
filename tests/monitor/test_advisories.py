"""Advisories: each planted trouble is reported once, with step and setting, and nothing of healthy runs."""

import math
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_rl.monitor.advisories import PAGE, RULES, SETTING, WINDOW, Advisories, History
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.run.logs import RunLogs
from grpo_rl.settings.sections import Logger, Train, declarations

ROOT = Path(__file__).parents[2]
GROUPS, SIZE = 16, 8
SETTINGS = {key: setting.default for key, setting in declarations("gsm8k").items()}
SETTINGS |= {"env.num_envs": GROUPS, "env.repeats": SIZE, "optimizer.lr": 5e-5, "policy.kl_coef": 0.02}
FROM = 21
"""The step at which a planted trouble begins, if it does not last from the first step on."""


def advisories_of(rows, config):
    return list(Advisories(config, rows).raised.values())


def facts(**changed):
    return SETTINGS | {name.replace("__", "."): value for name, value in changed.items()}


def healthy(steps=60, seed=0, groups=GROUPS):
    """Lines of a run that learns: rewards are drawn response by response, the rest scatters as in real runs."""
    rng = random.Random(seed)
    speed, ends_at = rng.uniform(8, 40), rng.uniform(0.5, 0.85)
    cut, calm = rng.uniform(0, 0.6), rng.uniform(0.15, 0.8)
    rows = []
    for step in range(1, steps + 1):
        learned = 1 - math.exp(-step / speed)
        chance = 0.1 + (ends_at - 0.1) * learned
        rewards = []
        for _ in range(groups):  # prompts differ in how hard they are, so that responses to one resemble each other
            of_prompt = rng.betavariate(2 * chance, 2 * (1 - chance))
            rewards.append([float(rng.random() < of_prompt) for _ in range(SIZE)])
        flat = [reward for group in rewards for reward in group]
        mean = sum(flat) / len(flat)
        truncated = sum(rng.random() < cut * (1 - learned) for _ in flat) / len(flat)
        entropy = (1.5 - (1.5 - calm) * learned) * rng.uniform(0.9, 1.1)
        rows.append(
            {
                "step": step,
                "reward/mean": mean,
                "reward/std": math.sqrt(mean * (1 - mean)),
                "reward/zero_std_fraction": sum(len(set(group)) == 1 for group in rewards) / groups,
                "response/mean_length": 120 * (1 - 0.3 * learned) * rng.uniform(0.9, 1.1),
                "response/truncated_fraction": truncated,
                "response/repetition": rng.uniform(0, 0.02),
                "response/length_correlation": rng.uniform(-0.4, 0.2),
                "entropy": entropy,
                "grad_norm": rng.lognormvariate(0, 0.4),
                "lr": 5e-5,
                "kl/sampler": rng.lognormvariate(-6, 0.4),
                "kl/ref": 0.08 * learned * rng.lognormvariate(0, 0.4),
                "clip/low_fraction": 0.0,  # always 0 with one optimizer step a collection
                "clip/high_fraction": 0.0,
                "ess": rng.uniform(0.97, 1.0),
                "mismatch/mean": 0.035 * rng.lognormvariate(0, 0.25),
                "time/sample_s": rng.uniform(3, 5),
                "time/train_s": rng.uniform(2, 4),
                "time/sync_s": 0.2,
                "time/other_s": 0.1,
                "time/at_s": 40.0 + 8 * step,  # the run's clock, and an evaluation now and then
                **({"time/evaluate_s": 30.0} if step % 3 == 0 else {}),
                "train/optimizer_steps": 1,
                "train/micro_batches": 2,
                "train/micro_batch_tokens": 7000.0,
                "optimizer/skipped_steps": int(step > 5),
                "memory/peak_gib": 60.0 + rng.uniform(0, 4),
                "memory/limit_gib": 79.2,
            }
        )
    return rows


def plant(since=FROM, until=10**9, steps=60, seed=0, **metrics):
    """The healthy run, with metrics of other values (numbers, or functions of the step) from a step on."""
    rows = healthy(steps, seed)
    for row in rows:
        if since <= row["step"] <= until:
            values = {name: value(row["step"]) if callable(value) else value for name, value in metrics.items()}
            row |= {name.replace("__", "/"): value for name, value in values.items()}
    return rows


def noisy(value, share=0.03):
    rng = random.Random(1)
    return lambda step: value * (1 + rng.uniform(-share, share))


NO_REWARD = {"reward__mean": 0.0, "reward__std": 0.0, "reward__zero_std_fraction": 1.0, "grad_norm": 0.0}
SICK = {
    "cut_off": (plant(1, response__truncated_fraction=noisy(0.95)), {}, 1, "sampling.max_new_tokens (now 256)"),
    "cut_off, so that nothing is learned": (
        plant(1, response__truncated_fraction=noisy(0.97), **NO_REWARD), {}, 1, "sampling.max_new_tokens (now 256)"
    ),
    "zero_rewards": (plant(1, **NO_REWARD), {}, 1, "env.examples"),
    "no_variance": (
        plant(1, reward__mean=0.5, reward__std=0.0, reward__zero_std_fraction=1.0, grad_norm=0.0), {}, 1, "env.reward"
    ),
    "no_variance since the reward rose": (
        plant(
            steps=FROM + 6, reward__mean=noisy(0.9), reward__std=noisy(0.3), reward__zero_std_fraction=noisy(0.98, 0.02)
        ),
        {}, FROM, "a higher train.max_resamples (now 0), such as 5",
    ),
    "no_variance at a collapsed entropy": (
        plant(
            steps=FROM + 6, reward__mean=noisy(0.9), reward__std=noisy(0.3), entropy=noisy(0.02),
            reward__zero_std_fraction=noisy(0.98, 0.02),
        ),
        {}, FROM, "a higher policy.entropy_coef (now 0), such as 0.001",
    ),
    "no_gradient": (plant(grad_norm=0.0), {"train__reward_clip": 0.1}, FROM, "train.reward_clip=null (now 0.1)"),
    "entropy_collapse": (
        plant(
            entropy=noisy(0.03), reward__mean=noisy(0.5), reward__std=noisy(0.5), reward__zero_std_fraction=noisy(0.9)
        ),
        {}, FROM, "a higher policy.entropy_coef (now 0), such as 0.001",
    ),
    "length_limit": (
        plant(
            response__mean_length=lambda step: 110 + 6 * (step - FROM),
            response__truncated_fraction=lambda step: min(0.02 * (step - FROM), 0.4),
        ),
        {}, None, "sampling.max_new_tokens (now 256)",
    ),
    "length_collapse": (
        plant(response__mean_length=noisy(12), reward__mean=noisy(0.08), reward__zero_std_fraction=noisy(0.3)),
        {}, FROM, "a lower optimizer.lr (now 5e-05)",
    ),
    "kl_runaway": (
        plant(kl__ref=lambda step: 0.08 * 1.15 ** (step - FROM), reward__mean=noisy(0.5)),
        {}, None, "a higher policy.kl_coef (now 0.02)",
    ),
    "kl_runaway beyond its target": (
        plant(kl__ref=lambda step: 0.01 * 1.1 ** (step - FROM)),
        {"policy__target_kl": 0.02}, None, "a higher policy.kl_coef (now 0.02)",
    ),
    "mismatch_rises": (plant(mismatch__mean=noisy(0.15)), {}, FROM, "loss.correction=truncate"),
    "off_policy": (
        plant(1, ess=noisy(0.35), clip__low_fraction=noisy(0.3), clip__high_fraction=noisy(0.1)),
        {"train__epochs": 4}, 1, "train.epochs=1 (now 4)",
    ),
    "unstable": (
        plant(
            reward__mean=noisy(0.05), reward__std=noisy(0.2), grad_norm=noisy(30), entropy=noisy(6),
            clip__high_fraction=noisy(0.3), reward__zero_std_fraction=noisy(0.7),
        ),
        {}, FROM, "a tenth of optimizer.lr (now 5e-05)",
    ),
    "unstable, ever more groups alike": (
        plant(
            1, reward__mean=lambda step: max(0.7 - 0.5 * step / 29, 0.2), reward__std=0.45,
            reward__zero_std_fraction=lambda step: min(0.1 + 0.75 * step / 29, 0.85),
        ),
        {}, None, "a tenth of optimizer.lr (now 5e-05)",
    ),
    "bad_steps": (
        plant(optimizer__skipped_steps=lambda step: 1 + (step - FROM + 3) // 3),
        {}, FROM, "a tenth of optimizer.lr (now 5e-05)",
    ),
    "scorers_fail": (
        plant(failed__timeout=lambda step: 4 * (step - FROM + 1)), {}, FROM, "env.score_timeout_s (now 60)"
    ),
    "trainer_waits": (plant(1, time__wait_s=noisy(20), time__sample_s=0.0), {}, 1, "train.max_staleness (now 2)"),
    "sampling_dominates": (plant(1, time__sample_s=noisy(60)), {"env__repeats": 4}, 1, "env.num_envs (now 16)"),
    "small_micro_batches": (
        plant(1, train__micro_batches=40, train__micro_batch_tokens=noisy(300)),
        {"train__micro_batch_tokens": 512}, 1, "train.micro_batch_tokens=8192 (now 512)",
    ),
    "memory_full": (
        plant(memory__peak_gib=noisy(77.5, 0.002)), {}, FROM, "train_model.gradient_checkpointing=true (now false)"
    ),
    "paid_for_length": (
        plant(response__mean_length=noisy(230), response__length_correlation=noisy(0.7)),
        {}, FROM, "env.rewards.soft_overlong_punishment",
    ),
    "repetition": (plant(response__repetition=noisy(0.5)), {}, FROM, "env.rewards.repetition_penalty"),
}  # fmt: skip


@pytest.mark.parametrize("trouble", SICK)
def test_a_planted_trouble_is_reported_alone_with_its_step_and_its_setting(trouble):
    rows, changed, since, setting = SICK[trouble]
    (advisory,) = advisories_of(rows, facts(**changed))
    assert advisory.name == re.split("[ ,]", trouble)[0] and advisory.until is None
    assert setting in advisory.setting and f", since step {advisory.since}: " in str(advisory)
    assert "\n" not in str(advisory)
    if since:  # the first of the steps that were judged together
        assert abs(advisory.since - since) < WINDOW
    else:  # it grows slowly, and is a trouble some time after it began
        assert FROM < advisory.since <= FROM + 25


def test_the_table_has_causes_first_settings_that_exist_sections_of_the_docs_and_is_planted_whole():
    held_out, order = {"held_out_falls", "held_out_loss_rises"}, list(RULES)  # these have their own tests below
    assert {re.split("[ ,]", trouble)[0] for trouble in SICK} | held_out == set(RULES)
    assert all(order.index(cause) < order.index(name) for name, rule in RULES.items() for cause in rule.causes)
    named = {name for rule in RULES.values() for name, _ in SETTING.findall(rule.remedy)} - {"completions.parquet"}
    assert named <= {".".join(key.split(".")[:2]) for key in declarations("gsm8k")}
    # Anchors as GitHub makes them: lower case, spaces to hyphens, other punctuation left out.
    text = re.sub(r"```.*?```", "", (ROOT / PAGE).read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert {rule.section for rule in RULES.values()} <= anchors
    assert {a.page for a in advisories_of(SICK["cut_off"][0], facts())} == {f"{PAGE}#responses-are-cut-off"}


def test_a_rule_that_fails_ends_the_advisories_and_no_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise KeyError("entropy")

    monkeypatch.setitem(RULES, "unstable", replace(RULES["unstable"], holds=broken))
    MetricsLog(tmp_path).log(1, {"reward/mean": 0.5})
    folder = SimpleNamespace(path=tmp_path, config={}, step=1, resumes=True, rank_zero=True)
    with RunLogs(folder, Logger(), Train(), total_steps=9) as logs:
        for step in (2, 3):
            for hook in logs.hooks:
                hook.on_log(SimpleNamespace(step=step, parts=SimpleNamespace(env=None)), {"reward/mean": 0.5}, ())
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("There are no advisories from step") == 1 and "KeyError: 'entropy'" in told


@pytest.mark.parametrize("name", ["quickstart", "quickstart_lora", "quickstart_async"])
def test_real_healthy_runs_hear_nothing(name):
    """SmolLM2-135M's runs: +1.08 held out in 15 steps, and rewards of 0.7 to 1.9 in 20 and in 16 steps."""
    rows = read_metrics(Path(__file__).parent / "healthy" / f"{name}.jsonl")
    small = {} if name == "quickstart" else {"env__num_envs": 6}
    of_quickstart = {"sampling__max_new_tokens": 24, "train__micro_batch_tokens": 4096, "policy__kl_coef": 0.0}
    assert len(rows) >= 16 and advisories_of(rows, facts(**of_quickstart, **small)) == []


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [4, 16])
def test_noisy_healthy_runs_hear_nothing(groups):
    told = {
        seed: found
        for seed in range(60)
        if (found := advisories_of(healthy(100, seed, groups), facts(env__num_envs=groups)))
    }
    assert told == {}


def test_an_epoch_of_noise_alone_is_no_trend():
    """A reward that goes nowhere for 1,000 steps: the best of many windows is high by chance."""
    rng, rows = random.Random(0), []
    for step in range(1, 1001):
        row = {"step": step, "reward/mean": sum(rng.random() < 0.3 for _ in range(32)) / 32, "reward/std": 0.46}
        row |= {"entropy": rng.lognormvariate(0, 0.5), "grad_norm": rng.lognormvariate(0, 1.5)}
        rows.append(row | {"reward/zero_std_fraction": 0.1})
    assert advisories_of(rows, facts(env__num_envs=4)) == []


def test_a_smoke_run_of_four_steps_hears_nothing():
    for rows, changed, *_ in SICK.values():
        assert advisories_of([row for row in rows if row["step"] <= 4], facts(**changed)) == []


def test_responses_that_are_meant_to_have_the_limits_length_are_not_cut_off():
    rows = plant(1, response__truncated_fraction=1.0)
    assert advisories_of(rows, facts(sampling__ignore_eos=True)) == []
    assert [a.name for a in advisories_of(rows, facts())] == ["cut_off"]


def test_what_gets_better_is_left_alone():
    rows = plant(1, response__truncated_fraction=lambda step: max(0.95 - 0.05 * step, 0.0))
    assert advisories_of(rows, facts()) == []
    rising = plant(reward__zero_std_fraction=noisy(0.92), reward__mean=lambda step: 0.4 + 0.01 * step)
    assert advisories_of(rising, facts()) == []


def test_an_advisory_ends_with_the_last_step_that_showed_it():
    rows = plant(21, 45, response__truncated_fraction=noisy(0.9))
    (advisory,) = advisories_of(rows, facts())
    assert abs(advisory.since - 21) < WINDOW and 45 <= advisory.until < 45 + WINDOW
    assert f", steps {advisory.since} to {advisory.until}: " in str(advisory)


def test_an_advisory_that_comes_back_goes_on_and_is_reported_once():
    rows = plant(1, 20, steps=90, response__truncated_fraction=noisy(0.9))
    for row in rows[60:]:
        row["response/truncated_fraction"] = 0.9
    advisories = Advisories(facts())
    told = [(row["step"], found.name) for row in rows for found in advisories.update(row)]
    assert told == [(5, "cut_off")]
    assert [(a.since, a.until) for a in advisories.raised.values()] == [(1, None)]


@pytest.mark.parametrize(
    ("evaluations", "found"),
    [
        ([(10, 1.0, 0.05), (20, 0.7, 0.05)], ["held_out_falls"]),  # 0.3 is 4.2 standard errors of 0.071
        ([(10, 1.0, 0.05), (20, 0.9, 0.05)], []),  # 1.4 standard errors
        ([(0, 1.0, 0.05), (30, 0.5, 0.05)], ["held_out_falls"]),  # below what it had before training
        ([(10, 0.5, 0.0), (20, 1.0, 0.0), (30, 0.9, 0.0)], ["held_out_falls"]),  # below its best, above its start
    ],
)
def test_a_held_out_reward_that_falls_while_training_rises(evaluations, found):
    def lines(training):
        for step in range(31):
            yield from [{"step": step, "reward/mean": training(step), "reward/std": 0.5}] if step else []
            for at_step, reward, error in evaluations:
                if step == at_step:
                    yield {"step": step, "eval/reward": reward, "eval/standard_error": error}

    assert [a.name for a in advisories_of(lines(lambda step: step / 10), facts())] == found
    assert advisories_of(lines(lambda step: 3 - step / 300), facts()) == []  # both fall: another trouble


def imitation(held_out):
    """Lines of SFT whose loss falls, with evaluations at some steps, the first and the last by themselves."""
    rng = random.Random(0)
    for step in range(31):
        row = {"step": step, "loss/sft": 2 * 0.95**step * rng.uniform(0.9, 1.1), "grad_norm": 1.0, "entropy": 1.0}
        row |= {"optimizer/skipped_steps": 0, "train/epoch": step / 10, "time/read_s": 0.1, "time/train_s": 2.0}
        if step:
            yield row
        if step in held_out:
            yield {"step": step, "eval/loss": held_out[step]}


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ({0: 2.0, 10: 1.0, 20: 1.2, 30: 1.3}, 20),  # a fifth above its lowest
        ({0: 2.0, 30: 2.2}, 30),  # worse than before training
        ({0: 2.0, 10: 1.0, 20: 1.04, 30: 1.03}, None),
        ({0: 2.0, 10: float("nan"), 20: 1.9}, None),
    ],
)
def test_a_held_out_loss_of_demonstrations_that_rises(losses, since):
    found = advisories_of(imitation(losses), facts(train__epochs=3))
    assert [(a.name, a.since) for a in found] == ([("held_out_loss_rises", since)] if since else [])
    if since:
        assert found[0].setting.startswith("a lower train.epochs (now 3), or a lower optimizer.lr")


@pytest.mark.parametrize("trouble", ["mismatch_rises", "bad_steps"])
def test_a_run_in_float32_is_not_advised_to_use_float32(trouble):
    rows, changed, *_ = SICK[trouble]
    for dtype, advised in (("bfloat16", True), ("float32", False)):
        (found,) = advisories_of(rows, facts(**changed, train_model__dtype=dtype))
        assert ("train_model.dtype=float32" in found.setting) == advised


@pytest.mark.parametrize("trouble", ["zero_rewards", "no_variance", "no_gradient", "entropy_collapse"])
def test_rewards_without_variance_are_no_trouble_in_distillation(trouble):
    rows, changed, *_ = SICK[trouble]
    assert advisories_of(rows, facts(**changed, loss__surrogate="none")) == []


def test_what_is_kept_does_not_grow_with_the_run():
    history, sizes = History({}), []
    for row in healthy(300):
        history.add(row)
        sizes.append(len(pickle.dumps(history)))
    assert sizes[-1] < 1.2 * sizes[50]
