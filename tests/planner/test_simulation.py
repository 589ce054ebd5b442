"""`grpo-rl plan --simulate`: responses alike take the plan's own seconds, and a tail what a hand expects."""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_rl.cli import main
from grpo_rl.planner.advice import neighbours
from grpo_rl.planner.hardware import Cluster
from grpo_rl.planner.plan import make_plan
from grpo_rl.planner.scenario import Scenario
from grpo_rl.planner.simulation import engine_rates, response_lengths, simulate_plan
from grpo_rl.planner.simulator import LogNormal, SimulatorConfig, simulate
from grpo_rl.policies.loading import skeleton
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings

pytestmark = pytest.mark.slow

LLAMA_70B = Path(__file__).parent / "data" / "llama-70b"


@pytest.fixture(scope="module")
def model():
    return skeleton(LLAMA_70B).bfloat16()


def scenario_of(model, *overrides, mode="async", response_tokens=None):
    words = [
        f"model.name={LLAMA_70B}",
        f"mode={mode}",
        "train_model.dtype=bfloat16",
        "+experiment=plan_70b_64gpus",
        *overrides,
    ]
    settings = Settings.read(compose_config("grpo_gsm8k", words))
    return Scenario(settings, model, Cluster.parse("64xH100"), response_tokens=response_tokens)


@pytest.fixture(scope="module")
def simulation(model):
    return simulate_plan(make_plan(scenario_of(model)))


@pytest.mark.nightly
def test_responses_that_are_alike_take_as_long_as_the_plan_says(model):
    plan = make_plan(scenario_of(model))
    turns = simulate_plan(plan, tail=1).turns
    seconds = {phase: share * turns.step_s for phase, share in
               (("sample", turns.outcome.waiting), ("train", turns.outcome.training))}  # fmt: skip
    # The fullest engine has 14 of 80 groups, which the plan counts for all.
    assert seconds["sample"] == pytest.approx(plan.seconds["sample"], rel=0.05)
    assert seconds["train"] == pytest.approx(plan.seconds["train"] + plan.seconds["score"])
    assert turns.step_s == pytest.approx(sum(seconds.values()) + plan.seconds["sync"])


@pytest.mark.nightly
def test_responses_that_are_alike_overlap_as_two_phases_can(model):
    plan = make_plan(scenario_of(model))
    found = simulate_plan(plan, tail=1)
    sample, train = (plan.seconds[phase] for phase in ("sample", "train"))
    ideal = (sample + train) / max(sample, train)
    assert found.ideal == pytest.approx(ideal, rel=0.02)
    # The push interrupts both, at once as in turns: it is added to both sides.
    push = plan.seconds["sync"]
    assert found.gain == pytest.approx((sample + train + push) / (max(sample, train) + push), rel=0.05)


def test_with_a_long_tail_sampling_at_once_waits_no_more_and_holds_its_bound(simulation):
    planned, turns = simulation.planned.outcome, simulation.turns.outcome
    assert planned.waiting <= 0.1 and planned.staleness_max <= 2 and turns.staleness_max == 0
    assert simulation.gain >= max(1.7, 0.9 * simulation.ideal)
    # The longest of 1,280 responses is cut at 1,024 tokens: in turns every batch waits for it, whatever the others are.
    slots, token_s, _ = engine_rates(simulation.planned.plan)
    assert slots == 256 and turns.waiting * simulation.turns.step_s >= 1024 * token_s


def test_the_split_that_is_called_best_is_the_fastest_within_a_percent(simulation):
    assert simulation.colocated
    can_run = [simulated for simulated in simulation.all if not simulated.plan.layout.colocated]
    times = [simulated.step_s for simulated in can_run]
    assert simulation.best in can_run and min(times) <= simulation.best.step_s <= 1.01 * min(times)
    assert len({(s.plan.layout, s.max_staleness) for s in simulation.all}) == len(times) + 1
    bound = simulation.best.max_staleness
    assert list(simulation.best_overrides.items())[:2] == [("mode", "async"), ("train.max_staleness", bound)]


