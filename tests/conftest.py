"""Fixtures that all tests share."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

# Test processes side by side compute with a thread each: with one for every core, threads wait for one another.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or vLLM puts the threads of all of them on the same cores
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  at Ray's 15 actors hardly run beside other tests

sys.path.append(str(Path(__file__).parent))  # for what tests of several folders share: simulation, tiny_runs

# A shell's background jobs ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled code is kept between sessions, wherever a test puts the cache folder.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "grpo_rl_tests_compiled"))

import hypothesis
import pytest

# Off until tests are collected: imports leave no garbage, and scanning for it took a fifth of their time.
gc.disable()

# A busy machine is no failure.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        return  # shares out the tests and runs none

    import torch

    # Read when Triton is imported: without a GPU its kernels are interpreted.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


FIRST = ["run/test_async.py", "distributed/test_ranks.py", "run/test_run.py", "simulation/test_simulation.py"]
"""Run first: the longest files of `make test`; its processes then end at about the same time."""


def pytest_collection_modifyitems(items):
    import torch

    place = {Path(__file__).parent / name: i for i, name in enumerate(FIRST)}
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("nightly")}
    items.sort(key=lambda item: place.get(item.path, len(FIRST) + (item.path not in long)))
    seen = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        cases = item.get_closest_marker("cases")
        if item.get_closest_marker("alone") or (cases and seen[function] > cases.args[0]):
            item.add_marker(pytest.mark.nightly)
        if {"tiny_run", "default_model"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session):
    # A run ends with a collection of garbage, for which all that has been imported is looked through.
    gc.collect()
    gc.freeze()
    gc.enable()
    session.config.add_cleanup(gc.unfreeze)  # or libraries that are not freed in the end print what they hold
    gc.freeze = gc.unfreeze = lambda: None  # vLLM does both with all there is, for every engine


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where $GRPO_RL_DATA is unset."""
    if not (folder := os.environ.get("GRPO_RL_DATA")):
        pytest.skip("GRPO_RL_DATA is unset")
    return Path(folder)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder, in the user's cache: fetched and converted by the first test that needs it."""
    from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny random model with its tokenizer, to be read only."""
    from grpo_rl import testing

    return testing.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    """The tiny model's tokenizer, to be read only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> list[str]:
    """The overrides of a run of seconds: see `tiny_runs.tiny_run`."""
    import tiny_runs

    return tiny_runs.tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """A cache of the module's own: rates measured beside other tests are none for the user's runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def current_folder(tmp_path_factory):
    """The current folder, empty and not on the path yet where a module begins; what it writes is forgotten."""
    folder = tmp_path_factory.mktemp("current")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        yield folder
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        if getattr(sys.modules.get(name), "__file__", None) == str(path):
            del sys.modules[name]
