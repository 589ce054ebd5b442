"""`grpo-rl doctor`: a tiny run that is in order has nothing to fix, and each planted defect has its own line."""

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_rl.checks import devices, machine, memory, trial
from grpo_rl.checks.check import OF_MACHINE, OF_RUN, Case, all_findings, child_process
from grpo_rl.cli import main
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.envs.guards import isolation
from grpo_rl.loggers import wandb
from grpo_rl.run.lock import FolderLock
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def look(tiny_run, tmp_path):
    """Runs some of the checks in this process, all by default; each line's kind and text by what it is about."""

    def run(*words, only=None, mode="sync", **values):
        cfg = compose_config("grpo_gsm8k", [*tiny_run, *words, f"mode={mode}"])
        case = Case(**{"settings": Settings.read(cfg), "folder": tmp_path / "run", **values})
        checks = {name: check for name, check in (OF_MACHINE | OF_RUN).items() if only is None or name in only}
        return {f.about: (f.kind, f.text) for f in all_findings(checks, case)}

    return run


def to_fix(lines):
    return {about: text for about, (kind, text) in lines.items() if kind == "FIX"}


@pytest.mark.nightly
def test_a_run_in_order_has_nothing_to_fix_and_nothing_is_left(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["doctor", *tiny_run, f"hydra.run.dir={run}"]) == 0
    out = capsys.readouterr().out
    lines = dict(re.findall(r"^(?:OK|note|FIX|SKIP) +(\S+(?: \S+)*)  +(.*)$", out, re.MULTILINE))
    assert "FIX" not in out and "Nothing to fix" in out
    assert {"packages", "run folder", "devices", "memory", "dataset", "rewards", "push", "sampler, trainer"} <= {*lines}
    assert re.match(r"20 changed tensors .* sent in .* read back the same", lines["push"])
    assert lines["collectives"] == "one process trains" and not list(tmp_path.iterdir())


def test_quick_reads_no_weights(look, tmp_path, tiny_run):
    copy = shutil.copytree(tiny_run[0].removeprefix("model.name="), tmp_path / "model")
    (copy / "model.safetensors").unlink()
    lines = look(f"model.name={copy}", quick=True)
    assert not to_fix(lines) and lines["weights"] == ("SKIP", "--quick reads none")
    assert {"model", "weights"} & to_fix(look(f"model.name={copy}")).keys()


def test_a_package_of_another_version_is_reported(look, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.1" if name == "torch" else real(name))
    lines = look(only=OF_MACHINE)
    assert list(to_fix(lines)) == ["packages"]
    assert to_fix(lines)["packages"] == "torch is 2.12.1: pip install 'torch==2.13.*'"


def test_a_push_that_loses_a_tensor_is_reported(look, monkeypatch):
    class Dropping(TransformersEngine):
        def update_weights(self, weights, version):
            lost = "model.layers.1.mlp.up_proj.weight"
            super().update_weights(((name, tensor) for name, tensor in weights if name != lost), version)

    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: Dropping(folder, 64))
    lines = look()
    assert list(to_fix(lines)) == ["push"] and "model.layers.1.mlp.up_proj.weight" in to_fix(lines)["push"]


