"""Rows of gpu.py run one by one, each in a process that its limit ends; what they gave is written after each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from grpo_rl.testing import random_group

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


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_row_that_fails_or_is_refused_or_dies_says_so_and_keeps_the_figures_it_has(script, rows, place, tmp_path):
    measure, log = script("gpu").measure, tmp_path / "row.log"
    good = measure(rows.good, place, 60, log)
    assert (good.figures, good.ended, good.failed) == ({"seconds": 3.0, "rate": 2.0}, None, False)
    assert log.read_text() == "good says hello\n"
    broken = measure(rows.broken, place, 60, log)
    assert (broken.figures, broken.ended, broken.failed) == ({"seconds": 3.0}, "ValueError: no such model", True)
    assert "Traceback" in log.read_text()
    killed = measure(rows.killed, place, 60, log)
    assert (killed.figures, killed.failed) == ({"seconds": 3.0}, True) and "exit code 9" in killed.ended
    refused = measure(rows.refused, place, 60, log)
    assert (refused.figures, refused.ended, refused.failed) == ({}, "needs two GPUs", False)


@pytest.mark.slow
def test_a_row_over_its_limit_is_ended_with_all_that_it_started(script, rows, place, tmp_path):
    outcome = script("gpu").measure(rows.slow, place, 20, tmp_path / "row.log")
    assert outcome.figures == {"first": 1.0, "second": 2.0}
    assert outcome.failed and outcome.ended == "over its limit of 20 s"
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(child)


@pytest.mark.slow
def test_the_file_is_written_after_each_row_and_later_rows_see_what_earlier_ones_measured(
    script, rows, place, tmp_path, capsys
):
    gpu = script("gpu")
    bar = gpu.Bar("rate", "", at_least=2.0)
    table = {"slow": gpu.Row(rows.slow, 20, ()), "good": gpu.Row(rows.good, 60, (bar,))}
    out, states = tmp_path / "new" / "gpu.json", []
    write = gpu.write

    def written(*args):
        write(*args)
        states.append(sorted(json.loads(out.read_text())["rows"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "write", written)
        gpu.run(table, place, out, limit_s=300)
    assert states == [["slow"], ["good", "slow"]]
    found = json.loads(out.read_text())["rows"]
    assert found["slow"]["ended"] == "over its limit of 20 s"
    # What `slow` measured first is 1.0, below the bar.
    assert found["good"]["bars"] == [{"what": "rate", "bar": "at least 2", "figure": 1.0, "verdict": "missed"}]
    assert (tmp_path / "new" / "gpu_good.log").read_text() == "good says hello\n"
    assert "missed" in capsys.readouterr().out


def test_rows_for_which_no_time_is_left_are_not_started(script, rows, place, tmp_path):
    gpu = script("gpu")
    table = {"good": gpu.Row(rows.good, 60, (bar := gpu.Bar("rate", "", at_least=2.0),))}
    outcome = gpu.run(table, place, tmp_path / "gpu.json", limit_s=0.5)["good"]
    reason = "not measured (the 0.00833333 minutes of the whole were over)"
    assert bar.verdict(outcome.figure("rate")) == reason and not outcome.failed


def test_a_bar_is_measured_on_a_gpu_at_full_size_alone(script, monkeypatch, tmp_path, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    seen = {}

    def run(rows, place, out, limit_s, unmeasured):
        seen.update(toy=place.toy, device=place.device, unmeasured=unmeasured, rows=list(rows), limit_s=limit_s)
        return {name: gpu.Outcome({bar.what: 1.0 for bar in row.bars}, 1.0) for name, row in rows.items()}

    monkeypatch.setattr(gpu, "run", run)
    assert gpu.main(["--only", "head", "--out", str(tmp_path / "x.json")]) == 0
    assert seen == {"toy": True, "device": "cpu", "unmeasured": "CPU", "rows": ["head"], "limit_s": 480.0}
    assert "0 reached, 0 missed, of 6 bars" in capsys.readouterr().out
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    gpu.main(["--toy"])
    assert (seen["toy"], seen["device"], seen["unmeasured"]) == (True, "cuda", "toy sizes")
    gpu.main([])
    assert (seen["toy"], seen["unmeasured"]) == (False, None)


@pytest.mark.slow
def test_every_bar_is_of_a_figure_that_its_row_yields(script, place, monkeypatch):
    """The names of the head's, the training's and the steps' figures, at toy sizes."""
    gpu, rows, training = script("gpu"), script("gpu_rows"), script("gpu_training")
    step = [{"time/train_s": 1.0, "time/sync_s": 0.1}] * 4
    monkeypatch.setattr(rows, "run_script", lambda *_: step)
    monkeypatch.setattr(rows, "recipe", lambda _: [])
    found = {"quickstart": dict(rows.quickstart(place)), "async": dict(rows.asynchronous(place))}
    monkeypatch.setattr(rows.Place, "model", lambda self, shape: script("shapes").model_folder("toy", self.folder))
    monkeypatch.setattr(training, "trained", lambda *_: 2.0)
    found["training 0.6B"] = found["training 1.7B"] = dict(training.training(place, "0.6B"))
    for name, figures in found.items():
        assert {bar.what for bar in gpu.ROWS[name].bars} <= figures.keys(), name
    assert found["async"]["steps/s over the quickstart's in turns"] == "the quickstart gave no rate to compare with"


@pytest.mark.slow
def test_a_config_that_the_script_refuses_is_no_failure_and_a_broken_run_is_one(script, tmp_path):
    rows = script("gpu_rows")
    with pytest.raises(rows.NotAvailable, match="not available: .*no_such_setting"):
        rows.run_script("grpo.py", ["no_such_setting=1"], tmp_path / "run")
    with pytest.raises(RuntimeError, match="no_such_script.py ended with exit code 2"):
        rows.run_script("no_such_script.py", [], tmp_path / "other")


def test_a_run_of_too_few_steps_gives_no_figure(script):
    with pytest.raises(RuntimeError, match="logged 2 steps"):
        dict(script("gpu_rows").step_figures([{"time/train_s": 1.0}] * 2))


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


@pytest.mark.slow
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
