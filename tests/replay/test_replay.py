"""Replays of real runs: under the run's own loss they are what was trained, and under others what a hand computes."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_runs import run_script, without_clocks

from grpo_rl.cli import main
from grpo_rl.diagnosis.mismatch import MismatchError
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.losses.grpo import LOSSES, GRPOLoss
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import read_step
from grpo_rl.replay.replay import recompute
from grpo_rl.settings.schema import Settings
from grpo_rl.training.checkpoint import checkpoints

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo.py"
pytestmark = pytest.mark.usefixtures("own_cache")
EVERYTHING = [
    "train.epochs=2", "policy.kl_coef=0.1", "policy.entropy_coef=0.01", "loss.correction=truncate",
    "loss.correction_high=1.0", "loss.top_entropy_fraction=0.5", "loss.clip_high=0.01",
    "policy.target_kl=0.05",
]  # fmt: skip
"""Every part of the loss at work."""


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """Two steps with two optimizer steps each, whose weights move fast."""
    few = ["train.total_dialog_turns=32", "train.keep_checkpoints=2", "train.lineage=true"]
    return [*tiny_run, *few, "optimizer.warmup_steps=0"]


def run(overrides, folder):
    """Runs the script in this process; what backward sent to the log-probabilities in each call of the loss."""
    seen = []
    forward = GRPOLoss.forward

    def watched(self, tokens):
        tokens["log_prob"].register_hook(lambda gradient, ids=tokens["group_id"]: seen.append((ids, gradient.clone())))
        return forward(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOLoss, "forward", watched)
        run_script(SCRIPT, overrides, folder)
    return seen


@pytest.fixture(scope="module")
def trained_plainly(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run(tiny, folder)


@pytest.fixture(scope="module", params=[None, ["train.optim_batch_size=16"], EVERYTHING], ids=["plain", "one", "all"])
def trained(request, trained_plainly, tiny, tmp_path_factory):
    """A run and the gradients that it was trained with."""
    if not request.param:
        return trained_plainly
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, run([*tiny, *request.param], folder)


@pytest.fixture(scope="module")
def plain(trained_plainly):
    return trained_plainly[0]


def steps_of(folder):
    return StepParts(folder / TOKENS_FOLDER).steps()


def replayed(folder, step, *overrides, capsys):
    capsys.readouterr()
    assert main(["replay", str(folder), str(step), "--json", *overrides]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.cases(1)
def test_under_its_own_loss_a_replay_is_what_was_trained(trained):
    folder, seen = trained
    logged = [row for row in read_metrics(folder) if "loss/total" in row]
    seen = iter(seen)
    for step in steps_of(folder):
        stored = read_step(folder, step)
        outcome = recompute(stored, Settings.restored(stored.config))
        gradients, lengths = outcome.columns["gradient"], {g.group_id: len(g.response_ids) for g in stored.groups}
        pieces = gradients.split([lengths[i] for update in stored.updates for i in update.groups])
        for update in stored.updates:
            mine = dict(zip(update.groups, pieces, strict=False))
            pieces = pieces[len(update.groups) :]
            left = set(update.scored)
            while left:
                ids, gradient = next(seen)
                for i in ids.unique().tolist():
                    assert torch.equal(mine[i], gradient[ids == i])
                    left.remove(i)
        told = [sum(update.recorded[name] for name in LOSSES) for update in stored.updates]
        assert outcome.losses == pytest.approx(told, abs=1e-7)
        numbers = {name: value for name, value in outcome.numbers.items() if name in logged[step - 1]}
        assert len(numbers) > 6 and numbers == pytest.approx({n: logged[step - 1][n] for n in numbers}, abs=1e-6)
        assert gradients.count_nonzero() > 20
    assert next(seen, None) is None


def test_a_plain_token_mean_without_a_std_has_the_gradient_that_a_hand_computes(plain):
    """-ratio x (reward - mean of its group) / tokens of the optimizer step, those of skipped groups counted."""
    stored = read_step(plain, 2)
    other = {"loss.surrogate": "plain", "loss.aggregate": "token_mean", "loss.advantage": "no_std"}
    settings = Settings.restored(stored.config).with_values(other)
    gradient = recompute(stored, settings).columns["gradient"].numpy()
    rows = pd.read_parquet(plain / TOKENS_FOLDER / "part-00000002.parquet")
    responses = pd.read_parquet(plain / "completions.parquet" / "part-00000002.parquet")
    of_group = responses.groupby("group_id")
    responses["response"] = of_group.cumcount()
    responses["deviation"] = responses["reward"] - of_group["reward"].transform("mean")
    rows = rows.merge(responses[["group_id", "response", "deviation"]], how="left", on=["group_id", "response"])
    count = rows.groupby("optimizer_step")["token_id"].transform("size")
    ratio = np.exp(rows["log_prob"].astype("float64") - rows["sampler_log_prob"])
    expected = np.where(rows["log_prob"].isna(), 0.0, -ratio * rows["deviation"] / count)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert (expected != 0).sum() > 20 and rows["log_prob"].isna().any()


def test_another_loss_is_set_against_the_runs_own(plain, capsys):
    same = replayed(plain, 2, capsys=capsys)
    assert same["run"] == same["other"] and same["recorded_gap"] < 1e-7
    assert same["changed_fraction"] == 0 and same["cosine"] == pytest.approx(1) and same["tokens"] == []
    told = replayed(plain, 2, "loss.clip_low=0.0", "loss.clip_high=0.0", "loss.aggregate=token_mean", capsys=capsys)
    assert told["other"]["clip/high_fraction"] > told["run"]["clip/high_fraction"]
    assert 0 < told["changed_fraction"] <= 1 and 0 < told["cosine"] < 1
    differences = [abs(a - b) for a, b in (token["gradient"] for token in told["tokens"])]
    assert len(differences) == 10 and differences == sorted(differences, reverse=True)
    groups = {group.group_id: group for group in read_step(plain, 2).groups}
    for token in told["tokens"]:
        group = groups[token["group_id"]]
        ids = group.responses[token["response"]].tolist()
        assert group.row == token["row"]
        assert ids[: token["position"] + 1][-9:] == [*token["before"], token["token_id"]]


def test_advantages_are_computed_anew_and_groups_that_were_not_scored_are_counted(plain, capsys):
    metrics = {row["step"]: row for row in read_metrics(plain)}
    step = next(step for step in steps_of(plain) if metrics[step]["train/skipped_groups"])
    told = replayed(plain, step, "policy.entropy_coef=0.1", "loss.advantage=leave_one_out", capsys=capsys)
    assert told["other"]["not_scored_groups"] == metrics[step]["train/skipped_groups"]
    assert told["run"]["not_scored_groups"] == 0
    rewards = {group.group_id: group.rewards.tolist() for group in read_step(plain, step).groups}
    for token in told["tokens"]:
        own = rewards[token["group_id"]][token["response"]]
        others = (sum(rewards[token["group_id"]]) - own) / 3
        assert token["advantage"][1] == pytest.approx(own - others, abs=1e-6)


@pytest.mark.parametrize("key", ["env.dataset", "loss.surrogate", "loss.kl"])
def test_what_a_run_names_is_imported_if_the_command_line_names_it_too(plain, key, tmp_path, monkeypatch, capsys):
    (tmp_path / "named_by_a_run.py").write_text("raise RuntimeError('it was run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    stored = read_step(plain, 2)
    section, name = key.split(".")
    config = stored.config | {section: stored.config[section] | {name: "named_by_a_run:it"}}
    monkeypatch.setattr("grpo_rl.monitor.stored_tokens.read_step", lambda *_: replace(stored, config=config))
    assert main(["replay", str(plain), "2"]) == 2
    assert f"the run's {key} is named_by_a_run:it, whose module would be imported" in capsys.readouterr().err
    assert main(["replay", str(plain), "2", "--imports", "named_by_a_run:it"]) == 2
    assert "it was run" in capsys.readouterr().err


@pytest.mark.nightly
def test_on_fresh_weights_ratios_are_to_what_the_trainer_itself_said(tiny, tmp_path, capsys):
    """Every ratio of GSPO is 1 with one optimizer step a collection: the weights are still the same."""
    folder = tmp_path / "run"
    run([*tiny, "train.optim_batch_size=16", "train.total_dialog_turns=16"], folder)
    told = replayed(folder, 1, "loss=gspo", capsys=capsys)
    assert {token["ratio"][1] for token in told["tokens"]} == {1.0} and told["other"]["clip/high_fraction"] == 0
    assert read_metrics(folder)[0]["train/skipped_groups"]
    assert main(["replay", str(folder), "1", "loss.top_entropy_fraction=0.5"]) == 2
    assert "a replay has only what the run computed" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_step_that_a_mismatch_stopped_is_stored_and_replays(tiny, tmp_path, capsys, monkeypatch):
    generate, folder = TransformersEngine.generate, tmp_path / "run"
    monkeypatch.setattr(
        TransformersEngine, "generate", lambda *args: generate(*args[:-1], replace(args[-1], temperature=0.5))
    )
    with pytest.raises(MismatchError, match="wrong temperature"):
        run(tiny, folder)
    assert steps_of(folder) == [1]
    assert replayed(folder, 1, "loss=cispo", capsys=capsys)["recorded_gap"] < 1e-6
    assert {group.size for group in read_step(folder, 1).groups} == {4}


def test_what_cannot_be_replayed_is_reported_in_one_line(plain, tmp_path, capsys):
    assert main(["replay", str(tmp_path), "1"]) == 2
    assert capsys.readouterr().err.endswith("it was trained without it; train.lineage=true stores it\n")
    assert main(["replay", str(plain), "1", "policy.kl_coef=0.1"]) == 2
    assert "the loss reads ref_log_prob, which is missing" in capsys.readouterr().err
    assert main(["replay", str(plain), "9"]) == 2
    assert "has steps 1 to 2" in capsys.readouterr().err


def test_what_the_page_on_lineage_shows_runs(plain, capsys):
    page = (Path(__file__).parents[2] / "docs" / "lineage.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {"run": plain}
    exec(compile(code, "docs/lineage.md", "exec"), names)  # our own page, not data
    assert names["why"].sum() == len(names["tokens"]) and len(names["responses"]) == 32
    commands = re.findall(r"^grpo-rl (replay) \S+ 12 (.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for name, rest in commands:
        assert main([name, str(plain), "2", *rest.split()]) == 0
    tables, _, numbers = capsys.readouterr().out.partition("\n{")
    assert "As trained, and loss=gspo loss.clip_high=0.001" in tables and "Tokens that differ the most" in tables
    assert json.loads("{" + numbers)["step"] == 2


@pytest.mark.nightly
def test_storing_the_lineage_changes_nothing_in_a_run(plain, tiny, tmp_path):
    run([*tiny, "train.lineage=false"], tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "1"]) == 2

    def numbers(folder):
        return [without_clocks(row) for row in read_metrics(folder)]

    assert numbers(tmp_path / "run") == numbers(plain)


@pytest.mark.nightly
def test_a_resumed_run_stores_what_the_uninterrupted_one_stored(plain, tiny, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(plain, cut)
    (cut / "summary.json").unlink()
    run([*tiny, f"resume={checkpoints(cut / 'checkpoints')[0]}"], tmp_path / "unused")
    ours, theirs = (pd.read_parquet(folder / TOKENS_FOLDER) for folder in (cut, plain))
    pd.testing.assert_frame_equal(ours, theirs)