def test_neighbours_use_all_devices_and_fit(model):
    own = make_plan(scenario_of(model))
    near = [plan.layout for plan in neighbours(own) if plan.fits]
    train = own.layout.train
    assert near == sorted(near, key=lambda layout: layout.train) and train not in [layout.train for layout in near]
    assert all(layout.train + layout.inference == 64 and layout.engine_size == 4 for layout in near)
    assert {abs(layout.train - train) for layout in near} >= {4, 8}  # a sixteenth and an eighth of 64


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "bound"), [("sync", 2), ("async", 0)])
def test_in_turns_nothing_is_simulated_at_once(model, mode, bound):
    plan = make_plan(scenario_of(model, f"train.max_staleness={bound}", mode=mode))
    found = simulate_plan(plan)
    assert found.planned is found.turns is found.best and not found.others
    assert all(simulated.max_staleness == 0 for simulated in found.all)
    assert found.best_overrides["mode"] == mode
    assert found.best_overrides.get("train.max_staleness") == (0 if mode == "async" else None)


@pytest.mark.parametrize(("tail", "limit"), [(1, 500), (8, float("inf")), (8, 1000), (30, 400)])
def test_the_mean_of_lengths_is_that_of_what_is_drawn(tail, limit):
    lengths, rng = LogNormal(200, tail, limit), random.Random(0)
    drawn = [lengths(rng) for _ in range(40_000)]
    error = 4 * statistics.stdev(drawn) / 200 if tail > 1 else 0.5
    assert lengths.mean == pytest.approx(statistics.fmean(drawn), abs=error)


def test_lengths_are_those_that_are_asked_for(model):
    # Without a mean, the 99th percentile is the longest that there may be.
    assert response_lengths(scenario_of(model), 8) == LogNormal(128, 8, 1024)
    assert response_lengths(scenario_of(model, response_tokens=300), 8).mean == pytest.approx(300)
    with pytest.raises(ValueError, match="--length-tail is 0.5"):
        response_lengths(scenario_of(model), 0.5)
    with pytest.raises(ValueError, match=r"--response-tokens=1024 as the mean .*max_new_tokens=1024"):
        response_lengths(scenario_of(model, response_tokens=1024), 8)


def test_a_margin_leaves_out_the_rush_at_the_start_and_nothing_else():
    # Responses alike, one engine, phases of 4 s and 8 s: at first the trainer waits for a batch, and never again.
    even = SimulatorConfig(engines=1, slots=8, lengths=LogNormal(100), group_size=4, groups_per_step=1, token_s=0.04,
                    token_s_per_response=0.0, train_tokens_per_s=50.0, push_s=0.0, steps=10)  # fmt: skip
    with_start, without = simulate(even), simulate(replace(even, margin=3))
    assert with_start.seconds == pytest.approx(4 + 10 * 8) and without.seconds == pytest.approx(10 * 8)
    assert without.waiting == 0 and without.responses == with_start.responses == 40


@pytest.mark.nightly
def test_the_command_prints_the_simulation_below_the_plan(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = [f"model.name={LLAMA_70B}", "+experiment=plan_70b_64gpus", "cluster=64xH100"]
    assert main(["plan", "--simulate", *words, "train.max_staleness=1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"train 40, inference 24, max_staleness=1 +\d", out) and "all 64, in turns" in out
    assert re.search(r"best: .*\(mode=async train\.max_staleness=1 train_model\.num_devices=\d+", out)
    assert main(["plan", *words]) == 0
    assert "Lengths" not in capsys.readouterr().out


@pytest.mark.nightly
def test_one_device_samples_and_trains_in_turns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = [
        f"model.name={LLAMA_70B}",
        "cluster=1xMine,memory_gib=4000,tflops=900,memory_gb_s=3000,link_gb_s=1,network_gb_s=1",
    ]
    assert main(["plan", "--simulate", *words]) == 0
    out = capsys.readouterr().out
    assert "all 1, in turns" in out and "best:" not in out.partition("Lengths")[2]


@pytest.mark.nightly
def test_the_page_on_staleness_says_what_the_simulator_gives():
    # benchmarks/staleness.py's balanced scenario: "1 gives 1.8 times, and 2 gives 2.1 times", waiting less than 2 %.
    balanced = SimulatorConfig(engines=8, train_tokens_per_s=5e3, steps=60)
    turns, one, two = (simulate(replace(balanced, max_staleness=bound)) for bound in (0, 1, 2))
    gains = [round(outcome.responses_per_s / turns.responses_per_s, 1) for outcome in (one, two)]
    assert gains == [1.8, 2.1] and two.waiting < 0.02
    page = (Path(__file__).parents[2] / "docs" / "async.md").read_text()
    assert "1.8 times" in page and "2.1 times" in page
