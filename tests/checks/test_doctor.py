"""`grpo-rl doctor`: a tiny run that is in order has nothing to fix, and each planted defect is told by its own line."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_rl.checks import devices, machine, memory, trial
from grpo_rl.checks.check import OF_MACHINE, OF_RUN, Case, all_findings, child_process
from grpo_rl.checks.finding import Finding
from grpo_rl.cli import main
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.envs.guards import isolation
from grpo_rl.run.lock import FolderLock
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _own_cache(own_cache):
    pass


@pytest.fixture
def look(tiny_run, tmp_path):
    """Runs some of the checks in this process, all by default; each line's kind and text by what it is about."""

    def run(*words, only=None, mode="sync", **values):
        cfg = compose_config("grpo_gsm8k", [*tiny_run, *words])
        cfg.mode = mode
        case = Case(**{"settings": Settings.read(cfg), "folder": tmp_path / "run", **values})
        checks = {name: check for name, check in (OF_MACHINE | OF_RUN).items() if only is None or name in only}
        return {f.about: (f.kind, f.text) for f in all_findings(checks, case)}

    return run


def to_fix(lines):
    return {about: text for about, (kind, text) in lines.items() if kind == "FIX"}


class Wrapped(TransformersEngine):
    """An engine of the trial, where a test plants a defect."""


def plant_engine(monkeypatch, engine):
    monkeypatch.setattr(trial, "make_engine", lambda settings, folder, devices: engine(folder, 64))


# ---- in order ----


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


def test_help_takes_less_than_a_second_and_imports_nothing_heavy():
    code = "import sys; from grpo_rl.cli import main\ntry: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
    code += "import resource; print(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_torch = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 1 and has_torch == "False"
    assert len(done.stdout.splitlines()) < 100


# ---- planted defects ----


