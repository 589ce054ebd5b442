"""A Ray cluster to run on: joined or started here, every node checked, places taken for what a device plan asks."""

import ipaddress
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_rl.waits import waiting

log = logging.getLogger(__name__)

Place = PlacementGroup
"""Resources reserved for actors, in numbered bundles."""
JOIN_POLL_S = 0.5
CONNECT_S = 5.0
"""Seconds that the head of a cluster has to accept a connection."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with the amount of each resource that it offers.

    Args:
        name: the name that the node was started by, or its address.
        address: address of its machine.
    """

    name: str
    address: str
    id: str
    resources: Mapping[str, float]

    @property
    def cpus(self) -> float:
        """CPUs that it offers."""
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        """GPUs that it offers."""
        return self.resources.get("GPU", 0.0)


@contextmanager
def cluster(address: str | None = None, gpus: Sequence[int] = (), **settings: object) -> Iterator[list[Node]]:
    """The alive nodes of the cluster at ``address``, or of one that is started on this machine and ends with this.

    A cluster that is started here listens on the loopback interface alone, asks for a token
    (`grpo_rl.cluster`), has no dashboard, and keeps its sockets and logs in a folder that only this user can
    enter. The folder lies under ``$RAY_TMPDIR``, or where temporary files go; it is removed at the end, but
    kept if an exception is raised (Ctrl-C does not count).

    Args:
        address: address for ``ray.init``; ``auto`` joins the cluster that this machine is in.
        gpus: indices of this machine's GPUs that a local cluster may use; others are for this process.

    Raises:
        ValueError: there is no cluster at that address; or what Ray has started here would listen on other interfaces.
    """
    with nullcontext() if address else _private_folder() as folder:
        _init(address, gpus, folder, settings)
        try:
            found = nodes()
            if address is None and not all(ipaddress.ip_address(node.address).is_loopback for node in found):
                raise ValueError(
                    f"Ray {ray.__version__} listens on {found[0].address}, and a cluster of this machine alone has to "
                    "listen on the loopback interface; use a version of Ray that grpo_rl was tested with (setup.py)"
                )
            yield found
        finally:
            ray.shutdown()


def _init(address: str | None, gpus: Sequence[int], folder: str | None, settings: Mapping[str, object]) -> None:
    """Connects this process with the cluster, or with one that it starts in the folder."""
    if address is None and "RAY_AUTH_MODE" not in os.environ:  # a user's choice, or that of `grpo_rl.cluster`
        log.warning("ray was imported before grpo_rl.cluster: the cluster that is started here requires no token")
    ours = {} if address else {"include_dashboard": False, "num_gpus": len(gpus), "_temp_dir": folder}
    try:
        if address and ":" in address:
            # Ray itself tries for five minutes.
            host, port = address.rpartition("://")[2].rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        # Otherwise Ray replaces a loopback address with the machine's own, and then listens on all interfaces, unless
        # it believes that there can be no other nodes, as it does by itself on macOS.
        on_loopback = mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)
        with _visible(gpus) if gpus else nullcontext(), nullcontext() if address else on_loopback:
            # On a cluster, forward the trainers' output to this terminal.
            logs = {"log_to_driver": address is not None, "configure_logging": False}
            with waiting("Ray to start" if address is None else f"the Ray cluster at {address}"):
                ray.init(address or "local", **{**logs, **ours, **settings})
    except (OSError, RayError, RuntimeError, ValueError) as error:
        if address is None:
            raise ValueError(f"Ray can't be started on this machine: {error}") from error
        raise ValueError(
            f"no Ray cluster answers at ray.address={address}: {error}. Start one with `ray start --head` and join it "
            "from the other nodes, or leave ray.address at null for this machine alone"
        ) from error


@contextmanager
def _private_folder() -> Iterator[str]:
    """A new folder for Ray, inside one that only this user can enter: Ray opens its folder to all users."""
    if root := os.environ.get("RAY_TMPDIR") or None:
        os.makedirs(root, exist_ok=True)
    # Short: what Ray adds takes 63 of the 107 bytes that the path of a socket may have.
    outer = tempfile.mkdtemp(prefix="ray-", dir=root)
    keep = False
    try:
        yield os.path.join(outer, "ray")
    except Exception:
        keep = True  # Ray's logs may hold the cause
        raise
    finally:
        if not keep:
            shutil.rmtree(outer, ignore_errors=True)


