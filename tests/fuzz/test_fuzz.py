"""Every reader of foreign text and files against hostile inputs; `make fuzz` runs the same targets by the million."""

from __future__ import annotations

import json
import os
import pickle
import re
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


def seeds_read_once(target, folder):
    """The seeds, read unwatched: what a reader imports at its first call is no evaluation of its input."""
    seeds = list(target.seeds(folder))
    for data in seeds:
        try:
            target.read(target.prepare(data, folder))
        except Exception:
            continue
    return seeds


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz_targets.TARGETS, ids=lambda target: target.name)
def test_no_seed_breaks_a_reader_or_runs_as_code(target, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in seeds_read_once(target, tmp_path):
        fuzz_targets.run(target, data, tmp_path)
    assert canary.touched(tmp_path) == [] and not (tmp_path / "planted").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("target", fuzz_targets.TARGETS, ids=lambda target: target.name)
def test_no_input_breaks_a_reader_or_runs_as_code(target, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seeds = seeds_read_once(target, tmp_path)

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
    seeds, rng = seeds_read_once(target, tmp_path), Random(0)
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


# ---- make fuzz: its processes ----


FUZZER = """
import sys, time
sys.path.insert(0, {folder!r})
import fuzz_targets
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("fuzzer", {folder!r} + "/__main__.py")
spec.loader.exec_module(fuzzer := module_from_spec(spec))
"""
IN_TIME = """
def target(read):
    return fuzz_targets.Target("planted", lambda data, folder: data, read, lambda folder: ["x"], error=None)

fuzzer.HANG_S = 1
fuzz_targets.BY_NAME = {
    "sound": target(lambda text: time.sleep(0.04)),  # 50 of them take twice as long as a hang
    "hangs": target(lambda text: text == "x" or time.sleep(30)),  # x is the seed, which is read before
}
print([fuzzer.fuzz(name, seed=0, first=0, count=50, processes=1, seconds=60) for name in fuzz_targets.BY_NAME])
"""
AT_THE_END = """
put = []

class Ends:  # after its message, while it is asked whether it lives

    def is_alive(self):
        put.append("done")
        return False

class Queue:
    empty, get = lambda self: not put, lambda self: put.pop(0)

print(next(fuzzer.messages(Ends(), Queue())))
"""


def told_by(code):
    """Output of a process with the fuzzer in it: pytest's own watchdog and another don't go together."""
    whole = FUZZER.format(folder=str(Path(__file__).parent)) + code
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True, timeout=200)


@pytest.mark.nightly
def test_only_an_input_that_hangs_ends_its_process():
    told = told_by(IN_TIME)
    assert told.stdout.endswith("[0, 1]\n") and "sound: 50 inputs" in told.stdout
    assert "it goes on with --first 0 --count 50\n" in told.stdout
    assert "its process ended with 1" in told.stdout and "Timeout (0:00:01)" in told.stderr


@pytest.mark.slow
def test_the_last_message_of_a_process_that_has_just_ended_is_read():
    assert told_by(AT_THE_END).stdout == "done\n"


SEVERAL = """
target = fuzz_targets.Target("planted", lambda data, folder: data, print, lambda folder: ["abc"], error=None, at_once=3)
fuzz_targets.BY_NAME = {"planted": target}
print(fuzzer.input_of(target, ["abc"], seed=5, number=6))
fuzzer.fuzz("planted", seed=5, first=0, count=9, processes=1, seconds=60)
"""
GOES_ON = """
import os

def read(text):
    os.write(1, f"read {{text!r}}\\n".encode())  # whole, beside another process
    time.sleep(0.3)

target = fuzz_targets.Target("planted", lambda data, folder: data, read, lambda folder: ["abc"], error=None)
fuzz_targets.BY_NAME = {{"planted": target}}
fuzzer.fuzz("planted", seed=5, first={first}, count={count}, processes={processes}, seconds={seconds})
"""


@pytest.mark.slow
def test_inputs_that_are_read_several_at_once_are_those_of_single_calls():
    told = told_by(SEVERAL).stdout.splitlines()
    single = [mutated(Random(f"5/planted/{number}"), ["abc"]) for number in range(9)]
    assert told[0] == repr(single[6:])
    assert [repr(single[at : at + 3]) in told for at in (0, 3, 6)] == [True] * 3
    assert told[-1].startswith("planted: 9 inputs in ")


@pytest.mark.nightly
def test_a_run_that_was_cut_off_goes_on_where_it_ended():
    cut = told_by(GOES_ON.format(first=2, count=40, processes=1, seconds=1)).stdout
    first, count = map(int, re.search(r"goes on with --first (\d+) --count (\d+)\n", cut).groups())
    assert 2 < first < 42 and first + count == 42
    rest = told_by(GOES_ON.format(first=first, count=3, processes=2, seconds=60)).stdout
    assert "goes on" not in rest
    read = [line for told in (cut, rest) for line in told.splitlines() if line.startswith("read")]
    inputs = [mutated(Random(f"5/planted/{number}"), ["abc"]) for number in range(2, first + 3)]
    assert sorted(read) == sorted(f"read {text!r}" for text in [*inputs, *["abc"] * 3])  # each process reads the seed
