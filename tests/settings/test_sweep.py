"""Sweeps by Hydra's Optuna sweeper: what a trial's objective is, and that a failed trial ends no sweep."""

import sys

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from grpo_rl.settings.config import main

pytestmark = pytest.mark.slow
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra `sweep` is not installed")


def sweep(function, tmp_path, monkeypatch, *words):
    """Runs `script --multirun` with a function in the place of training, and returns what the sweeper wrote."""
    arguments = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=3"]
    arguments += ["hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0", f"hydra.sweep.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["script", "--multirun", *arguments, *words])
    GlobalHydra.instance().clear()
    main(config_name="grpo_gsm8k")(function)()
    return yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())


@pytest.mark.cases(1)
@pytest.mark.parametrize("failure", [ValueError("bad"), RuntimeError("out of memory"), "engine", "no evaluation"])
def test_a_failed_trial_does_not_end_the_sweep(tmp_path, monkeypatch, failure):
    tried = []

    def train(settings, folder):
        tried.append(settings.train.seed)
        if len(tried) == 2:
            if failure == "no evaluation":
                return {"steps": 4}
            if failure == "engine":  # as a Run ends when its engine died
                raise SystemExit("Stopped after step 3") from RuntimeError("engine 0 is dead")
            raise failure
        return {"eval_gain": float(len(tried))}

    words = ["hydra.sweeper.max_failure_rate=1", "train.seed=range(0, 100)"]
    found = sweep(train, tmp_path, monkeypatch, *words)
    assert len(tried) == 3 and found["best_value"] == 3.0 and found["best_params"]["train.seed"] == tried[2]


@pytest.mark.nightly
def test_ctrl_c_ends_the_sweep(tmp_path, monkeypatch):
    tried = []

    def train(settings, folder):
        tried.append(settings.train.seed)
        raise SystemExit("Stopped after step 3. Go on with: resume=x")

    with pytest.raises(SystemExit, match="Go on with"):
        sweep(train, tmp_path, monkeypatch, "hydra.sweeper.max_failure_rate=1", "train.seed=range(0, 100)")
    assert len(tried) == 1
