"""The scripts of benchmarks/, which is no package: each imports its neighbours by their file names."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(FOLDER), str(FOLDER.parent / "tests")]  # behind all else: some have common names


@pytest.fixture(scope="session")
def script():
    """Imports a script by its name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
