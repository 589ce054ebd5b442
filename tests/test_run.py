"""The main script itself, on CPU with a tiny model: what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.checkpoint import checkpoints, load
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.monitor.completions import logged_steps, read_step
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import save_tiny_model

SCRIPT = Path(__file__).parent.parent / "sota" / "grpo.py"
CLOCK = ("time/", "throughput/", "memory/", "limit_")
"""Metrics that depend on the machine's mood."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own: rates measured beside other tests are none for the user's runs."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides for a run of a few seconds: six questions, a random model that is paid for digits."""
    folder = tmp_path_factory.mktemp("tiny")
    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.name={save_tiny_model(folder / 'model')}",
        f"env.path={folder / 'train.jsonl'}",
        f"env.eval_path={folder / 'train.jsonl'}",
        "env.system_prompt=null",
        "env.num_envs=4",
        "env.repeats=4",
        "env.reward.reasoning_pattern='[0-9]'",  # a random model meets this one now and then
        "train.optim_batch_size=8",
        "train.total_dialog_turns=64",
        "train.checkpoint_frequency=1",
        "train.keep_checkpoints=0",
        "train.micro_batch_tokens=64",
        "inference_model.engine=transformers",
        "inference_model.max_model_len=64",
        "sampling.max_new_tokens=8",
        "optimizer.lr=1e-2",
        "evaluate.rows=4",
    ]