def test_a_scorer_that_is_late_is_reported(tmp_path, tiny_run, monkeypatch):
    code = "import time\ndef slow(completions, **_):\n    time.sleep(3)\n    return [0.0] * len(completions)\n"
    (tmp_path / "scorers_of_doctor.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(6)))
    others = [word for word in tiny_run if not word.startswith("env.")]
    words = ["env.dataset=prompt_response", f"env.path={tmp_path}/rows.jsonl", "env.score_timeout_s=1"]
    words += ["env.num_envs=4", "env.repeats=4", "env.reward=scorers_of_doctor:slow", "mode=sync", *others]
    case = Case(Settings.read(compose_config("grpo_gsm8k", words)), tmp_path / "run", quick=True)
    lines = {f.about: (f.kind, f.text) for f in all_findings(OF_RUN, case)}
    assert list(to_fix(lines)) == ["rewards"]
    assert re.search("ran out of time on row 0: .* raise env.score_timeout_s", to_fix(lines)["rewards"])


def test_too_little_memory_is_reported(look, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: (2**20, "the container's limit is 1.0"))
    lines = look(quick=True)
    assert list(to_fix(lines)) == ["memory"]
    assert "0.0 GiB are free (the container's limit is 1.0)" in to_fix(lines)["memory"]


@pytest.mark.parametrize(
    ("word", "folder", "about", "told"),
    [
        ("train.keep_checkpoints=1000000000", "run", "disk", ", and 1000000001 checkpoints and the exported"),
        ("train.seed=0", "/proc/doctor/run", "run folder", "/proc can't be written"),
        ("logger.backend=no_such_package:Log", "run", "loggers", "No module named 'no_such_package'"),
        ("train_model.num_devices=2", "run", "devices", "train_model.num_devices=2, but no GPU is visible"),
        ("env.path=/no/such.jsonl", "run", "dataset", "/no/such.jsonl"),
        ("inference_model.max_model_len=9", "run", "dataset", "the prompt of row 0 has"),
    ],
)
def test_what_a_run_can_not_have_is_one_line(look, tmp_path, word, folder, about, told):
    lines = look(word, quick=True, folder=tmp_path / folder)
    assert list(to_fix(lines)) == [about] and told in to_fix(lines)[about]
    assert (lines["rewards"][0] == "SKIP") == (about == "dataset")
    assert (lines["memory"][0] == "SKIP") == (about == "devices")


def test_the_folder_is_the_one_that_the_run_resumes_in_and_holds_no_other_run_or_process(look, tmp_path):
    run, file = tmp_path / "run", tmp_path / "run" / "checkpoints" / "checkpoint_000003.pt"
    lock = FolderLock(run)
    assert f"is in use by process {os.getpid()}" in to_fix(look(only=OF_MACHINE))["run folder"]
    lock.close()
    assert not to_fix(look(only=OF_MACHINE))
    file.parent.mkdir(parents=True)
    file.touch()
    assert "already holds a run" in to_fix(look(only=["run folder"]))["run folder"]
    for resume in (run, file):
        text = look(f"resume={resume}", only=["run folder"], folder=tmp_path / "new")["run folder"][1]
        assert text.startswith(f"{run}: written, locked")
    told = to_fix(look("resume=/no/such", only=["run folder"]))["run folder"]
    assert "resume=/no/such: no checkpoint there" in told


def test_wandb_needs_a_key_online_alone(look, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in wandb.KEYS:
        monkeypatch.delenv(name, raising=False)

    def found(*words):
        return look("logger.backend=wandb", *words, only=["loggers"])["wandb"]

    assert found()[0] == "FIX" and "no key is here: wandb login" in found()[1]
    assert found("logger.mode=offline")[0] == "OK"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password good\n")
    assert found()[0] == "OK"


def test_rows_are_compared_with_steps_and_all_checkpoints_are_counted(look):
    lines = look(only=["dataset", "disk"])  # 4 steps of 4 prompts, a checkpoint after each, and one that is written
    assert ", and 5 checkpoints and" in lines["disk"][1]
    kind, text = lines["dataset"]
    assert kind == "OK" and text.startswith("6 rows; 4 steps of 4 prompts see each 2.7 times")
    kind, text = look("train.total_dialog_turns=1600", only=["dataset"])["dataset"]
    assert kind == "note" and "see each 67 times; " in text and "That often" in text


def test_limits_of_files_and_shared_memory_are_reported(look, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 10**6))
    monkeypatch.setattr(machine.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 2**14) + (0,) * 5))
    told = to_fix(look("inference_model.engine=vllm", only=["open files", "shared memory"], mode="async"))
    assert told["open files"].startswith("256 at a time, and this run needs 4,096: ulimit -n 4096;")
    assert told["shared memory"].startswith("64 MiB free in /dev/shm, and this run needs 256: docker run --shm-size")


