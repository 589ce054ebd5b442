"""Assumptions of a plan where a run has measured nothing yet: options of `grpo-rl plan` replace them."""

from __future__ import annotations

TRAIN_SHARE = 0.4
"""Share of the rate in matrix products: 38 to 43 % were reached with Llama 3 405B on 8,192 and 16,384 H100 (table 4 of
https://arxiv.org/abs/2407.21783). A run of one process in mode=sync logs its own as ``limit_fraction/train``."""
SAMPLE_SHARE = 0.5
"""Share of both rates, an assumption; a run of one process in mode=sync logs its own as ``limit_fraction/sample``."""
