"""The main script itself, on CPU with a tiny model: what it writes, how it resumes, what it refuses."""

import errno
import functools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import pandas as pd
import pytest
import torch
from tiny_runs import run_script, same, without_clocks
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.report import charts
from grpo_rl.report.files import read_evaluation
from grpo_rl.run.folder import Room, RunFolder
from grpo_rl.run.lock import FolderLock
from grpo_rl.run.summary import write_evaluation
from grpo_rl.settings.sections import Train
from grpo_rl.training.checkpoint import checkpoints, load
from tests.helpers import of_two_ranks, responses_by_step

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo.py"
run = functools.partial(run_script, SCRIPT)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def tiny(tiny_run):
    return [*tiny_run, "evaluate.rows=4", "train_model.compile=null"]  # as users train


def comparable(folder):
    return [without_clocks(row) for row in read_metrics(folder)]


def masters(folder):
    return load(checkpoints(folder / "checkpoints")[-1])["optimizer"]["masters"]


def assert_resumes(whole, words, step, cut):
    """A copy of the run that goes on from its checkpoint of this step has its metrics and weights to the last bit."""
    shutil.copytree(whole, cut)
    start = checkpoints(cut / "checkpoints")[step - 1]  # later ones are there too, and must not be mixed in
    torch.manual_seed(12345)  # whatever happened since
    run([*words, f"resume={start}"], cut.with_name("unused"))
    assert comparable(cut) == comparable(whole)
    assert same(masters(cut), masters(whole))


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    return run(tiny, tmp_path_factory.mktemp("whole") / "run")


def test_the_script_scores_at_the_samplings_temperature_and_clips_the_whole_steps_gradient(tiny, tmp_path):
    own = ["sampling.temperature=0.5", "train.optim_batch_size=16", "train.total_dialog_turns=16", "evaluate.rows=0"]
    first, clipped = (
        read_metrics(run([*tiny, *own, f"optimizer.clip_grad_norm={most}"], tmp_path / str(most)))[0]
        for most in (100.0, 1e-4)
    )
    # The norm before clipping: were each of several micro-batches clipped, it would be another.
    assert first["train/micro_batches"] > 1 and first["grad_norm"] == clipped["grad_norm"] > 1e-3
    assert first["mismatch/mean"] < 0.02


def test_a_run_leaves_all_its_files_and_a_model_that_transformers_loads_and_that_has_moved(finished, tiny):
    assert not (finished / "waits.txt").exists(), "nothing was late"
    metrics = read_metrics(finished)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 4]  # before, four steps, after
    assert "limit_fraction/score" not in metrics[1]  # no reference, nothing to score
    summary = json.loads((finished / "summary.json").read_text())
    assert {"eval_before", "eval_after", "eval_gain", "eval_gain_ci95", "steps", "seconds"} <= set(summary)
    assert summary["steps"] == 4
    rewards = [row["reward/mean"] for row in metrics[1:5]]  # of four steps two are at each end
    ends = sum(rewards[:2]) / 2, sum(rewards[2:]) / 2
    assert (summary["train_reward_first"], summary["train_reward_last"]) == pytest.approx(ends)
    assert summary["command"].startswith(f"python {SCRIPT} model.name=") and len(summary["config_hash"]) == 12
    assert summary["model_revision"] is None and summary["data_revision"] is None  # both are files of this machine
    assert len(pd.read_parquet(finished / "completions.parquet")) == 64
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / "overrides.yaml").exists() and (finished / "config.yaml").exists()
    assert len(checkpoints(finished / "checkpoints")) == 4
    assert "a gain of" in (finished / "model" / "README.md").read_text()
    lengths = pd.read_parquet(finished / "completions.parquet").groupby("step")["tokens"].sum().cumsum().tolist()
    assert [row["total/sampled_tokens"] for row in metrics[1:5]] == lengths
    trained = AutoModelForCausalLM.from_pretrained(finished / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny[0].split("=")[1])
    assert AutoTokenizer.from_pretrained(finished / "model").chat_template
    assert not any(torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))


