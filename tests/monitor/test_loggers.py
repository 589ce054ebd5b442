"""Loggers: the built-in ones, read back from what their libraries wrote, and loggers of one's own."""

import json
import math
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tiny_runs import run_script

import grpo_rl.loggers
from grpo_rl import cli
from grpo_rl.loggers import base
from grpo_rl.loggers.base import BUILT_IN, check_loggers, logger_class
from grpo_rl.loggers.wandb import Log as WandbLog
from grpo_rl.monitor.loggers import open_loggers
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from tests.helpers import responses_by_step

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp()  # read when trackio is imported, once for all
SCRIPT = Path(__file__).parents[2] / "sota" / "grpo.py"
ROWS = [
    (0, {"eval/reward": 0.125}),
    (1, {"reward/mean": 0.25, "lr": 1e-5, "total/sampled_tokens": 10.0}),
    (2, {"reward/mean": 0.5, "lr": 2e-5, "total/sampled_tokens": 20.0}),
    (3, {"reward/mean": 0.75, "lr": 3e-5, "total/sampled_tokens": 30.0}),
]


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    """No account and no server of whoever runs the tests is found."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # so that what a logger sets is undone
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def from_wandb(run_dir):
    """(metric, step, value) of the offline runs: a LevelDB log of protobuf messages, in blocks of 32 KiB."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    points = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, parts = path.read_bytes(), 7, []
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            parts.append(data[at + 7 : at + 7 + length])
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = pb.Record.FromString(b"".join(parts))
                parts = []
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                points += [(name, row["step"], value) for name, value in row.items() if "step" in row]
    extra, axes = ("_", "a_overview/", "completions/"), ("step", "eval/step", "tokens")
    return [p for p in points if not p[0].startswith(extra) and p[0] not in axes and is_number(p[2])]


def is_number(value):
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")


def from_tensorboard(run_dir):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    found.Reload()
    return [(name, e.step, e.value) for name in found.Tags()["scalars"] for e in found.Scalars(name)]


def from_trackio(run_dir):
    trackio = pytest.importorskip("trackio", exc_type=ImportError)
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run_id = (run_dir / "trackio_id").read_text().strip()
    [project] = [p for p in storage.get_projects() for run in trackio.Api().runs(p) if run.id == run_id]
    rows = storage.get_logs(project, None, run_id=run_id)
    extra = ("step", "timestamp", "completions")
    return [(name, row["step"], value) for row in rows for name, value in row.items() if name not in extra]


def from_mlflow(run_dir):
    mlflow = pytest.importorskip("mlflow", minversion="3")
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    run_id = (run_dir / "mlflow_id").read_text().strip()
    names = client.get_run(run_id).data.metrics
    return [(name, m.step, m.value) for name in names for m in client.get_metric_history(run_id, name)]


READERS = {"wandb": from_wandb, "tensorboard": from_tensorboard, "trackio": from_trackio, "mlflow": from_mlflow}


def check_same(logger, run_dir):
    """The logger has the numbers of the run's own file, each once."""
    unsent, relative = ("step", "time", "time/at_s"), 1e-6 if logger == "tensorboard" else 1e-12
    rows, found = read_metrics(run_dir), READERS[logger](run_dir)
    expected = [(name, row["step"], value) for row in rows for name, value in row.items() if name not in unsent]
    assert sorted((name, step) for name, step, _ in found) == sorted((name, step) for name, step, _ in expected)
    values = {(name, step): float(value) for name, step, value in found}
    for name, step, value in expected:
        np.testing.assert_allclose(values[name, step], value, rtol=relative, equal_nan=True, err_msg=f"{name} {step}")


def opened(backend, run_dir, say=print, config=None, **settings):
    logger = {"backend": backend, "project": "p", "name": None, "mode": "offline", "settings": settings}
    return open_loggers(logger, run_dir, config or {"lr": 1e-5, "a": {"b": [1]}}, say)


def log(loggers, run_dir, rows):
    """The loggers, which were given these rows beside the run's own file of metrics."""
    metrics = MetricsLog(run_dir)
    for step, row in rows:
        metrics.log(step, row)
        loggers.log(step, row)
    return loggers


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_has_no_step_twice_and_none_too_few(name, tmp_path):
    """Killed after step 3 without a word, resumed after step 2, once more cut off, and then prolonged."""
    logger_class_or_skip(name)
    killed = log(opened(name, tmp_path), tmp_path, ROWS)
    if name == "wandb":  # whose own process would outlive this one's run
        killed.close(1)
    next_second(name)
    MetricsLog(tmp_path).truncate(2)
    again = [(3, {"reward/mean": 0.8, "lr": 3e-5}), (3, {"eval/reward": 0.5})]
    log(opened(name, tmp_path), tmp_path, again).close()
    check_same(name, tmp_path)
    next_second(name)
    log(opened(name, tmp_path), tmp_path, [(4, {"reward/mean": float("nan"), "lr": 0.0})]).close(1)
    check_same(name, tmp_path)


