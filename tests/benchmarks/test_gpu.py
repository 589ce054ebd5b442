"""Rows of gpu.py run one by one, each in a process that its limit ends; what they gave is written after each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

from grpo_rl.testing import random_group

pytestmark = pytest.mark.nightly

ROWS = """
import os, subprocess, sys, time
from gpu_rows import NotAvailable

def good(place):
    print("good says hello")
    yield "seconds", 3.0
    yield "rate", 2.0 if "slow" not in place.measured else place.measured["slow"]["first"]

def slow(place):
    yield "first", 1.0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place.folder / "child").write_text(str(child.pid))
    yield "second", 2.0
    time.sleep(600)

def broken(place):
    yield "seconds", 3.0
    raise ValueError("no such model\\nin two lines")

def killed(place):
    yield "seconds", 3.0
    os._exit(9)

def refused(place):
    raise NotAvailable("needs two GPUs")
    yield
"""


@pytest.fixture
def rows(script, tmp_path, monkeypatch):
    """Functions of rows in a module that another process can import."""
    (tmp_path / "some_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    script("gpu_rows")
    return script("some_rows")


@pytest.fixture
def place(script, tmp_path):
    return script("gpu_rows").Place(toy=True, device="cpu", folder=tmp_path)


@pytest.fixture
def forked(script, monkeypatch, capfd):
    """Rows that start as forks, which need no imports of their own."""
    gpu = script("gpu")
    measure = gpu.measure

    def uncaptured(*args):
        with capfd.disabled():  # a fork would print to pytest, and not into its log
            return measure(*args)

    monkeypatch.setattr(gpu, "START", "fork")
    monkeypatch.setattr(gpu, "measure", uncaptured)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_row_is_imported_and_run_by_a_new_process(script, rows, place, tmp_path):
    good = script("gpu").measure(rows.good, place, 60, log := tmp_path / "row.log")
    assert (good.figures, good.ended, good.failed) == ({"seconds": 3.0, "rate": 2.0}, None, False)
    assert log.read_text() == "good says hello\n"


@pytest.mark.usefixtures("forked")
def test_a_row_that_fails_or_is_refused_or_dies_says_so_and_keeps_the_figures_it_has(script, rows, place, tmp_path):
    measure, log = script("gpu").measure, tmp_path / "row.log"
    broken = measure(rows.broken, place, 60, log)
    assert (broken.figures, broken.ended, broken.failed) == ({"seconds": 3.0}, "ValueError: no such model", True)
    assert "Traceback" in log.read_text()
    killed = measure(rows.killed, place, 60, log)
    assert (killed.figures, killed.failed) == ({"seconds": 3.0}, True) and "exit code 9" in killed.ended
    refused = measure(rows.refused, place, 60, log)
    assert (refused.figures, refused.ended, refused.failed) == ({}, "needs two GPUs", False)
    at_full_size = measure(rows.refused, dataclasses.replace(place, toy=False), 60, log)
    assert (at_full_size.ended, at_full_size.failed) == ("needs two GPUs", True)


@pytest.mark.usefixtures("forked")
def test_a_row_over_its_limit_is_ended_with_all_that_it_started(script, rows, place, tmp_path):
    outcome = script("gpu").measure(rows.slow, place, 5, tmp_path / "row.log")
    assert outcome.figures == {"first": 1.0, "second": 2.0}
    assert outcome.failed and outcome.ended == "over its limit of 5 s"
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(child)


@pytest.mark.usefixtures("forked")
def test_the_file_is_written_after_each_row_and_later_rows_see_what_earlier_ones_measured(
    script, rows, place, tmp_path, monkeypatch
):
    gpu = script("gpu")
    bar = gpu.Bar("rate", at_least=2.0)
    table = {"slow": gpu.Row(rows.slow, 5, ()), "good": gpu.Row(rows.good, 60, (bar,))}
    out, states, printed = tmp_path / "new" / "gpu.json", [], []
    write = gpu.write

    def written(*args):
        write(*args)
        states.append(sorted(json.loads(out.read_text())["rows"]))

    monkeypatch.setattr(gpu, "write", written)
    monkeypatch.setattr(gpu, "print", lambda text, **_: printed.append(text), raising=False)
    gpu.run(table, place, out, limit_s=5 + 60 + gpu.GRACE_S + 1)
    assert states == [["slow"], ["good", "slow"]]
    found = json.loads(out.read_text())["rows"]
    assert found["slow"]["ended"] == "over its limit of 6 s"
    # What `slow` measured first is 1.0, below the bar.
    assert found["good"]["bars"] == [{"what": "rate", "bar": "at least 2", "figure": 1.0, "verdict": "missed"}]
    assert (tmp_path / "new" / "gpu_good.log").read_text() == "good says hello\n"
    assert "missed" in printed[-1]


def test_a_row_with_less_than_half_of_its_limit_left_is_not_started_and_that_is_no_failure(script, place, tmp_path):
    gpu = script("gpu")
    table = {"good": gpu.Row(print, 60, (bar := gpu.Bar("rate", at_least=2.0),))}
    outcome = gpu.run(table, place, tmp_path / "gpu.json", limit_s=gpu.GRACE_S + 29)["good"]
    reason = "not measured (29 s were left of the 60 s that are its limit)"
    assert gpu.verdict(bar, outcome.figure("rate")) == reason and not outcome.failed


def test_a_row_may_take_what_rows_before_it_left_and_later_ones_keep_their_limits(script, place, tmp_path, monkeypatch):
    gpu, given = script("gpu"), []
    now = 1000.0

    def measure(function, place, limit_s, log):
        nonlocal now
        given.append(limit_s)
        now += 15.0
        return gpu.Outcome({}, 15.0)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now)
    table = {name: gpu.Row(print, limit_s, ()) for name, limit_s in (("a", 20), ("b", 30), ("c", 10))}
    gpu.run(table, place, tmp_path / "gpu.json", limit_s=60 + gpu.GRACE_S)
    assert given == [20, 35, 30]


def test_all_rows_and_the_end_of_their_processes_fit_into_the_minutes(script):
    gpu = script("gpu")
    limits_s = sum(row.limit_s for row in gpu.ROWS.values())
    assert limits_s + gpu.GRACE_S <= 60 * gpu.MINUTES
    assert list(gpu.ROWS)[:2] == ["quickstart", "async"], "their rates are compared"


def test_a_bar_is_measured_on_a_gpu_at_full_size_alone(script, monkeypatch, tmp_path, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    seen = {}

    def run(rows, place, out, limit_s, unmeasured):
        seen.update(toy=place.toy, device=place.device, unmeasured=unmeasured, rows=list(rows), limit_s=limit_s)
        return {name: gpu.Outcome({bar.what: 1.0 for bar in row.bars}, 1.0) for name, row in rows.items()}

    monkeypatch.setattr(gpu, "run", run)
    assert gpu.main(["--only", "head", "--out", str(tmp_path / "x.json")]) == 0
    assert seen == {"toy": True, "device": "cpu", "unmeasured": "CPU", "rows": ["head"], "limit_s": 60.0 * gpu.MINUTES}
    assert "0 reached, 0 missed, 6 not measured, of 6 bars" in capsys.readouterr().out
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    gpu.main(["--toy"])
    assert (seen["toy"], seen["device"], seen["unmeasured"]) == (True, "cuda", "toy sizes")
    gpu.main([])
    assert (seen["toy"], seen["unmeasured"]) == (False, None)


class Arm:
    """An arm without a process: ours takes 2 s a step, any other 5, and those in `broken` fail."""

    broken: tuple[str, ...] = ()

    def __init__(self, name, function, *settings):
        self.name, self.is_open, self.ways = name, True, []
        made.append(self)

    def step(self, alone=False):
        assert self.is_open
        if self.name in self.broken:
            raise importlib.import_module("harness").ArmError("Traceback\nno memory")
        self.ways.append(alone)
        return {"step_s": 2.0 if self.name == "ours" else 5.0, "sample_s": 1.0, "train_s": 0.9, "sync_s": 0.1}

    def close(self):
        self.is_open = False


made: list[Arm] = []


@pytest.fixture
def no_work(script, place, monkeypatch):
    """Rows at toy sizes in which only the names and the arithmetic are their own."""
    rows = script("gpu_rows")
    toy = script("shapes").model_folder("toy", place.folder)
    step = {"time/train_s": 1.0, "time/sync_s": 0.1, "staleness/max": 2.0}
    report = {"fwd_bwd_s": 1.0, "memory_mib": 1.0, "grad_hidden_norm": 1.0, "grad_weight_norm": 1.0}
    monkeypatch.setattr(rows.Place, "model", lambda self, shape: toy)
    monkeypatch.setattr(rows, "run_script", lambda *_: [step | {"ended_s": 1.5 * i} for i in range(20)])
    monkeypatch.setattr(rows, "missing", lambda package: None)
    monkeypatch.setattr(rows, "liger_missing", lambda place: None)
    monkeypatch.setattr("grpo_rl.policies.policy.compile_model", lambda *_, **__: False)
    monkeypatch.setattr(script("gpu_training"), "peak_flops_per_s", lambda _: 1e12)
    monkeypatch.setattr(script("gpu_training"), "trained", lambda *_: 2.0)
    monkeypatch.setattr(script("prefix"), "step", lambda *_, **__: {"step_s": 1.0})
    monkeypatch.setattr(script("head"), "timed", lambda *_: lambda: report)
    monkeypatch.setattr(script("harness"), "Arm", Arm)
    made.clear()
    return rows


def test_every_bar_is_of_a_figure_that_its_row_yields(script, place, no_work):
    for name, row in script("gpu").ROWS.items():
        # The shapes of prefix are named by their sizes.
        figures = dict(row.function(dataclasses.replace(place, toy=name != "prefix")))
        assert {bar.what for bar in row.bars} <= figures.keys(), name
        if name == "async":
            assert figures["steps/s, async over sync"] == "the quickstart gave no rate"


def test_the_whole_steps_figures_come_while_its_arms_are_still_there(place, no_work):
    figures = {}
    for what, figure in no_work.whole_step(place):
        figures[what] = figure
        assert all(arm.is_open for arm in made), what
    assert figures["times faster than TRL"] == 2.5
    ours, trl = made
    # Two warm-ups and a step alone; one that frees the GPU; then in turns.
    assert (ours.ways, trl.ways) == ([True] * 3 + [False] * 2, [False] * 3)
    assert not ours.is_open and not trl.is_open


def test_where_trl_fails_with_ligers_kernels_it_runs_without(script, monkeypatch):
    trl, harness = script("step_vs_trl"), script("harness")
    settings = [trl.TRLSetting("bf16", 8, liger=True), trl.TRLSetting("bf16", 8)]
    monkeypatch.setattr(harness, "Arm", Arm)
    monkeypatch.setattr(Arm, "broken", (settings[0].name,))
    made.clear()
    failed = {}
    with contextlib.ExitStack() as stack:
        arm, setting = trl.first_that_runs(stack, None, settings, failed)
        assert setting is settings[1] and arm is made[1] and arm.is_open and not made[0].is_open
        assert failed == {settings[0].name: "no memory"}
    assert not arm.is_open
    monkeypatch.setattr(Arm, "broken", tuple(setting.name for setting in settings))
    assert trl.first_that_runs(contextlib.ExitStack(), None, settings, failed) is None and len(failed) == 2


def test_the_asynchronous_rate_is_over_the_rate_in_turns_and_devices_are_shared_on_a_gpu_alone(
    script, place, monkeypatch
):
    rows, seen = script("gpu_rows"), []
    step = {"time/train_s": 1.0, "staleness/max": 1.0}

    def run_script(script, overrides, folder):
        seen.append(overrides)
        return [step | {"ended_s": 0.5 * i} for i in range(20)]

    monkeypatch.setattr(rows, "run_script", run_script)
    monkeypatch.setattr(rows, "missing", lambda package: None)
    measured = {"quickstart": {"steps/s": 1.0}}
    figures = dict(rows.asynchronous(dataclasses.replace(place, measured=measured)))
    assert (figures["steps/s, async over sync"], figures["largest staleness, versions"]) == (2.0, 1.0)
    list(rows.asynchronous(rows.Place(toy=False, device="cuda", folder=place.folder)))
    assert [set(rows.SHARED_GPU) <= set(overrides) for overrides in seen] == [False, True]
    del step["staleness/max"]
    with pytest.raises(KeyError, match="staleness/max"):
        list(rows.asynchronous(place))


def test_a_run_is_timed_by_the_wall_clock_and_what_it_prints_goes_on(script, tmp_path, monkeypatch, capfd):
    rows = script("gpu_rows")
    (tmp_path / "sota").mkdir()
    (tmp_path / "sota" / "three.py").write_text("""
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("hydra.run.dir="))
folder.mkdir()
for step in (1, 2, 3):
    time.sleep(0.3)
    print("step", step, flush=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time/train_s": 0.1}) + "\\n")
""")
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    found = rows.run_script("three.py", [], tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    first, second, third = (row["ended_s"] for row in found)
    assert second - first > 0.15 and third - second > 0.15
    assert capfd.readouterr().out == "step 1\nstep 2\nstep 3\n"


def test_a_training_rows_groups_were_sampled_by_its_policy(script, tmp_path):
    from grpo_rl.policies.policy import TrainPolicy

    training = script("gpu_training")
    policy = TrainPolicy.load(script("shapes").model_folder("toy", tmp_path), torch.float32, compile=False)
    groups = training.sampled(policy, training.packed_groups(64, policy.model.config.vocab_size))
    log_probs, _ = policy.score(groups)
    torch.testing.assert_close(torch.cat([group.log_probs for group in groups]), log_probs.detach())
    assert all(group.old_log_probs is None for group in groups)


def test_a_config_that_the_script_refuses_is_no_failure_and_a_broken_run_is_one(script, tmp_path):
    rows = script("gpu_rows")
    with pytest.raises(rows.NotAvailable, match="not available: .*no_such_setting"):
        rows.run_script("grpo.py", ["no_such_setting=1"], tmp_path / "run")
    with pytest.raises(RuntimeError, match="no_such_script.py ended with exit code 2"):
        rows.run_script("no_such_script.py", [], tmp_path / "other")


def test_a_run_of_too_few_steps_gives_no_figure(script):
    with pytest.raises(RuntimeError, match="logged 2 steps"):
        dict(script("gpu_rows").step_figures([{"time/train_s": 1.0, "ended_s": 1.0}] * 2))


def test_a_micro_batch_that_never_fits_is_an_error(script):
    def run(tokens):
        tried.append(tokens)
        raise torch.OutOfMemoryError

    tried: list[int] = []
    with pytest.raises(torch.OutOfMemoryError):
        script("gpu_training").at_largest_micro_batch(run, 16_384)
    assert tried == [16_384, 8_192, 4_096]


def test_the_tokens_of_a_training_row_are_those_it_names(script):
    for tokens in (64, 256, 512, 16_384):
        groups = script("gpu_training").packed_groups(tokens, vocab=32)
        assert sum(group.num_tokens for group in groups) == tokens
        assert all(group.advantages.all() for group in groups), "a group without an advantage would not be computed"


def test_filled_micro_batches_hold_whole_groups_and_repeat_the_same_tokens(script):
    shape = script("prefix").Shape(prompt=5, response=3, responses=4)  # 17 tokens
    assert shape.filling(40) == 2 and shape.filling(16) == 1
    shared, repeated = shape.shared(32, groups=2), shape.repeated(32, groups=2)
    assert not torch.equal(shared[0].prompt_ids, shared[1].prompt_ids)
    assert [group.group_id for group in repeated] == list(range(8))
    assert sum(g.num_tokens for g in repeated) / sum(g.num_tokens for g in shared) == shape.token_ratio
    ids = [torch.cat([group.response_ids for group in groups]) for groups in (shared, repeated)]
    assert torch.equal(*ids)


def test_ligers_head_makes_the_gradients_of_all_logits(script):
    pytest.importorskip("liger_kernel")
    head = script("head")
    inputs = head.make_inputs(head.Shape(6, 8, 32, memory_bar=1.0), "cpu")
    inputs = [x.float() if x.is_floating_point() else x for x in inputs]
    for entropy_counts in (False, True):
        liger, plain = (head.forward_backward(h(), inputs, entropy_counts) for h in (head.liger, head.naive))
        for ours, theirs in zip(liger, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_of_a_shape_is_made_once_and_trains(script, tmp_path):
    from grpo_rl.policies.policy import TrainPolicy

    make = script("shapes").model_folder
    folder = make("toy", tmp_path)
    written = (folder / "config.json").stat().st_mtime_ns
    assert make("toy", tmp_path) == folder and (folder / "config.json").stat().st_mtime_ns == written
    policy = TrainPolicy.load(folder, torch.bfloat16)
    policy.score([random_group(vocab=policy.model.config.vocab_size)])[0].sum().backward()
    assert os.listdir(tmp_path) == ["toy"], "nothing half made is left"


@pytest.mark.parametrize(("shape", "millions"), [("0.6B", 596), ("1.7B", 1721)])
def test_the_shapes_have_the_parameters_of_their_names(script, shape, millions):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**script("shapes").SHAPES[shape], tie_word_embeddings=True))
    assert round(model.num_parameters() / 1e6) == millions
