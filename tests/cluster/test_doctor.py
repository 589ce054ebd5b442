"""`grpo-rl doctor` on two nodes of this machine: who is missing, blind or different is named."""

import re
import time

import pytest

import grpo_rl.cluster  # noqa: F401, before ray

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from grpo_rl.checks import nodes  # noqa: E402
from grpo_rl.checks.check import Case, Finding  # noqa: E402
from grpo_rl.cli import main  # noqa: E402
from grpo_rl.cluster.nodes import Node, cluster, on_nodes  # noqa: E402
from grpo_rl.cluster.nodes import nodes as nodes_of_cluster  # noqa: E402


@pytest.fixture(scope="module")
def two_nodes():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "first"})
    made.add_node(num_cpus=2, node_name="second")
    yield made
    made.shutdown()


@pytest.mark.nightly
def test_nodes_that_are_fit_are_listed_and_nothing_is_left_in_their_folder(two_nodes, capsys, tmp_path):
    folder = tmp_path / "run"
    assert main(["doctor", "--ray", two_nodes.address, "--names", "first,second", "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "first (" in out and "second (" in out and ": 2 CPUs, 0 GPUs" in out and "All 2 nodes answer" in out
    assert folder.is_dir() and not list(folder.iterdir())
    for node in ("first", "second"):
        for about in ("python", "packages", "open files", "shared memory", "run folder"):
            assert re.search(f"^OK +{about} +{node}: ", out, re.MULTILINE), (node, about)
        assert re.search(f"^OK +clock +{node}: within .* s of this machine's", out, re.MULTILINE)
    assert re.search("^OK +collectives +2 processes summed a tensor in ", out, re.MULTILINE)
    assert "Nothing to fix (" in out and "config" not in out


@pytest.mark.nightly
def test_a_fault_of_a_node_is_reported_and_the_other_node_too(two_nodes):
    def fails(number):
        if number == 1:
            raise RuntimeError("no such interface")
        time.sleep(number)
        return number

    with cluster(two_nodes.address):
        alive = nodes_of_cluster()
        first, second = on_nodes(alive, fails, [(0,), (1,)], 60)
        assert first == 0 and str(second) == "no such interface"
        assert isinstance(on_nodes(alive, fails, [(60,), (0,)], 2.0)[0], TimeoutError)
        # Two ranks where three are said to be: they wait for one that never comes.
        [port] = on_nodes(alive[:1], nodes.free_port, [()], 30.0)
        ranks = [(alive[0].address, port, rank, 3, "cpu", 4.0) for rank in range(2)]
        assert all(isinstance(e, Exception) for e in on_nodes(alive, nodes.all_reduce, ranks, 60.0))


def test_a_node_that_fails_and_one_whose_clock_differs_are_named_and_the_others_are_reported(monkeypatch, tmp_path):
    alive = [Node(name, "10.0.0.1", name, {}) for name in "abc"]
    fine = ({package: "1" for package in nodes.PACKAGES}, True, [Finding("OK", "open files", "enough")])
    clocks = [1e9 + 0.1, 1e9 - 7.5, TimeoutError("no answer within 5 s")]
    answers, asked = iter([[OSError("no such disk"), fine, fine], clocks, [OSError("gone")]]), []
    monkeypatch.setattr(nodes.time, "time", lambda: 1e9)
    monkeypatch.setattr(nodes, "on_nodes", lambda _, function, *__: asked.append(function) or next(answers))
    found = nodes.node_findings(alive, Case(None, tmp_path), None, 5.0)
    assert [(f.kind, f.about, f.text) for f in found] == [
        ("FIX", "node", "a: OSError: no such disk"),
        ("OK", "open files", "b: enough"),
        ("OK", "open files", "c: enough"),
        ("OK", "clock", "a: within 0.1 s of this machine's"),
        ("FIX", "clock", "b: 7.5 s behind this machine's; start chrony or ntpd there"),
        ("FIX", "clock", "c: no answer within 5 s"),
        ("FIX", "collectives", "a: gone"),
    ]
    assert asked == [nodes._look, nodes.time.time, nodes.free_port]


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_named(two_nodes, capsys):
    words = ["doctor", "--ray", two_nodes.address, "--deadline-s", "1", "--names", "first,second,third"]
    assert main(words) == 2
    assert "2 of 3 nodes (first, second) have joined within 1 s: third did not" in capsys.readouterr().err
