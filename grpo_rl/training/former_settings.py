"""Config keys that older checkpoints hold and that exist no more."""

from __future__ import annotations

from collections.abc import Mapping

IGNORED = ("inference_model.push_changes", "inference_model.start_s", "mismatch.first_tokens")
"""Config keys of older checkpoints that exist no more, and never touched what is computed."""
REMOVED: Mapping[str, object] = {
    "policy.kl_gain": 0.1,
    "train.reward_scale": 1.0,
}
"""Config keys of older checkpoints that exist no more, with the only value that still means the same."""
