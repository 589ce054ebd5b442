"""Modules beside these tests can be imported by them; those that need verifiers are left out where it is missing."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import run_script

collect_ignore = [] if importlib.util.find_spec("verifiers") else ["small_taskset.py", "small_dialog.py", "our_sums.py"]
sys.path.insert(0, str(Path(__file__).parent))
SCRIPT = Path(__file__).parents[3] / "sota" / "grpo.py"


@pytest.fixture
def three_steps(tiny_run, tmp_path):
    """Trains the tiny model for three steps with vLLM in an environment; the rows of metrics.

    Rewards have to differ within groups, as nothing else moves the weights here, and these have to move. Conversations
    have to go on after a turn.

    The function's arguments are the environment's overrides, the length of its conversations, the texts that end a turn
    (a random model's turns have no other end), and words that become tokens, so that it says what a game listens to.
    """

    def train(overrides, max_model_len, stop, words=()):
        of_task = ("env.dataset", "env.path", "env.eval_path", "env.system_prompt", "env.reward", "model.name")
        tiny = [word for word in tiny_run if not word.startswith(of_task)]
        (given,) = (word.removeprefix("model.name=") for word in tiny_run if word.startswith("model.name="))
        model = prepared(Path(given), tmp_path / "model", max_model_len, words)
        turns = [f"sampling.stop={json.dumps(list(stop))}", "sampling.max_new_tokens=32"]
        sizes = [*turns, "train.total_dialog_turns=48", "train.optim_batch_size=16", "train.micro_batch_tokens=8192"]
        engine = ["inference_model.engine=vllm", f"inference_model.max_model_len={max_model_len}"]
        folder = run_script(SCRIPT, [*tiny, f"model.name={model}", *sizes, *engine, *overrides], tmp_path / "run")
        rows = read_metrics(folder)
        assert len(rows) == 3 and any(row["reward/zero_std_fraction"] < 1 for row in rows)
        assert (pd.read_parquet(folder / "completions.parquet")["turn_ends"].map(len) > 1).any()
        before, after = (load_file(path / "model.safetensors") for path in (model, folder / "model"))
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return rows

    return train


def prepared(given, folder, max_model_len, words):
    """A copy of the tiny model with further tokens; its positions are rotations, so that it may read as much."""
    shutil.copytree(given, folder)
    tokenizer, model = AutoTokenizer.from_pretrained(given), LlamaForCausalLM.from_pretrained(given, dtype="auto")
    if words:
        tokenizer.add_tokens(list(words))
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_model_len}))
    return folder
