"""Waits until all nodes of a Ray cluster have joined and answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ray.exceptions import RayError

from grpo_rl.cluster.nodes import Node, check_nodes, cluster, nodes

POLL_S = 0.5


@contextmanager
def joined(address: str, expected: int | Sequence[str], deadline_s: float = 120.0) -> Iterator[list[Node]]:
    """A context with the nodes of the cluster at ``address``, once all are there and have answered.

    Args:
        expected: number of nodes, or the names that they were started by (``ray start --node-name``).
        deadline_s: seconds until all nodes must have joined, and again until all must have answered.

    Raises:
        ValueError: a node, which is named, is missing or silent.
    """
    wanted = [] if isinstance(expected, int) else expected
    count, end = expected if isinstance(expected, int) else len(expected), time.monotonic() + deadline_s
    try:
        with cluster(address) as alive:
            while True:
                names = [node.name for node in alive]
                missing = [name for name in wanted if name not in names]
                if len(alive) >= count and not missing:
                    break
                if time.monotonic() > end:
                    who = f": {', '.join(missing)} did not" if missing else ""
                    raise ValueError(
                        f"{len(alive)} of {count} nodes ({', '.join(names)}) have joined within {deadline_s:g} s{who}; "
                        "see the log of `ray start` on the others: the head's address and port have to be reachable "
                        "from there"
                    )
                time.sleep(POLL_S)
                alive = nodes()
            check_nodes(count, deadline_s)
            yield alive
    except RayError as error:  # such as a token that is not the cluster's
        raise ValueError(f"Ray at {address} refuses: {' '.join(str(error).split())}") from error
