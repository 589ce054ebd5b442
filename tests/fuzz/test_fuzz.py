"""Every reader of foreign text and files against hostile inputs; `make fuzz` runs the same targets by the million."""

from __future__ import annotations

import os
import pickle
from random import Random

import fuzz_targets
import pytest
from fuzz_inputs import FRAGMENTS, as_bytes
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
