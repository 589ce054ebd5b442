"""DemonstrationCollector: hands out demonstrations instead of sampled responses."""

import time
from collections.abc import Mapping
from typing import Any

from grpo_rl.collectors.base import Collector
from grpo_rl.data.group import Group
from grpo_rl.envs.demonstrations import Demonstrations


class DemonstrationCollector(Collector):
    """The `Collector` of SFT: the rows of each optimizer step in turn, every row once an epoch.

    Args:
        batch: rows of a step; the last step of the run takes those that are left.
        total: rows of the whole run, those of all epochs.
        collected: rows that were handed out before a resume.
    """

    def __init__(self, demonstrations: Demonstrations, batch: int, total: int, collected: int = 0) -> None:
        self._demonstrations, self._batch, self._total = demonstrations, batch, total
        self.collected = collected
        self.sample_s = 0.0
        self.sampled: list[Group] = []
        """Empty: nothing is sampled."""

    def collect(self) -> list[Group]:
        """The rows of the next step, whatever the group size: a group has the one response of its row."""
        started = time.perf_counter()
        groups = self._demonstrations.take(min(self._batch, self._total - self.collected))
        self.collected += len(groups)
        self.sample_s = time.perf_counter() - started
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self._demonstrations.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self._demonstrations.restore(state)

    def metrics(self) -> dict[str, float]:
        """The passes over the data so far."""
        return {"train/epoch": self.collected / len(self._demonstrations)}

    def shutdown(self) -> None:
        """Ends nothing."""