@contextmanager
def _visible(gpus: Sequence[int]) -> Iterator[None]:
    """Lets what is started meanwhile see these GPUs alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (before or "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] if before else str(i) for i in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def nodes() -> list[Node]:
    """The nodes that are alive according to Ray, by name."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            address = node["NodeManagerAddress"]
            found.append(Node(node["NodeName"] or address, address, node["NodeID"], node["Resources"]))
    return sorted(found, key=lambda node: (node.name, node.id))


def this_address() -> str:
    """Address of this machine, as other nodes reach it."""
    return ray.util.get_node_ip_address()


def check_nodes(expected: int | Sequence[str], deadline_s: float = 60.0, join_s: float = 0.0) -> None:
    """Has every node run a task, all at once.

    Args:
        expected: number of nodes, or the names that they were started by (``ray start --node-name``).
        deadline_s: seconds until all must have answered.
        join_s: seconds until all must have joined.

    Raises:
        ValueError: nodes are missing, or one does not answer; names it.
    """
    count, end = expected if isinstance(expected, int) else len(expected), time.monotonic() + join_s
    while True:
        found = nodes()
        names = [node.name for node in found]
        missing = [] if isinstance(expected, int) else [name for name in expected if name not in names]
        if len(found) >= count and not missing:
            break
        if time.monotonic() >= end:
            within = f" within {join_s:g} s" if join_s else ""
            who = f": {', '.join(missing)} did not" if missing else ""
            raise ValueError(
                f"{len(found)} of {count} nodes ({', '.join(names)}) have joined{within}{who}; see the log of `ray "
                "start` on the others: the head's address and port have to be reachable from there"
            )
        time.sleep(JOIN_POLL_S)
    with waiting("all nodes of the cluster to answer", f"{len(found)} of them", deadline_s):
        answers = on_nodes(found, this_address, [()] * len(found), deadline_s)
    silent = {}
    for node, answer in zip(found, answers, strict=True):
        if isinstance(answer, Exception):
            silent[node.id] = node.name + ("" if isinstance(answer, TimeoutError) else f" ({type(answer).__name__})")
    if silent.keys() - {node.id for node in nodes()}:
        return check_nodes(expected, deadline_s)  # Ray has noticed in the meantime that a node is gone
    if silent:
        raise ValueError(
            f"{', '.join(silent.values())} did not answer within {deadline_s:g} s, though Ray lists it; check its "
            "network, its clock and its Python environment, or take it out"
        )


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Scheduling strategy of a task that has to run on this node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def on_nodes(
    alive: Sequence[Node], function: Callable[..., Any], arguments: Sequence[tuple], deadline_s: float
) -> list:
    """The results of a function on each node, with arguments of its own, all at the same time; errors are results."""
    asked = [
        _call.options(scheduling_strategy=on_node(node.id)).remote(function, own)
        for node, own in zip(alive, arguments, strict=True)
    ]
    ray.wait(asked, num_returns=len(asked), timeout=deadline_s)
    results: list[Any] = []
    for call in asked:
        try:
            results.append(ray.get(call, timeout=0))
        except GetTimeoutError:
            results.append(TimeoutError(f"no result within {deadline_s:.0f} s"))
            ray.cancel(call, force=True)
        except RayTaskError as error:
            results.append(error.cause)
        except RayError as error:
            results.append(error)
    return results


@ray.remote(num_cpus=0, max_retries=0)
def _call(function: Callable[..., Any], arguments: tuple) -> Any:
    return function(*arguments)


@contextmanager
def places(bundles: Sequence[Mapping[str, float]], deadline_s: float = 60.0) -> Iterator[PlacementGroup]:
    """Reserves resources for actors, each bundle on one node; taken all at once, and given back at the end.

    Args:
        bundles: resources that each actor needs, such as ``{"CPU": 1, "GPU": 2}``.

    Raises:
        ValueError: the cluster has had no room for them until the deadline.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        try:
            with waiting("places in the cluster", f"{len(bundles)} bundles", deadline_s):
                ray.get(group.ready(), timeout=deadline_s)
        except GetTimeoutError:
            raise ValueError(
                f"Ray found no place for {len(bundles)} bundles within {deadline_s:g} s, of {_total(bundles)}: others "
                "hold what is needed, or no node has room for a whole bundle (`ray status` shows both)"
            ) from None
        yield group
    finally:
        remove_placement_group(group)


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in {n for b in bundles for n in b}}