def next_second(name):
    """W&B names an offline run's folder by the second in which it began."""
    time.sleep(1.1 if name == "wandb" else 0)


def logger_class_or_skip(name):
    try:
        return logger_class(name)
    except ValueError as error:
        pytest.skip(str(error))


def wandb_cores() -> set[str]:
    """The ids of W&B's processes that this one has started, and that have not ended."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in pids if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.nightly
def test_an_offline_run_of_wandb_keeps_its_id_over_a_resume_and_what_was_uploaded(tmp_path):
    pytest.importorskip("wandb")
    before = wandb_cores()
    log = WandbLog(tmp_path, {}, project="p", mode="offline")
    log.log(1, {"reward/mean": 0.25, "total/sampled_tokens": 77.0})
    log.table(1, [{"completion": "4", "reward": 2.0}])
    assert wandb_cores()
    log.close()
    assert not wandb_cores() - before, "it may still be writing the file"
    run_id = (tmp_path / "wandb_id").read_text().strip()
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"a_overview/reward" in file.read_bytes() and b"77" in file.read_bytes()
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["completion", "reward"], "data": [["4", 2.0]]}
    assert not log.needs_history

    next_second("wandb")
    resumed = WandbLog(tmp_path, {}, 1, project="p", mode="offline")
    resumed.close()
    assert resumed.needs_history  # the earlier file is set aside, and a run logs it again
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    [aside] = tmp_path.glob("wandb/abandoned-offline-run-*")
    assert (tmp_path / "wandb_id").read_text().strip() == run_id and run_id in file.name and run_id in aside.name

    file.with_name(f"{file.name}.synced").touch()  # as `wandb sync` leaves it: neither set aside nor logged again
    next_second("wandb")
    uploaded = WandbLog(tmp_path, {}, 1, mode="offline")
    uploaded.close()
    assert not uploaded.needs_history and len([*tmp_path.glob("wandb/offline-run-*")]) == 2


@pytest.mark.slow
def test_online_without_a_key_says_how_to_go_on_without_one(tmp_path):
    pytest.importorskip("wandb")
    with pytest.raises(ValueError, match="logger.mode=offline or logger.backend=none"):
        WandbLog(tmp_path, {}, mode="online")
    assert not (tmp_path / "wandb_id").exists()


@pytest.mark.nightly
def test_all_loggers_at_once_hold_every_number_of_a_run_and_its_responses(tiny_run, tmp_path, monkeypatch):
    for name in BUILT_IN:
        logger_class_or_skip(name)
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    loggers = [f"logger.backend=[{','.join(BUILT_IN)}]", "logger.mode=offline", "evaluate.rows=4"]
    overrides = [*tiny_run, *loggers, "train.total_dialog_turns=48"]
    run_dir = run_script(SCRIPT, overrides, tmp_path / "run")
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 3, 3]
    for start in (None, run_dir / "checkpoints" / "checkpoint_000001.pt"):
        if start:
            run_script(SCRIPT, [*overrides, f"resume={start}"], tmp_path / "unused")
        for name in BUILT_IN:
            check_same(name, run_dir)
        assert list(responses_by_step(run_dir)) == [1, 2, 3]
        [newest] = run_dir.glob("wandb/offline-run-*")
        assert len(list(newest.glob("files/media/table/completions_*.table.json"))) == 3
        run_id = (run_dir / "mlflow_id").read_text().strip()
        tables = sorted((run_dir / "mlflow_artifacts" / run_id).glob("artifacts/completions/*.json"))
        assert [len(json.loads(path.read_text())["data"]) for path in tables] == [16, 16, 16]


class Flaky:
    """A logger that fails while it is away, and keeps what it got otherwise."""

    def __init__(self, run_dir, config, last_step, **settings):
        self.made_with = run_dir, config, last_step, settings
        self.away, self.got, self.tables = False, [], []
        Flaky.last = self

    def log(self, step, metrics):
        if self.away:
            raise ConnectionError("no route to host")
        self.got.append((step, dict(metrics)))

    def table(self, step, rows):
        if self.away:
            raise ConnectionError("no route to host")
        self.tables.append(step)

    def close(self, exit_code=0):
        if self.away:
            raise ConnectionError("no route to host")


HERE = __name__


def test_a_logger_that_fails_is_named_once_rests_and_ends_no_run(tmp_path):
    said = []
    rows = [(step, {"x": math.nan if step == 3 else float(step)}) for step in range(1, 40)]
    loggers = log(opened([f"{HERE}:Flaky", "tensorboard"], tmp_path, said.append), tmp_path, rows[:1])
    flaky = Flaky.last
    flaky.away = True
    log(loggers, tmp_path, rows[1:2])
    loggers.table(2, [{"reward": 1.0, "prompt": "p", "completion": "c"}])
    flaky.away = False
    log(loggers, tmp_path, rows[2:])
    assert [step for step, _ in flaky.got] == [1, *range(22, 40)] and flaky.tables == []  # 20 calls after the failure
    flaky.away = True
    loggers.close()
    assert said == [
        f"Warning. The logger {HERE}:Flaky failed at step 2 (ConnectionError: no route to host). The run goes on; "
        "metrics.jsonl has everything",
        f"Warning. The logger {HERE}:Flaky missed 22 calls; send the run again: grpo-rl send {tmp_path}",
    ]
    check_same("tensorboard", tmp_path)


@pytest.mark.parametrize("name", [f"{HERE}:Flaky", "tensorboard"])
def test_a_run_is_sent_again_as_a_whole_and_in_the_place_of_what_the_logger_has(name, tmp_path):
    log(opened(name, tmp_path), tmp_path, ROWS)
    logger = {"backend": name, "project": "p", "name": None, "mode": "online", "settings": {}}
    (tmp_path / "config.yaml").write_text(json.dumps({"logger": logger, "mode": "sync"}))
    assert cli.main(["send", str(tmp_path)]) == 0
    if name == "tensorboard":
        check_same(name, tmp_path)
    else:
        assert [step for step, _ in Flaky.last.got] == [0, 1, 2, 3] and Flaky.last.made_with[2] == -1
        assert cli.main(["send", str(tmp_path), "logger.backend=none"]) == 2


class NoHistory(Flaky):
    needs_history = True

    def log(self, step, metrics):
        raise ValueError("https://user:secret@host refuses it")


def test_a_logger_that_cannot_take_the_runs_history_is_an_error_without_its_secrets(tmp_path):
    log(opened("none", tmp_path), tmp_path, ROWS)
    with pytest.raises(ValueError, match=r"NoHistory can't start: ValueError: https://\S*\*\*\*\S*host"):
        opened(f"{HERE}:NoHistory", tmp_path)


PLANTED = """
LIBRARY = "planted_library"


