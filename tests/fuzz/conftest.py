"""Makes the fuzzer's modules importable, and its canaries known to this process."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def canary():
    """The canary in the environment, for the module's tests alone."""
    import canaries

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(canaries.CANARY, canaries.VALUE)
        yield canaries