def test_a_run_whose_folder_is_moved_stops_and_writes_nothing_at_its_place(tiny, tmp_path, monkeypatch):
    folder, collect, calls = tmp_path / "run", SyncCollector.collect, []

    def moved(self, *arguments):
        calls.append(folder)
        if len(calls) == 3:
            folder.rename(tmp_path / "moved")
            FolderLock(folder).close()  # another run begins there
            MetricsLog(folder).log(1, {"theirs": 1.0})
        return collect(self, *arguments)

    monkeypatch.setattr(SyncCollector, "collect", moved)
    with pytest.raises(SystemExit, match="Stopped after step 2: .*run was moved or removed .*resume=FOLDER"):
        run([*tiny, "train.checkpoint_frequency=0", "evaluate.rows=0"], folder)
    assert sorted(path.name for path in folder.rglob("*")) == [".lock", "metrics.jsonl"]
    assert read_metrics(folder) == [{"step": 1, "theirs": 1.0}]
    assert [row["step"] for row in read_metrics(tmp_path / "moved")] == [1, 2]


@pytest.mark.cases(1)
@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(finished, tiny, tmp_path, step):
    assert_resumes(finished, tiny, step, cut := tmp_path / "cut")
    for name in ("time", "time/at_s"):  # the clocks go on
        clock = [row[name] for row in read_metrics(cut)]
        assert clock == sorted(clock) and clock[: step + 1] == [row[name] for row in read_metrics(finished)][: step + 1]
    columns = ["step", "completion", "reward", "advantage"]
    a, b = (pd.read_parquet(f / "completions.parquet")[columns] for f in (cut, finished))
    pd.testing.assert_frame_equal(a, b)
    for name in ("tokens.parquet", "held_out.parquet"):
        pd.testing.assert_frame_equal(*(pd.read_parquet(f / name) for f in (cut, finished)))


def test_a_group_of_each_step_is_recorded_token_by_token(finished):
    responses, tokens = (pd.read_parquet(finished / name) for name in ("completions.parquet", "tokens.parquet"))
    assert tokens["step"].unique().tolist() == [1, 2, 3, 4]
    for (step, group_id), recorded in tokens.groupby(["step", "group_id"]):
        texts = responses.query(f"step == {step} and group_id == {group_id}")["completion"].tolist()
        spoken = recorded[~recorded["special"]].groupby("response")["text"].agg("".join)
        assert spoken.reindex(range(len(texts)), fill_value="").tolist() == texts
    scored = tokens.dropna(subset="log_prob")
    assert len(scored)
    assert (scored["sampler_log_prob"] - scored["log_prob"]).abs().max() < 0.1  # both of the same weights


def test_held_out_responses_are_kept_before_and_after(finished):
    kept = pd.read_parquet(finished / "held_out.parquet")
    assert kept[["step", "row"]].to_numpy().tolist() == [[step, row] for step in (0, 4) for row in range(4)]
    after = kept.query("step == 4")
    assert after["reward"].tolist() == pytest.approx(json.loads((finished / "evaluation.json").read_text())["rewards"])
    assert after["answer"].tolist() == ["0", "1", "2", "3"] and after["prompt"].str.contains("?", regex=False).all()


def test_what_a_run_logs_is_what_the_reports_made_runs_log_and_in_a_chart_that_explains_it(finished):
    made = json.loads((Path(__file__).parents[1] / "report" / "metric_names.json").read_text())
    rows = read_metrics(finished)
    assert set(made["evaluation"]) == set(rows[0]) - {"step"}
    assert set(made["step"]) == {name for row in rows if "reward/mean" in row for name in row} - {"step"}
    drawn = charts.build(finished)["charts"]
    assert [c["series"][0][0] for c in drawn if c["group"] == "Everything else"] == ["policy_version"]
    assert all(chart["help"] for chart in drawn if chart["group"] != "Everything else")


