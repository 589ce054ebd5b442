"""A tokenizer that the collectors' tests share."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from grpo_rl.testing import save_tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("tiny")))
