"""Checks of a Ray cluster's nodes: of each one's machine and clock, and whether all can sum a tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_rl.checks.all_reduce import all_reduce
from grpo_rl.checks.check import Case, findings_of
from grpo_rl.checks.finding import Finding
from grpo_rl.checks.sequence import OF_MACHINE
from grpo_rl.cluster.doctor import clock_skews, free_port
from grpo_rl.cluster.nodes import Node, on_nodes

OF_FOLDER = ("run folder", "leftovers")
SKEW_S = 5.0
"""Seconds between two clocks from which on files of one node seem to be of another's past or future."""
SUM_S = 60.0


def node_findings(alive: Sequence[Node], case: Case, in_folder: bool, deadline_s: float) -> Iterator[Finding]:
    """The findings on each node, which name it.

    Args:
        in_folder: whether the case has a folder that all nodes see.
    """
    end = time.monotonic() + deadline_s
    case = replace(case, cluster=(int(sum(n.gpus for n in alive)), int(sum(n.cpus for n in alive))))
    results = on_nodes(alive, _look, [(case, in_folder)] * len(alive), deadline_s)
    for node, found in zip(alive, results, strict=True):
        if isinstance(found, Exception):
            yield Finding("FIX", "node", f"{node.name}: {type(found).__name__}: {found}")
            continue
        for finding in found:
            yield replace(finding, text=f"{node.name}: {finding.text}")
    yield from _clocks(alive, max(1.0, end - time.monotonic()))
    yield _sum(alive, min(SUM_S, max(1.0, end - time.monotonic())))


def _look(case: Case, in_folder: bool) -> list[Finding]:
    """The findings on the machine that this runs on."""
    left_out = {"clock", *(() if in_folder else OF_FOLDER)}
    return list(findings_of([check for check in OF_MACHINE if check.about not in left_out], case))


def _clocks(alive: Sequence[Node], deadline_s: float) -> Iterator[Finding]:
    skews = clock_skews(alive, deadline_s)
    for node, skew in zip(alive, skews, strict=True):
        if isinstance(skew, Exception):
            yield Finding("FIX", "clock", f"{node.name}: {skew}")
        elif abs(skew[0]) - skew[1] > SKEW_S:
            way = "ahead of" if skew[0] > 0 else "behind"
            text = f"{node.name}: {abs(skew[0]):.1f} s {way} this machine's; start chrony or ntpd there"
            yield Finding("FIX", "clock", text)
    if known := [skew for skew in skews if not isinstance(skew, Exception)]:
        off, unsure = max(known, key=lambda skew: abs(skew[0]))
        if abs(off) - unsure <= SKEW_S:
            text = f"all nodes within {abs(off):.2g} s of this machine, give or take {unsure:.2g} s"
            yield Finding("OK", "clock", text)


def _sum(alive: Sequence[Node], deadline_s: float) -> Finding:
    """Has the nodes sum a tensor by gloo on their CPUs; NCCL is left to the run, which has their GPUs."""
    about = "collectives"
    if len(alive) < 2:
        return Finding("SKIP", about, "one node")
    port = free_port(alive, deadline_s)
    if isinstance(port, Exception):
        return Finding("FIX", about, f"{alive[0].name}: {port}")
    ranks = [(alive[0].address, port, rank, len(alive), "cpu", deadline_s) for rank in range(len(alive))]
    results = on_nodes(alive, all_reduce, ranks, deadline_s + 5.0)
    if failed := {n.name: e for n, e in zip(alive, results, strict=True) if isinstance(e, Exception)}:
        name, error = next(iter(failed.items()))
        text = f"{len(failed)} of {len(alive)} nodes ({', '.join(failed)}) could not sum a tensor by gloo; {name}: "
        text += f"{' '.join(str(error).split())[:300]}: see their firewalls, and GLOO_SOCKET_IFNAME"
        return Finding("FIX", about, text)
    return Finding("OK", about, f"{len(alive)} nodes summed a tensor by gloo in {max(results):.2g} s")