@pytest.mark.parametrize(("limit", "free_gib"), [(None, 8), (4, 2), (100, 8)])
def test_free_memory_is_the_machines_or_the_containers(tmp_path, monkeypatch, limit, free_gib):
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    (tmp_path / "memory.max").write_text(str(limit * 2**30) if limit else "max")
    (tmp_path / "memory.current").write_text(str(3 * 2**30))  # of which one is a cache of files
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    free, bound = machine.free_memory(tmp_path)
    assert free == free_gib * 2**30 and ("container" in bound) == (limit == 4)


TWO = ["train_model.num_devices=2", "train_model.parallel=ddp", "inference_model.engine=vllm"]


@pytest.mark.alone  # its processes have 30 s to start and meet
def test_as_many_processes_as_train_sum_a_tensor_and_one_that_fails_is_named_first(look, monkeypatch, tmp_path):
    pytest.importorskip("ray")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    kind, text = look(*TWO, only=["collectives"], mode="async")["collectives"]
    assert kind == "OK" and text.startswith("2 processes summed a tensor in ")
    code = "import time\ndef fails(_, __, rank, *___):\n    if rank == 1:\n        raise OSError('no such network')\n"
    (tmp_path / "planted_ranks.py").write_text(f"{code}    time.sleep(100)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(devices, "all_reduce", importlib.import_module("planted_ranks").fails)
    monkeypatch.setattr(devices, "COLLECTIVE_S", 3.0)
    told = to_fix(look(*TWO, only=["devices", "collectives"], mode="async"))
    assert told["collectives"].startswith("2 of 2 could not sum a tensor; rank 1: OSError: no such network")


def test_a_trial_of_a_run_with_several_trainers_keeps_the_first_and_the_engines_device(tiny_run):
    words = ["train_model.devices=[2,3]", "inference_model.devices=[0]", "train_model.parallel=ddp", "mode=sync"]
    settings = trial.in_one_process(Settings.read(compose_config("grpo_gsm8k", [*tiny_run, *words])), gpus=4)
    assert (settings.train_model.devices, settings.inference_model.devices) == ((2,), (0,))


PLANTED = """
import os, time
from grpo_rl.checks.check import Finding

def fine(case):
    yield Finding("OK", "fine", str(os.getpid()))

def hangs(case):
    yield Finding("OK", "before", "")
    time.sleep(60)

last = fine

def dies(case):
    print("last words", flush=True)
    os._exit(3)
    yield

def fails(case):
    yield {}["key"]
"""


@pytest.mark.nightly
def test_what_hangs_dies_or_fails_is_named_and_the_rest_is_reported(tmp_path, monkeypatch):
    (tmp_path / "planted_checks.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    checks = {name: ("planted_checks", ()) for name in ("fine", "hangs", "dies", "fails", "last")}
    with child_process(20.0) as run:
        found = list(all_findings(checks, Case(None, tmp_path), run))
    told = [(finding.kind, finding.about) for finding in found]
    failed = [("FIX", name) for name in ("hangs", "dies", "fails")]
    assert told == [("OK", "fine"), ("OK", "before"), *failed, ("OK", "fine")]
    first, _, hangs, dies, fails, last = (finding.text for finding in found)
    assert hangs.startswith("no result within 10 s, at planted_checks.py:10 (hangs); if it is only slow, --deadline-s")
    assert "exit code 3" in dies and "last output: last words" in dies
    assert fails == "KeyError: 'key'"
    for pid in {first, last}:
        assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_cant_be_started_is_named_by_each_check(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "_WORKER", "print('no room'); raise SystemExit(3)")
    with child_process(20.0) as run:
        found = list(all_findings(dict.fromkeys(("a", "b"), ("planted_checks", ())), Case(None, tmp_path), run))
    assert [(finding.kind, finding.about) for finding in found] == [("FIX", "a"), ("FIX", "b")]
    assert "exit code 3; its last output: no room" in found[0].text


@pytest.mark.nightly
def test_settings_that_cant_be_read_leave_the_machine_to_be_told(capsys, tmp_path):
    assert main(["doctor", "env.repeat=4", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    out = capsys.readouterr().out
    assert "FIX   config            unknown config key env.repeat; did you mean env.repeats?" in out
    assert "OK    run folder" in out and "To fix: config (" in out
