"""Fixtures that the tests of IFEval share."""

import os
from pathlib import Path

import nltk
import pytest


@pytest.fixture(scope="session")
def punkt() -> Path:
    """The folder of NLTK's sentence data, where NLTK or $GRPO_RL_DATA has it: a test downloads nothing."""
    if folder := os.environ.get("GRPO_RL_DATA"):
        nltk.data.path.append(os.path.join(folder, "nltk_data"))
    try:
        return Path(nltk.data.find("tokenizers/punkt_tab/english/")).parents[2]
    except LookupError:
        pytest.skip("NLTK's punkt_tab is in none of its folders; name one in NLTK_DATA, or set GRPO_RL_DATA")