def test_epochs_kl_entropy_and_accumulation_all_run(tiny, tmp_path):
    folder = run(
        [*tiny, "train.epochs=2", "policy.kl_coef=0.1", "policy.entropy_coef=0.01", "evaluate.rows=0",
         "train.gradient_accumulation_steps=2", "loss.aggregate=token_mean", "loss.advantage=leave_one_out",
         "train.total_dialog_turns=32", "train_model.gradient_checkpointing=true", "optimizer.schedule=cosine"],
        tmp_path / "run",
    )  # fmt: skip
    first, second = read_metrics(folder)
    assert first["limit_fraction/score"] > 0
    assert first["kl/sampler"] > 0 and second["kl/ref"] > 0 and second["loss/kl"] > 0 and second["loss/entropy"] < 0


@pytest.mark.nightly
def test_a_sweep_runs_every_job_in_one_process(tiny, tmp_path, monkeypatch):
    overrides = [*tiny, "train.total_dialog_turns=16", "evaluate.rows=0", "optimizer.lr=1e-3,1e-4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--multirun", *overrides, f"hydra.sweep.dir={tmp_path}"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [read_metrics(tmp_path / job)[-1]["lr"] for job in "01"] == [1e-3 / 2, 1e-4 / 2]  # second of 4 warm-up steps


def test_ctrl_c_once_finishes_the_step_checkpoints_and_says_how_to_go_on(tiny, tmp_path):
    folder = tmp_path / "run"

    def interrupt():  # wherever the run is then
        while not (folder / "metrics.jsonl").exists() or all(row["step"] < 2 for row in read_metrics(folder)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit, match=re.escape(f"resume={folder}")):
        run([*tiny, "train.total_dialog_turns=100000", "train.checkpoint_frequency=0"], folder)
    (saved,) = checkpoints(folder / "checkpoints")
    assert load(saved)["step"] == read_metrics(folder)[-1]["step"]


@pytest.mark.nightly
def test_ctrl_c_twice_stops_now(tiny, tmp_path, monkeypatch):
    generate = TransformersEngine.generate

    def interrupted(engine, *args, **kwargs):
        if any(row["step"] == 1 for row in read_metrics(tmp_path / "run")):
            signal.raise_signal(signal.SIGINT)  # goes on
            signal.raise_signal(signal.SIGINT)
        return generate(engine, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run([*tiny, "train.checkpoint_frequency=0"], tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1 and not checkpoints(tmp_path / "run" / "checkpoints")


def test_responses_whose_scorer_fails_are_left_out_counted_and_reported(tiny, tmp_path, monkeypatch, capsys):
    reward = GSM8K._reward

    def fails_now_and_then(task, row, response, formats):
        if sum(map(ord, response)) % 7 == 3:
            return KeyError("gold")
        return reward(task, row, response, formats)

    monkeypatch.setattr(GSM8K, "_reward", fails_now_and_then)
    folder = run([*tiny, "env.max_failed_fraction=1.0"], tmp_path / "run")
    counts = [row["failed/error"] for row in read_metrics(folder) if "failed/error" in row]
    assert counts == sorted(counts) and counts[-1] > 0
    assert " ".join(capsys.readouterr().out.split()).count("No reward (error), the first of its kind: GSM8K") == 1
    assert sum(map(len, responses_by_step(folder).values())) < 64
    saved = json.loads(load(checkpoints(folder / "checkpoints")[-1])["collector"]["env"])
    assert f'"failed_error": {int(counts[-1])}' in json.dumps(saved)


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tiny, finished, tmp_path):
    again = run(tiny, tmp_path / "again")
    assert comparable(again) == comparable(finished)
    other = run([*tiny, "train.seed=1", "train.total_dialog_turns=16", "evaluate.rows=0"], tmp_path / "other")
    assert comparable(other)[0]["grad_norm"] != comparable(finished)[1]["grad_norm"]


class Killed(BaseException):
    """Stands in for SIGKILL: nothing catches it."""


def killed(*_, **__):
    raise Killed


def outcome(folder):
    """The files that a run leaves, except what depends on clocks and folders."""
    summary = json.loads((folder / "summary.json").read_text())
    parts = sorted((folder / "completions.parquet").iterdir())
    weights = (folder / "model" / "model.safetensors").read_bytes()
    names = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".log"))
    left = (json.loads((folder / "evaluation.json").read_text())["rewards"], names, [part.name for part in parts])
    return comparable(folder), without_clocks(summary), weights, left


