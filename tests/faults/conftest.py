"""The scripts of this folder, which is no package: each imports its neighbours by their file names."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
collect_ignore = ["kill_points.py", "kills.py", "outcome.py", "starts.py", "torn.py"]
"""The scripts, which have no doctests and can't be imported without their folder."""


@pytest.fixture(scope="session")
def script():
    """Imports a script by its name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
