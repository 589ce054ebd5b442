"""Restarts of a run by one launcher, which hand on the run's folder, their number and why the last one ended.

torchrun, and the script that started trainers as Ray's actors, hold a store that outlives the ranks. A run writes its
folder there; when the ranks are started again they find it, whatever ``hydra.run.dir`` and ``resume`` say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.distributed.ranks import Ranks
from grpo_rl.run.origin import config_hash
from grpo_rl.training import checkpoint


@dataclass
class Restarts:
    """The earlier starts of a run by the launcher that started this one.

    Args:
        count: how often the run was started again; 0: this is the first start.
        folder: the folder that the earlier starts wrote to.
        reason: which rank was lost in the last start, if that was found out.
    """

    count: int = 0
    folder: Path | None = None
    reason: str = ""

    @classmethod
    def find(cls, ranks: Ranks, config: Mapping[str, Any]) -> Restarts:
        """The state that earlier starts with the same config left; every rank calls this."""
        found = cls()
        if ranks.rank == 0 and ranks.watch and ranks.watch.store.check([_key(config)]):
            left = json.loads(ranks.watch.store.get(_key(config)))
            found = cls(left["restarts"] + 1, Path(left["folder"]), ranks.watch.lost_in(left["watch"]))
        return ranks.broadcast(found)

    def place(self, own: str | Path, resume: str | None) -> tuple[str | Path, str | None]:
        """The folder of a new run and ``resume``, as the run of the earlier starts needs them to go on.

        A run that went on from a checkpoint of another folder, and has none of its own yet, does so again.
        """
        if self.folder is None:
            return own, resume
        has_own = bool(checkpoint.checkpoints(self.folder / checkpoint.CHECKPOINTS))
        return self.folder, str(self.folder) if has_own or resume in (None, "auto") else resume

    def leave(self, ranks: Ranks, config: Mapping[str, Any], folder: Path, before: int) -> None:
        """Leaves the run's folder to later starts; rank zero does.

        Args:
            before: restarts that the checkpoint counts, if this is the launcher's first start.
        """
        self.count = self.count if self.folder else before
        if ranks.rank == 0 and ranks.watch:
            left = {"folder": str(folder), "restarts": self.count, "watch": ranks.watch.name}
            ranks.watch.store.set(_key(config), json.dumps(left))


def _key(config: Mapping[str, Any]) -> str:
    return f"grpo_rl/run {config_hash(config)}"