@pytest.mark.nightly
def test_a_run_killed_at_any_point_of_its_end_is_completed_and_nothing_of_it_is_there_twice(
    finished, tiny, tmp_path, monkeypatch
):
    shutil.copytree(finished, cut := tmp_path / "cut")
    shutil.rmtree(cut / "model")
    start = checkpoints(cut / "checkpoints")[2]  # one step before the end
    for point in (
        "grpo_rl.run.held_out.evaluate",
        "grpo_rl.monitor.metrics.MetricsLog.log",
        "grpo_rl.run.held_out.write_evaluation",
        "grpo_rl.run.summary.export",
        "grpo_rl.storage.whole_file._take_place",
        "grpo_rl.run.summary.write_summary",
        "grpo_rl.run.summary.write_report",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(point, killed)
            with pytest.raises(Killed):
                run([*tiny, f"resume={start}"], tmp_path / "unused")
        assert not (cut / "report.html").exists()
        start = cut
    run([*tiny, f"resume={cut}"], tmp_path / "unused")
    assert outcome(cut) == outcome(finished)


@pytest.mark.nightly
def test_a_finished_run_says_so_without_a_model_and_can_be_prolonged(tiny, finished, tmp_path, monkeypatch, capsys):
    longer = tmp_path / "longer"
    shutil.copytree(finished, longer)
    (longer / "report.html").unlink()  # killed before it
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
        run([*tiny, f"resume={longer}"], tmp_path / "unused")
        assert "is finished after 4 steps, and nothing is left to do" in capsys.readouterr().out
        assert (longer / "report.html").exists()
        run([*tiny, "resume=auto"], longer)
        assert outcome(longer) == outcome(finished)
    run([*tiny, f"resume={longer}", "train.steps=5"], tmp_path / "unused")
    assert json.loads((longer / "summary.json").read_text())["steps"] == 5
    assert [row["step"] for row in read_metrics(longer)] == [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.nightly
def test_a_fixed_command_goes_on_from_wherever_it_was_cut_off(tiny, tmp_path, monkeypatch, capsys):
    """Before and after anything is logged, before the first checkpoint, after one; `resume=auto` from the third on."""
    short, folder = [*tiny, "train.total_dialog_turns=32"], tmp_path / "run"
    whole, auto = run(short, tmp_path / "whole"), [*short, "resume=auto"]
    for point, command in (
        ("parts.Parts.begin", short),
        ("run.Run.collections", short),
        ("run.Run.save_checkpoint", auto),
        ("run.Run.finish", auto),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"grpo_rl.run.{point}", killed)
            with pytest.raises(Killed):
                run(command, folder)
    printed = capsys.readouterr().out
    assert printed.count("had trained nothing, and begins again") == 1
    assert printed.count("cut off before its first checkpoint, and begins again") == 2
    with pytest.raises(SystemExit, match="already holds a run"):
        run(short, folder)
    run(auto, folder)
    assert comparable(folder) == comparable(whole)
    assert same(masters(folder), masters(whole))


def test_an_evaluation_with_a_response_that_has_no_reward_is_kept_as_json_and_read_back(tmp_path):
    write_evaluation(tmp_path, 3, [0.5, float("nan")])
    stored = json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert stored == {"step": 3, "rewards": [0.5, None]}
    rewards, best = read_evaluation(tmp_path, 3)
    assert best is None and rewards[0] == 0.5 and rewards[1] != rewards[1]
    assert read_evaluation(tmp_path, 4) is None and read_evaluation(tmp_path / "none", 3) is None


def test_a_start_that_is_refused_leaves_nothing_but_what_is_the_users(tiny, tmp_path, monkeypatch):
    folder, refuses = tmp_path / "run", MagicMock(side_effect=ValueError("it can't be trained"))
    monkeypatch.setattr("grpo_rl.assembly.training.load_policy", refuses)
    for left in (set(), {"grpo.log", "mine.txt"}):
        with pytest.raises(SystemExit, match="error: "):
            run(tiny, folder)
        assert {path.name for path in folder.iterdir()} - {".lock"} == left
        (folder / "mine.txt").touch()


@pytest.mark.cases(1)
@pytest.mark.parametrize("file", ["metrics.jsonl", "completions.parquet/part-00000001.parquet", "summary.json"])
def test_a_full_disk_is_reported_in_one_line_with_the_file_and_the_way_on(tiny, tmp_path, monkeypatch, file):
    """A failed write names no file by itself, in Python as little as in Arrow."""
    path_open, full, name = Path.open, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Path(file).name

    def no_room(path, mode="r", *args, **kwargs):
        on_full_disk = mode[0] != "r" and path.name in (name, f".{name}.tmp")
        return open("/dev/full", mode) if on_full_disk else path_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", no_room)
    if file.endswith("parquet"):
        monkeypatch.setattr("pyarrow.parquet.write_table", MagicMock(side_effect=full))
    with pytest.raises(SystemExit) as stopped:
        run([*tiny, "train.total_dialog_turns=16", "evaluate.rows=0"], tmp_path / "run")
    told = f"error: can't write to {tmp_path / 'run' / file}: {full.strerror}; free some space or set hydra.run.dir."
    assert str(stopped.value).startswith(told)
    assert str(stopped.value).endswith(f". Go on with: resume={tmp_path / 'run'}")


def test_an_engine_that_sleeps_while_the_policy_trains_samples_the_same(tiny, tmp_path, monkeypatch):
    for name in ("sleep", "wake"):
        method = getattr(TransformersEngine, name)
        monkeypatch.setattr(TransformersEngine, name, create_autospec(method, side_effect=method))
    awake = run([*tiny, "train.total_dialog_turns=32"], tmp_path / "awake")
    assert TransformersEngine.sleep.call_count == 0
    asleep = run([*tiny, "train.total_dialog_turns=32", "inference_model.sleep=true"], tmp_path / "asleep")
    counts = TransformersEngine.sleep.call_count, TransformersEngine.wake.call_count
    assert counts[0] == 2 and counts[1] >= 3, "once a step, and awake for every push"
    assert comparable(awake) == comparable(asleep)


@pytest.mark.cases(2)
@pytest.mark.parametrize("what", ["a live run", "a full disk", "logs that can't be synced"])
def test_what_only_rank_zero_can_fail_at_is_reported_to_all_ranks(finished, tmp_path, monkeypatch, what):
    """One that waited for rank zero, which has stopped, would wait for ever."""
    shutil.copytree(finished, folder := tmp_path / "run")
    config = json.loads(load(checkpoints(folder / "checkpoints")[-1])["config"])

    def fail(of_rank, *_):
        if of_rank == folder:  # rank zero's; the other has a temporary one
            raise OSError(errno.EIO, "Input/output error")

    lock = FolderLock(folder) if what == "a live run" else None
    if what == "a full disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    if what.startswith("logs"):
        (folder / "model").rename(tmp_path / "model")  # something is left to do
    monkeypatch.setattr("grpo_rl.training.checkpoint.sync_logs", fail)
    monkeypatch.setattr("grpo_rl.training.checkpoint.load_shards", lambda path, state, ranks: state)
    train = Train(checkpoint_frequency=1, total_dialog_turns=64, elastic=True)  # one rank wrote the checkpoint

    def error_of(ranks):
        with pytest.raises((ValueError, OSError)) as error:
            with RunFolder(folder, str(folder), config, "", Room(3, 1000, 1000), train, ranks) as opened:
                assert what.startswith("logs")
                opened.save(5, MagicMock(), keep=0)
        return error.value

    first, second = of_two_ranks(error_of)
    assert first is second
    if lock:
        lock.close()
