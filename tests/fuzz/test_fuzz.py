"""Every reader of foreign text and files against hostile inputs; `make fuzz` runs the same targets by the million."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import fuzz_targets
import pytest
from fuzz_inputs import FRAGMENTS, as_bytes, mutated
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo_rl.storage.yaml_text import read_yaml

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)


def texts(seeds):
    """Texts in pieces of the seeds, of the fragments and of anything else."""
    piece = st.one_of(st.sampled_from(seeds), st.sampled_from(FRAGMENTS), st.text(max_size=12))
    cut = st.builds(lambda text, at: text[: at % (len(text) + 1)], st.sampled_from(seeds), st.integers(0, 999))
    return st.lists(st.one_of(piece, cut), max_size=4).map("".join)


def files(seeds):
    """Bytes of the seeds with some of them changed, cut or put in."""
    change = st.tuples(st.integers(0, 1 << 16), st.one_of(st.binary(max_size=8), st.sampled_from([*FRAGMENTS])))

    def changed(seed, changes, keep):
        for at, piece in changes:
            piece = piece if isinstance(piece, bytes) else as_bytes(piece)
            at %= len(seed) + 1
            seed = seed[:at] + piece + seed[at + len(piece) * keep :]
        return seed

    return st.builds(changed, st.sampled_from(seeds), st.lists(change, max_size=5), st.booleans())


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz_targets.TARGETS, ids=lambda target: target.name)
def test_no_seed_breaks_a_reader_or_runs_as_code(target, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in fuzz_targets.seeds_read_once(target, tmp_path):
        fuzz_targets.run(target, data, tmp_path)
    assert canary.touched(tmp_path) == [] and not (tmp_path / "planted").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("target", fuzz_targets.TARGETS, ids=lambda target: target.name)
def test_no_input_breaks_a_reader_or_runs_as_code(target, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seeds = fuzz_targets.seeds_read_once(target, tmp_path)

    @settings(max_examples=target.examples, phases=PHASES, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(files(seeds) if isinstance(seeds[0], bytes) else texts(seeds))
    def holds(data):
        fuzz_targets.run(target, data, tmp_path)

    holds()
    assert canary.touched(tmp_path) == [] and not (tmp_path / "planted").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("target", [target for target in fuzz_targets.TARGETS if target.error is None],
                         ids=lambda target: target.name)  # fmt: skip
def test_a_line_of_a_megabyte_takes_no_longer_than_its_deadline(target, tmp_path, canary):
    seeds, rng = fuzz_targets.seeds_read_once(target, tmp_path), Random(0)
    for piece in rng.sample(FRAGMENTS, 3):
        fuzz_targets.run(target, rng.choice(seeds) + piece * (2**20 // len(piece)), tmp_path)


# ---- the fuzzer itself: each kind of harm is seen ----


def target_of(read, error=None, **more):
    return fuzz_targets.Target("planted", lambda data, folder: data, read, lambda folder: ["x"], error=error, **more)


def test_an_input_follows_from_its_seed():
    assert mutated(Random("0/x/7"), ["abc"]) == mutated(Random("0/x/7"), ["abc"]) != mutated(Random("0/x/8"), ["abc"])


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda text: eval("1 + 1"), "did .*exec"),
        (lambda text: eval(compile(text, "<string>", "eval"), {"x": 1}), "did .*exec"),
        (lambda text: os.system("true"), "did .*os.system"),
        (lambda text: open("canary", "w").close(), "did .*open"),
        (lambda text: open("/etc/passwd").close(), "did .*open"),
        (lambda text: pickle.loads(pickle.dumps(os.system)), "did .*pickle.find_class"),
        (lambda text: {}[text], "raised KeyError"),
        (lambda text: [10**7 for _ in range(3)] and sum(range(10**7)), "took"),
        (lambda text: os.environ["GRPO_RL_FUZZ_CANARY"], "tells the value"),
    ],
)  # fmt: skip
def test_a_planted_harm_is_told(read, what, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fuzz_targets.Broken, match=what):
        fuzz_targets.run(target_of(read, deadline_s=0.05 if what == "took" else 2.0), "x", tmp_path)


def test_another_error_than_the_documented_one_is_told(tmp_path, canary):
    fuzz_targets.run(target_of(read_yaml, ValueError), "[", tmp_path)
    with pytest.raises(fuzz_targets.Broken, match="UnicodeDecodeError"):
        fuzz_targets.run(target_of(lambda text: b"\xff".decode(), ValueError), "x", tmp_path)


@pytest.mark.parametrize("line", ["json.loads(text)", "int(text)"])
def test_an_error_of_the_documented_kind_that_no_line_of_ours_raises_is_told(line, tmp_path, canary):
    here = {"json": json}
    exec(compile(f"def read(text):\n    return {line}", f"{fuzz_targets.OURS}reader.py", "exec"), here)
    with pytest.raises(fuzz_targets.Broken, match="raised (JSONDecodeError|ValueError)"):
        fuzz_targets.run(target_of(here["read"], ValueError), "x", tmp_path)


def test_the_time_of_other_processes_counts(tmp_path, canary, monkeypatch):
    slow = target_of(lambda text: time.sleep(0.2), deadline_s=0.1)
    fuzz_targets.run(slow, "x", tmp_path)
    with pytest.raises(fuzz_targets.Broken, match="took"):
        fuzz_targets.run(replace(slow, clock=time.monotonic), "x", tmp_path)
    comparisons = SimpleNamespace(map=lambda calls: time.sleep(0.2) or [[]])
    monkeypatch.setattr(fuzz_targets, "_comparisons", lambda: comparisons)
    fuzz_targets.run(fuzz_targets.BY_NAME["math"], "1/2", tmp_path)
    with pytest.raises(fuzz_targets.Broken, match="took"):
        fuzz_targets.run(replace(fuzz_targets.BY_NAME["math"], deadline_s=0.1), "1/2", tmp_path)


# ---- make fuzz ----


FUZZER = """
import sys, time
sys.path.insert(0, {folder!r})
import fuzz_targets
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("fuzzer", {folder!r} + "/__main__.py")
sys.modules["fuzzer"] = fuzzer = module_from_spec(spec)
spec.loader.exec_module(fuzzer)

def target(name, read):
    return fuzz_targets.Target(name, lambda data, folder: data, read, lambda folder: ["abc"], error=None)

def breaks(text):
    if text != "abc":
        raise KeyError(text)

fuzzer.HANG_S = fuzzer.CHUNK = 2
fuzz_targets.BY_NAME = {{
    "sound": target("sound", lambda text: time.sleep(0.04)),  # 100 of them take twice as long as a hang
    "breaks": target("breaks", breaks),
    "hangs": target("hangs", lambda text: text == "abc" or time.sleep(30)),  # the seed is read before
}}
print([fuzzer.fuzz(name, seed=0, first=0, count=100, processes=1) for name in fuzz_targets.BY_NAME])
"""


@pytest.mark.nightly
def test_make_fuzz_names_the_inputs_that_break_and_ends_where_one_hangs():
    code = FUZZER.format(folder=str(Path(__file__).parent))  # pytest's own watchdog and another don't go together
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    inputs = [mutated(Random(f"0/breaks/{number}"), ["abc"]) for number in range(100)]
    broken = [number for number, text in enumerate(inputs) if text != "abc"]
    assert told.stdout.endswith(f"[0, {len(broken)}, 1]\n")
    assert f"--target 'breaks' --only {broken[0]}: Broken: it raised KeyError" in told.stdout
    assert "hangs: 100 inputs" in told.stdout and "Timeout (0:00:02)" in told.stderr