class Log:
    def __init__(self, run_dir, config, last_step, *, project, mode="online", level=1):
        Log.made_with = project, mode, level
"""


def test_a_file_is_a_logger_that_requires_its_library_and_gets_what_its_constructor_names(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(grpo_rl.loggers, "__path__", [*grpo_rl.loggers.__path__, str(tmp_path)])
    monkeypatch.setattr(base, "BUILT_IN", [*BUILT_IN, "planted"])
    with pytest.raises(ValueError, match=r"No module named 'planted_library'\): pip install 'grpo-rl\[planted\]'"):
        check_loggers("planted", {})
    monkeypatch.setitem(sys.modules, "planted_library", ModuleType("planted_library"))
    opened("planted", tmp_path, planted={"level": 2})
    assert check_loggers("planted", {})["planted"].made_with == ("p", "offline", 2)  # and neither name nor settings


def test_names_of_built_in_loggers_are_those_of_their_files():
    folder = Path(base.__file__).parent
    assert {*BUILT_IN} == {path.stem for path in folder.glob("*.py")} - {"__init__", "base"} == READERS.keys()


def test_a_logger_of_ones_own_gets_its_settings_the_last_step_and_the_config_without_secrets(tmp_path):
    log(opened("none", tmp_path), tmp_path, ROWS)
    settings = {"Flaky": {"api_key": "abc"}}
    opened(f"{HERE}:Flaky", tmp_path, config={"logger": {"settings": settings}, "lr": 1.0}, **settings)
    masked = {"logger": {"settings": {"Flaky": {"api_key": "***"}}}, "lr": 1.0}
    assert Flaky.last.made_with == (tmp_path, masked, 3, {"api_key": "abc"})
    with pytest.raises(ValueError, match=r"logger\.settings\.wandb is "):
        check_loggers(f"{HERE}:Flaky", {"wandb": {}})
