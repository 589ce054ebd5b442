"""Models of given shapes with random weights, made here: figures of speed need no trained model and no network."""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model

SHARED = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936}
SHAPES = {
    "0.6B": SHARED | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": SHARED | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    # The default model's vocabulary, whose tokenizer it gets.
    "toy": {
        "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 49152,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    },
}  # fmt: skip
"""Qwen3's shapes, https://huggingface.co/Qwen: heads and embedding share their weights."""


def model_folder(shape: str, folder: Path, device: str = "cpu") -> Path:
    """A folder with a model of this shape and the default model's tokenizer; made at the first call.

    Args:
        folder: that of all shapes.
        device: where the weights are drawn.
    """
    whole = folder / shape
    if whole.is_dir():
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: a row that is cut off leaves no half of a model.
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        made = Path(partial, shape)
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL))
        tokenizer.save_pretrained(made)
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = Qwen3Config(**SHAPES[shape], **special, bos_token_id=None, tie_word_embeddings=True)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(made)
        del model
        harness.release_gpu()  # arms in other processes need it
        made.rename(whole)
    return whole
