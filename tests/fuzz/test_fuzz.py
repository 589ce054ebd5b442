"""Every reader of foreign text and files against hostile inputs; `make fuzz` runs the same targets by the million."""

import os
import pickle
from random import Random

import fuzz_targets
import pytest
from fuzz_inputs import FRAGMENTS, mutated

from grpo_rl.storage.yaml_text import read_yaml

OF_TARGETS = pytest.mark.parametrize("target", fuzz_targets.TARGETS, ids=lambda target: target.name)


@pytest.fixture
def harmless(canary, tmp_path, monkeypatch):
    """Reads inputs of a target; at the end, none of them ran as code."""
    monkeypatch.chdir(tmp_path)
    yield lambda target, data: fuzz_targets.run(target, data, tmp_path)
    assert canary.touched(tmp_path) == [] and not (tmp_path / "planted").exists()


@pytest.mark.slow
@OF_TARGETS
def test_no_seed_breaks_a_reader_or_runs_as_code(target, harmless, tmp_path):
    for data in fuzz_targets.seeds_read_once(target, tmp_path):
        harmless(target, data)


@pytest.mark.nightly
@OF_TARGETS
def test_no_input_breaks_a_reader_or_runs_as_code(target, harmless, tmp_path):
    seeds = fuzz_targets.seeds_read_once(target, tmp_path)
    for number in range(target.examples):
        harmless(target, mutated(Random(f"{target.name}/{number}"), seeds))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [target.name for target in fuzz_targets.TARGETS if target.error is None])
def test_a_line_of_a_megabyte_takes_no_longer_than_its_deadline(name, harmless, tmp_path):
    target = fuzz_targets.BY_NAME[name]
    seeds, rng = fuzz_targets.seeds_read_once(target, tmp_path), Random(0)
    for piece in rng.sample(FRAGMENTS, 3):
        harmless(target, rng.choice(seeds) + piece * (2**20 // len(piece)))


def target_of(read, error=None, **more):
    return fuzz_targets.Target("planted", lambda data, folder: data, read, lambda folder: ["x"], error=error, **more)


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
def test_a_planted_harm_is_reported(read, what, tmp_path, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fuzz_targets.Broken, match=what):
        fuzz_targets.run(target_of(read, deadline_s=0.05 if what == "took" else 2.0), "x", tmp_path)


def test_another_error_than_the_documented_one_is_reported(tmp_path, canary):
    fuzz_targets.run(target_of(read_yaml, ValueError), "[", tmp_path)
    with pytest.raises(fuzz_targets.Broken, match="UnicodeDecodeError"):
        fuzz_targets.run(target_of(lambda text: b"\xff".decode(), ValueError), "x", tmp_path)
