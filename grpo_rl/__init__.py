"""GRPO post-training of language models, built from TorchRL parts."""

__version__ = "0.1.0"