def test_a_package_of_another_version_is_told(look, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.1" if name == "torch" else real(name))
    lines = look(only=OF_MACHINE)
    assert list(to_fix(lines)) == ["packages"]
    assert to_fix(lines)["packages"] == "torch is 2.12.1: pip install 'torch==2.13.*'"


def test_too_few_devices_are_told(look):
    lines = look("train_model.num_devices=2", quick=True)
    assert list(to_fix(lines)) == ["devices"]
    assert to_fix(lines)["devices"].startswith("train_model.num_devices=2, but no GPU is visible")
    assert lines["memory"] == ("SKIP", "not looked at before devices is in order")
    assert lines["rewards"][0] == "OK"  # which no device is needed for


def test_a_model_without_a_chat_template_is_told(look, tmp_path, tiny_run):
    copy = shutil.copytree(tiny_run[0].removeprefix("model.name="), tmp_path / "model")
    (copy / "chat_template.jinja").unlink()
    lines = look(f"model.name={copy}", quick=True)
    assert (
        list(to_fix(lines)) == ["chat template"]
        and "model.chat_template=... gives one" in to_fix(lines)["chat template"]
    )


def test_a_push_that_loses_a_tensor_is_told(look, monkeypatch):
    class Dropping(Wrapped):
        def update_weights(self, weights, version):
            lost = "model.layers.1.mlp.up_proj.weight"
            super().update_weights(((name, tensor) for name, tensor in weights if name != lost), version)

    plant_engine(monkeypatch, Dropping)
    lines = look()
    assert list(to_fix(lines)) == ["push"] and "model.layers.1.mlp.up_proj.weight" in to_fix(lines)["push"]


SCORERS = """
import time
def slow(completions, **_):
    time.sleep(3)
    return [0.0 for _ in completions]
def wrong(completions, **_):
    raise KeyError("answer")
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [("slow", "ran out of time on row 0: .* raise env.score_timeout_s"), ("wrong", "failed on row 0: .*answer")],
)
def test_a_scorer_that_is_late_or_fails_is_told(look, tmp_path, tiny_run, monkeypatch, name, told):
    (tmp_path / "scorers_of_doctor.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(6)))
    model, *others = [word for word in tiny_run if not word.startswith("env.")]
    words = [
        "env.dataset=prompt_response",
        f"env.path={tmp_path}/rows.jsonl",
        "env.score_timeout_s=1",
        "env.num_envs=4",
    ]
    words += ["env.repeats=4", f"env.reward=scorers_of_doctor:{name}", *others]
    cfg = compose_config("grpo_gsm8k", [model, *words])
    cfg.mode = "sync"
    case = Case(Settings.read(cfg), tmp_path / "run", quick=True)
    lines = {f.about: (f.kind, f.text) for f in all_findings(OF_RUN, case)}
    assert list(to_fix(lines)) == ["rewards"] and re.search(told, to_fix(lines)["rewards"])


def test_too_little_memory_is_told(look, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: (2**20, "the container's limit is 1.0"))
    lines = look(quick=True)
    assert list(to_fix(lines)) == ["memory"]
    assert "0.0 GiB are free (the container's limit is 1.0)" in to_fix(lines)["memory"]


def test_a_disk_that_checkpoints_do_not_fit_on_is_told(look):
    lines = look("train.keep_checkpoints=1000000000", quick=True)
    assert list(to_fix(lines)) == ["disk"]
    assert re.match(
        r".* GiB are free at .*, and 1000000001 checkpoints and the exported model take", to_fix(lines)["disk"]
    )


def test_checkpoints_that_are_all_kept_are_counted(look, monkeypatch):
    # 64 responses in steps of 16, a checkpoint after each, and one that is being written
    assert ", and 5 checkpoints and" in look(only=["disk"])["disk"][1]


def test_a_folder_that_cant_be_written_is_told(look):
    lines = look(quick=True, folder=Path("/proc/doctor/run"))
    assert list(to_fix(lines)) == ["run folder"] and "/proc can't be written" in to_fix(lines)["run folder"]


def test_a_folder_that_holds_a_run_is_told(look, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    assert "already holds a run" in to_fix(look(only=OF_MACHINE))["run folder"]
    assert not to_fix(look(f"resume={tmp_path / 'run'}", only=OF_MACHINE))
    backup = tmp_path / "backup.pt"
    backup.write_bytes(b"")
    assert "already holds a run" in to_fix(look(f"resume={backup}", only=OF_MACHINE))["run folder"]
    (tmp_path / "run" / ".began_from").write_text(json.dumps({"checkpoint": str(backup), "step": 1}))
    assert not to_fix(look(f"resume={backup}", only=OF_MACHINE))


def test_the_folder_is_the_one_that_the_run_resumes_in(look, tmp_path):
    run, file = tmp_path / "earlier", tmp_path / "earlier" / "checkpoints" / "checkpoint_000003.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    for resume in (run, file.parent, file):
        assert look(f"resume={resume}", only=["run folder"])["run folder"][1].startswith(f"{run}: written, locked")
    (tmp_path / "empty").mkdir()
    for resume in (tmp_path / "empty", "/no/such"):
        assert (
            f"resume={resume}: no checkpoint there"
            in to_fix(look(f"resume={resume}", only=["run folder"]))["run folder"]
        )


def test_processes_that_write_to_the_folder_are_leftovers_but_those_of_the_same_job(look, tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / "run")
    assert f"is in use by process {os.getpid()}" in to_fix(look(only=OF_MACHINE))["leftovers"]
    lock.close()
    assert not to_fix(look(only=OF_MACHINE))
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"st')  # a torn line is no step
    code = "import sys, time; file = open(sys.argv[2], sys.argv[1]); print(1, flush=True); time.sleep(60)"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    FolderLock(tmp_path / "run" / "other").close()
    (tmp_path / "run" / ".doctor_x").mkdir()
    inner = [str(tmp_path / "run" / name / "a") for name in ("other", ".doctor_x")]
    cases = [("r", "1", False, file), ("a", "1", True, file), ("a", "17", False, file)]
    for mode, job, leftover, path in [*cases, *(("a", "1", False, path) for path in inner)]:
        process = subprocess.Popen([sys.executable, "-c", code, mode, str(path)], stdout=subprocess.PIPE)
        try:
            assert process.stdout and process.stdout.readline()
            with monkeypatch.context() as here:
                here.setenv("SLURM_JOB_ID", job)
                told = to_fix(look(only=OF_MACHINE))
            assert list(told) == ["leftovers"] * leftover
            assert not leftover or f"pid {process.pid} (" in told["leftovers"]
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    requests = pytest.importorskip("requests")
    netrc, post = tmp_path / "netrc", requests.post
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setattr(requests, "post", lambda *_, **__: pytest.fail("somebody is asked"))
    return SimpleNamespace(netrc=netrc, post=post)


def test_wandb_online_without_a_key_is_told_and_nobody_is_asked(look, no_key):
    pytest.importorskip("wandb")
    lines = look("logger.backend=wandb", quick=True)
    assert list(to_fix(lines)) == ["wandb"] and "no key is here: wandb login" in to_fix(lines)["wandb"]
    lines = look("logger.backend=wandb", "logger.mode=offline", only=["loggers"])
    assert lines["wandb"] == ("OK", "offline: no key is needed, and nothing is sent; `wandb sync` uploads it later")


def test_the_key_of_wandb_is_asked_of_its_server(look, no_key, monkeypatch):
    pytest.importorskip("wandb")
    status = 401

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            right = self.headers["Authorization"] == "Basic YXBpOmdvb2Q="  # base64 of api:good
            self.send_response(200 if right else status)
            self.end_headers()
            self.wfile.write(b'{"data": {"viewer": {"username": "kim"}}}' if right else b"{}")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("requests.post", no_key.post)
        monkeypatch.setenv("WANDB_BASE_URL", url)
        no_key.netrc.write_text("machine 127.0.0.1 login user password good\n")
        assert look("logger.backend=wandb", only=["loggers"])["wandb"] == ("OK", f"online as kim at {url}")
        monkeypatch.setenv("WANDB_API_KEY", "bad")
        assert "the key is refused" in to_fix(look("logger.backend=wandb", only=["loggers"]))["wandb"]
        status = 503
        assert f"{url} answers 503 Service" in to_fix(look("logger.backend=wandb", only=["loggers"]))["wandb"]
        server.shutdown()
    assert "can't be reached" in to_fix(look("logger.backend=wandb", only=["loggers"]))["wandb"]


def test_a_logger_that_cant_be_imported_is_told(look):
    lines = look("logger.backend=no_such_package:Log", only=["loggers"])
    assert "No module named 'no_such_package'" in to_fix(lines)["loggers"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["env.path=/no/such.jsonl"], "/no/such.jsonl"),
        (["inference_model.max_model_len=9"], "the prompt of row 0 has"),
    ],
)
def test_data_that_cant_be_used_are_told(look, words, told):
    lines = look(*words, quick=True)
    assert list(to_fix(lines)) == ["dataset"] and told in to_fix(lines)["dataset"]
    assert lines["rewards"][0] == "SKIP"


def test_rows_are_compared_with_steps(look):
    kind, text = look(only=["dataset"])["dataset"]  # 4 steps of 4 prompts
    assert kind == "OK" and text.startswith("6 rows; 4 steps of 4 prompts see each 2.7 times")
    kind, text = look("env.num_envs=8", "train.optim_batch_size=32", only=["dataset"])["dataset"]
    assert kind == "note" and "lower env.num_envs to 6" in text
    kind, text = look("train.total_dialog_turns=1600", only=["dataset"])["dataset"]
    assert kind == "note" and "see each 67 times; " in text and "That often" in text


def test_limits_of_files_and_shared_memory_are_told(look, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 10**6))
    monkeypatch.setattr(machine.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 2**14) + (0,) * 5))
    told = to_fix(look("inference_model.engine=vllm", only=["open files", "shared memory"], mode="async"))
    assert told["open files"].startswith("256 at a time, and this run needs 4,096: ulimit -n 4096;")
    assert told["shared memory"].startswith("64 MiB free in /dev/shm, and Ray need 256: docker run --shm-size=8g")


@pytest.mark.parametrize(("limit", "free_gib"), [(None, 8), (4, 2), (100, 8)])
def test_free_memory_is_the_machines_or_the_containers(tmp_path, limit, free_gib):
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(str(limit * 2**30) if limit else "max")
    (tmp_path / "memory.current").write_text(str(3 * 2**30))  # of which one is a cache of files
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    free, bound = machine.free_memory(tmp_path, tmp_path / "meminfo")
    assert free == free_gib * 2**30 and ("container" in bound) == (limit == 4)


# ---- collectives ----

TWO = ["train_model.num_devices=2", "train_model.parallel=ddp", "inference_model.engine=vllm"]


@pytest.fixture
def cores(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))


@pytest.mark.nightly
def test_as_many_processes_as_train_sum_a_tensor(look, cores):
    kind, text = look(*TWO, only=["collectives"], mode="async")["collectives"]
    assert kind == "OK" and text.startswith("2 processes summed a tensor in ")


@pytest.mark.nightly
def test_a_rank_that_fails_is_named_before_those_that_waited_for_it(look, cores, monkeypatch, tmp_path):
    code = (
        "import time\ndef fails(host, port, rank, *_):\n    if rank == 1:\n        raise OSError('no such network')\n"
    )
    (tmp_path / "planted_ranks.py").write_text(f"{code}    time.sleep(100)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(devices, "all_reduce", importlib.import_module("planted_ranks").fails)
    monkeypatch.setattr(devices, "COLLECTIVE_S", 3.0)
    told = to_fix(look(*TWO, only=["devices", "collectives"], mode="async"))
    assert told["collectives"].startswith("2 of 2 could not sum a tensor; rank 1: OSError: no such network")
    assert "GLOO_SOCKET_IFNAME" in told["collectives"]


def test_a_trial_of_a_run_with_several_trainers_keeps_the_first_and_the_engines_device(tiny_run):
    words = ["train_model.devices=[2,3]", "inference_model.devices=[0]", "train_model.parallel=ddp"]
    cfg = compose_config("grpo_gsm8k", [*tiny_run, *words])
    cfg.mode = "sync"
    settings = trial.in_one_process(Settings.read(cfg), gpus=4)
    assert (settings.train_model.devices, settings.inference_model.devices) == ((2,), (0,))


# ---- one check never hides the others ----

PLANTED = """
import os, signal, sys, time
from grpo_rl.checks.finding import Finding

def fine(case):
    yield Finding("OK", "fine", str(os.getpid()))

def hangs(case):
    yield Finding("OK", "first", "before it hangs")
    time.sleep(60)

weights, last = hangs, fine

def dies(case):
    print("last words", flush=True)
    os._exit(3)
    yield

def killed(case):
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def fails(case):
    yield {}["key"]
"""


@pytest.mark.nightly
def test_what_hangs_dies_or_fails_is_named_and_the_rest_is_told(tmp_path, monkeypatch):
    (tmp_path / "planted_checks.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    checks = {name: ("planted_checks", ()) for name in ("fine", "hangs", "dies", "killed", "fails", "last")}
    with child_process(20.0) as run:
        found = list(all_findings(checks, Case(None, tmp_path), run))
    told = [(finding.kind, finding.about) for finding in found]
    assert told[0] == ("OK", "fine") and told[-1] == ("OK", "fine")
    assert told[1] == ("OK", "first")  # found before the check hangs
    assert told[2:-1] == [("FIX", "hangs"), ("FIX", "dies"), ("FIX", "killed"), ("FIX", "fails")]
    first, _, hangs, dies, killed, fails, last = (finding.text for finding in found)
    assert hangs.startswith("no result within 10 s, at planted_checks.py:10 (hangs); if it is only slow, --deadline-s")
    assert "exit code 3" in dies and "last words: last words" in dies and "SIGKILL" in killed
    assert fails == "KeyError: 'key'"
    for pid in {first, last}:
        assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_cant_be_started_is_named_by_each_check(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "_WORKER", "print('no room'); raise SystemExit(3)")
    with child_process(20.0) as run:
        found = list(all_findings(dict.fromkeys(("a", "b"), ("planted_checks", ())), Case(None, tmp_path), run))
    assert [(finding.kind, finding.about) for finding in found] == [("FIX", "a"), ("FIX", "b")]
    assert "exit code 3; its last words: no room" in found[0].text


@pytest.mark.nightly
def test_what_the_deadline_leaves_no_time_for_is_skipped(tmp_path, monkeypatch):
    (tmp_path / "planted_checks.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    checks = {"weights": ("planted_checks", ()), "fine": ("planted_checks", ())}
    with child_process(4.0) as run:
        found = list(all_findings(checks, Case(None, tmp_path), run))
    assert found[-2].text.startswith("no result within ")
    assert found[-1] == Finding("SKIP", "fine", "the 4 s are over; --deadline-s gives more")


@pytest.mark.nightly
def test_settings_that_cant_be_read_leave_the_machine_to_be_told(capsys, tmp_path):
    assert main(["doctor", "env.repeat=4", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    out = capsys.readouterr().out
    assert "FIX   config            unknown config key env.repeat; did you mean env.repeats?" in out
    assert "OK    run folder" in out and "To fix: config (" in out


def test_a_cluster_that_does_not_answer_is_one_line(capsys):
    pytest.importorskip("ray")
    assert main(["doctor", "--ray", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: no Ray cluster answers at ray.address=127.0.0.1:1") and "\n" not in error