def run(overrides, folder, monkeypatch):
    """Runs the script in this process; its folder."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *overrides, f"hydra.run.dir={folder}"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


def comparable(folder):
    rows = read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return run(tiny, tmp_path_factory.mktemp("whole") / "run", patch)


def test_a_run_leaves_all_its_files(finished):
    metrics = read_metrics(finished)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 4]  # before, four steps, after
    assert {
        "reward/mean",
        "reward/correctness",
        "grad_norm",
        "entropy",
        "kl/sampler",
        "mismatch/mean",
        "ess",
        "lr",
        "loss/total",
        "clip/low_fraction",
        "staleness/max",
        "time/sample_s",
        "time/train_s",
        "time/sync_s",
        "throughput/sample_tokens_per_s",
        "response/truncated_fraction",
        "memory/peak_gib",
        "limit_fraction",
        "limit_fraction/sample",
        "limit_fraction/train",
        "limit_fraction/sync",
    } <= set(metrics[1])
    assert "limit_fraction/score" not in metrics[1]  # no reference, nothing to score
    summary = json.loads((finished / "summary.json").read_text())
    assert {"eval_before", "eval_after", "eval_gain", "eval_gain_ci95", "steps", "seconds"} <= set(summary)
    assert summary["steps"] == 4
    assert len(pd.read_parquet(finished / "completions.parquet")) == 64
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / ".hydra" / "config.yaml").exists()
    assert len(checkpoints(finished / "checkpoints")) == 4


def test_the_exported_model_loads_in_transformers_and_has_moved(finished, tiny):
    trained = AutoModelForCausalLM.from_pretrained(finished / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny[0].split("=")[1])
    assert AutoTokenizer.from_pretrained(finished / "model").chat_template
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_a_step_is_set_against_what_the_machine_does_at_its_best(finished, cache):
    rates = json.loads((cache / "rates.json").read_text())
    assert len(rates) == 1 and "bfloat16" in next(iter(rates))  # measured in the first run, known to the others
    for row in read_metrics(finished)[1:5]:
        # A model of 100,000 parameters keeps no machine busy.
        assert 0 < row["limit_fraction"] < 0.5
        parts = [row[f"limit_fraction/{name}"] * row[f"time/{name}_s"] for name in ("sample", "train", "sync")]
        step_s = sum(seconds for name, seconds in row.items() if name.startswith("time/"))
        assert sum(parts) == pytest.approx(row["limit_fraction"] * step_s, rel=1e-2)
    assert "A step against the machine's limit" in (finished / "report.html").read_text().replace("&#39;", "'")


def test_groups_that_taught_nothing_are_counted_where_they_are_skipped(finished):
    for row in read_metrics(finished)[1:5]:
        assert row["train/skipped_groups"] == row["reward/zero_std_fraction"] * 4


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(finished, tiny, tmp_path, monkeypatch, step):
    cut = tmp_path / "cut"
    shutil.copytree(finished, cut)
    start = checkpoints(cut / "checkpoints")[step - 1]  # later ones are there too, and must not be mixed in
    torch.manual_seed(12345)  # whatever happened since
    run([*tiny, f"resume={start}"], tmp_path / "unused", monkeypatch)
    assert comparable(cut) == comparable(finished)
    ours, theirs = (load(checkpoints(f / "checkpoints")[-1])["optimizer"]["masters"] for f in (cut, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    columns = ["step", "completion", "reward", "advantage"]
    a, b = (pd.read_parquet(f / "completions.parquet")[columns] for f in (cut, finished))
    pd.testing.assert_frame_equal(a, b)


def test_a_checkpoint_of_another_config_is_refused(finished, tiny, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"optimizer\.lr: 0\.01 in the checkpoint, 0\.5 here"):
        run([*tiny, "optimizer.lr=0.5", f"resume={finished}"], tmp_path, monkeypatch)


def test_epochs_kl_entropy_and_accumulation_all_run(tiny, tmp_path, monkeypatch):
    folder = run(
        [*tiny, "train.epochs=2", "policy.kl_coef=0.1", "policy.entropy_coef=0.01", "evaluate.rows=0",
         "train.gradient_accumulation_steps=2", "loss.aggregate=token_mean", "loss.advantage=leave_one_out",
         "train.total_dialog_turns=32", "train_model.gradient_checkpointing=true", "optimizer.schedule=cosine"],
        tmp_path / "run", monkeypatch,
    )  # fmt: skip
    first, second = read_metrics(folder)
    assert first["limit_fraction/score"] > 0
    assert first["kl/sampler"] > 0 and second["kl/ref"] > 0 and second["loss/kl"] > 0 and second["loss/entropy"] < 0


def test_a_sweep_runs_every_job_in_one_process(tiny, tmp_path, monkeypatch):
    overrides = [*tiny, "train.total_dialog_turns=16", "evaluate.rows=0", "optimizer.lr=1e-3,1e-4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--multirun", *overrides, f"hydra.sweep.dir={tmp_path}"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [read_metrics(tmp_path / job)[-1]["lr"] for job in "01"] == [1e-3 / 2, 1e-4 / 2]  # second of 4 warm-up steps


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=/no/such/model", "unknown model"),
        ("env.path=/no/such/file.jsonl", "no/such/file"),
        ("env.repeats=1", "env.repeats is 1"),
        ("train.optim_batch_size=10", "not a multiple of env.repeats=4"),
        ("inference_model.max_model_len=9", "the prompt of row"),
        ("train_model.num_devices=99", "99"),
        ("optimizer.name=adam", "optimizer.name is 'adam'"),
        ("resume=/no/such/run", "no checkpoint there"),
        ("sampling.temperature=0", "temperature"),
    ],
)
def test_bad_input_is_told_in_one_line_before_a_model_is_loaded(tiny, tmp_path, monkeypatch, override, message):
    def no_model(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_model)
    with pytest.raises(SystemExit, match=message):
        run([*tiny, override], tmp_path / "run", monkeypatch)


def test_rows_without_their_columns_are_refused(tiny, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1?", "answer": "#### 1"}\n{"prompt": "2?"}\n')
    with pytest.raises(SystemExit, match="question"):
        run([*tiny, f"env.path={path}"], tmp_path / "run", monkeypatch)


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_refused(tiny, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(SystemExit, match="GiB free"):
        run(tiny, tmp_path / "run", monkeypatch)


def started(overrides, folder):
    command = [sys.executable, str(SCRIPT), *overrides, f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(child, folder, step):
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not any(r["step"] >= step for r in read_metrics(folder)):
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_once_finishes_the_step_checkpoints_and_says_how_to_go_on(tiny, tmp_path):
    folder = tmp_path / "run"
    child = started([*tiny, "train.total_dialog_turns=100000", "train.checkpoint_frequency=0"], folder)
    wait_for_step(child, folder, 2)
    os.kill(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    (saved,) = checkpoints(folder / "checkpoints")
    assert load(saved)["step"] == read_metrics(folder)[-1]["step"]
    assert f"resume={folder}" in output and "Traceback" not in output


def test_ctrl_c_twice_stops_now(tiny, tmp_path, monkeypatch):
    generate, goes_on_after_the_first = TransformersEngine.generate, []

    def interrupted(engine, *args, **kwargs):
        if any(row["step"] == 1 for row in read_metrics(tmp_path / "run")):
            signal.raise_signal(signal.SIGINT)
            goes_on_after_the_first.append(True)
            signal.raise_signal(signal.SIGINT)
        return generate(engine, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([*tiny, "train.checkpoint_frequency=0"], tmp_path / "run", monkeypatch)
    assert goes_on_after_the_first == [True]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1 and not checkpoints(tmp_path / "run" / "checkpoints")


def test_answers_whose_scorer_fails_are_left_out_counted_and_told(tiny, tmp_path, monkeypatch, capsys):
    reward = GSM8K._reward

    def fails_now_and_then(task, row, response, formats):
        if sum(map(ord, response)) % 7 == 3:
            return KeyError("gold")
        return reward(task, row, response, formats)

    monkeypatch.setattr(GSM8K, "_reward", fails_now_and_then)
    folder = run([*tiny, "env.max_failed_fraction=1.0"], tmp_path / "run", monkeypatch)
    counts = [row["failed/error"] for row in read_metrics(folder) if "failed/error" in row]
    assert counts == sorted(counts) and counts[-1] > 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("No reward (error), the first of its kind: GSM8K failed on") == 1
    assert sum(len(read_step(folder, step)) for step in logged_steps(folder)) < 64
    saved = json.loads(load(checkpoints(folder / "checkpoints")[-1])["collector"]["env"])
    assert f'"failed_error": {int(counts[-1])}' in json.dumps(saved)


def test_a_folder_that_holds_a_run_is_not_written_into(tiny, finished, monkeypatch):
    with pytest.raises(SystemExit, match="already holds a run"):
        run(tiny, finished, monkeypatch)


def test_a_held_out_prompt_that_is_too_long_is_found_before_a_model_is_loaded(tiny, tmp_path, monkeypatch):
    path = tmp_path / "held_out.jsonl"
    path.write_text(
        '{"question": "1?", "answer": "#### 1"}\n' * 2 + f'{{"question": "{"9" * 99}", "answer": "#### 9"}}\n'
    )
    with pytest.raises(SystemExit, match="held-out row 2 has a prompt of 101 tokens, 56 fit"):
        run([*tiny, f"env.eval_path={path}", "evaluate.rows=3"], tmp_path / "run", monkeypatch)


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tiny, finished, tmp_path, monkeypatch):
    again = run(tiny, tmp_path / "again", monkeypatch)
    assert comparable(again) == comparable(finished)
    other = run([*tiny, "train.seed=1"], tmp_path / "other", monkeypatch)
    assert comparable(other)[1:] != comparable(finished)[1:]


def test_a_finished_run_says_so_and_can_be_prolonged(tiny, finished, tmp_path, monkeypatch):
    longer = tmp_path / "longer"
    shutil.copytree(finished, longer)
    with pytest.raises(SystemExit, match="finished after 4 steps.*above 64"):
        run([*tiny, f"resume={longer}"], tmp_path / "unused", monkeypatch)
    run([*tiny, f"resume={longer}", "train.total_dialog_turns=80"], tmp_path / "unused", monkeypatch)
    assert json.loads((longer / "summary.json").read_text())["steps"] == 5
    assert [row["step"] for row in read_metrics(longer)] == [0, 1, 2, 3, 4, 4, 5, 5]


def test_what_fails_after_the_start_keeps_its_traceback(tiny, tmp_path, monkeypatch):
    from grpo_rl.buffer import GroupBuffer

    def broken(self, groups):
        raise ValueError("a bug of ours")

    monkeypatch.setattr(GroupBuffer, "extend", broken)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(RuntimeError, match="failed after step 0: a bug of ours"):
        run(tiny, tmp_path / "run", monkeypatch)


def test_a_run_reads_every_key_of_the_config(tiny, tmp_path, monkeypatch):
    """Recorded at the access itself, after the checks, which read keys only to refuse their values."""
    from omegaconf import DictConfig

    import grpo_rl.config as config

    read: set[str] = set()
    get, check = DictConfig._get_impl, config.check

    def recording_get(self, key, *args, **kwargs):
        read.add(self._get_full_key(key))
        return get(self, key, *args, **kwargs)

    def check_then_record(cfg):
        check(cfg)
        read.clear()

    monkeypatch.setattr(DictConfig, "_get_impl", recording_get)
    monkeypatch.setattr(config, "check", check_then_record)
    overrides = [*tiny, "logger.backend=wandb", "logger.mode=offline", "train.total_dialog_turns=16"]
    overrides.append("policy.kl_coef=0.1")  # without a reference nobody asks for its name
    run(overrides, tmp_path / "run", monkeypatch)
    # These are vLLM's; `build.make_engine` hands them on by name.
    of_vllm = {"inference_model.gpu_memory_utilization", "inference_model.enforce_eager"}
    of_several_processes = {"train_model.cpu_offload", "train_model.timeout_s"}  # tests/test_parallel.py
    of_async = set(config.ONLY_ASYNC)
    assert config.known_keys("gsm8k") - read == of_vllm | of_several_processes | of_async
    texts = "".join((SCRIPT.parent.parent / "grpo_rl" / name).read_text() for name in ("build_async.py", "run.py"))
    unread = [key for key in of_async | of_several_processes if f".{key.rpartition('.')[2]}" not in texts]
    assert not unread


def test_a_missing_vllm_is_told_before_a_model_is_loaded(tiny, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    with pytest.raises(SystemExit, match="vLLM is not installed; install the extra"):
        run([*tiny, "inference_model.engine=vllm"], tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("code", ["EROFS", "ENOSPC"])
def test_a_disk_that_cannot_be_written_is_told_in_one_line(tiny, tmp_path, monkeypatch, code):
    import errno

    from grpo_rl.monitor.metrics import MetricsLog

    def fail(*_):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "metrics.jsonl")

    monkeypatch.setattr(MetricsLog, "log", fail)
    with pytest.raises(
        SystemExit, match=r"error: can't write to metrics\.jsonl: .*; free some space or set hydra\.run\.dir"
    ):
        run(tiny, tmp_path / "run", monkeypatch)


def test_a_malformed_override_is_told_in_one_line(tiny, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="error: "):
        run([*tiny, "optimizer.lr=[1"], tmp_path / "run", monkeypatch)


def test_an_engine_that_sleeps_while_the_policy_trains_samples_the_same(tiny, tmp_path, monkeypatch):
    counts = {"sleep": 0, "wake": 0}
    for name in counts:
        method = getattr(TransformersEngine, name)

        def counted(engine, name=name, method=method):
            counts[name] += 1
            method(engine)

        monkeypatch.setattr(TransformersEngine, name, counted)
    awake = run([*tiny, "train.total_dialog_turns=32"], tmp_path / "awake", monkeypatch)
    assert counts["sleep"] == 0
    asleep = run([*tiny, "train.total_dialog_turns=32", "inference_model.sleep=true"], tmp_path / "asleep", monkeypatch)
    assert counts["sleep"] == 2 and counts["wake"] >= 3, "once a step, and awake for every push"
    rows = [
        [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in read_metrics(folder)]
        for folder in (awake, asleep)
    ]
    assert rows[0] == rows[1]
