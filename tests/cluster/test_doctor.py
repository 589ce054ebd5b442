"""`grpo-rl doctor` on two nodes of this machine: who is missing, blind or different is named."""

from __future__ import annotations

import re
import time

import pytest

import grpo_rl.cluster  # noqa: F401, before ray

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from grpo_rl.checks import nodes  # noqa: E402
from grpo_rl.checks.check import Case  # noqa: E402
from grpo_rl.cli import main  # noqa: E402
from grpo_rl.cluster import doctor as ray_doctor  # noqa: E402
from grpo_rl.cluster import nodes as nodes_module  # noqa: E402
from grpo_rl.cluster.nodes import Node  # noqa: E402


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
        for about in ("python", "packages", "open files", "shared memory", "run folder", "leftovers"):
            assert re.search(f"^OK +{about} +{node}: ", out, re.MULTILINE), (node, about)
    assert re.search("^OK +clock +all nodes within .* s of this machine", out, re.MULTILINE)
    assert re.search("^OK +collectives +2 nodes summed a tensor by gloo in ", out, re.MULTILINE)
    assert "Nothing to fix (" in out and "config" not in out


@pytest.mark.nightly
def test_what_a_node_does_not_do_is_told_and_the_other_is_heard(two_nodes, tmp_path):
    def fails(number):
        if number == 1:
            raise RuntimeError("no such interface")
        time.sleep(number)
        return number

    with ray_doctor.examined(two_nodes.address, 2, deadline_s=60) as alive:
        first, second = nodes_module.on_nodes(alive, fails, [(0,), (1,)], 60)
        assert first == 0 and str(second) == "no such interface"
        assert isinstance(nodes_module.on_nodes(alive, fails, [(60,), (0,)], 2.0)[0], TimeoutError)
        case = Case(None, tmp_path)
        found = {f.about: f for f in nodes._clocks(alive, 30.0)}
        assert found["clock"].kind == "OK"
        # Two ranks where three are said to be: they wait for one that never comes.
        port = ray_doctor.free_port(alive, 30.0)
        ranks = [(alive[0].address, port, rank, 3, "cpu", 4.0) for rank in range(2)]
        assert all(isinstance(e, Exception) for e in nodes_module.on_nodes(alive, nodes.all_reduce, ranks, 60.0))
        assert [f.about for f in nodes._look(case, in_folder=False)] == [
            *("python", "packages", "open files", "shared memory")
        ]


@pytest.mark.parametrize(
    ("skews", "told"),
    [
        ([(0.1, 0.01), (-7.5, 0.2)], [("FIX", "b: 7.5 s behind this machine's; start chrony or ntpd there")]),
        ([(0.1, 0.01), (-7.5, 3.0)], [("OK", "all nodes within 7.5 s of this machine, give or take 3 s")]),
        (
            [TimeoutError("no answer within 5 s"), (0.5, 0.01)],
            [
                ("FIX", "a: no answer within 5 s"),
                ("OK", "all nodes within 0.5 s of this machine, give or take 0.01 s"),
            ],
        ),
    ],
)
def test_clocks_that_differ_by_more_than_can_be_measured_are_told(monkeypatch, skews, told):
    alive = [Node(name, "10.0.0.1", name, {}) for name in "ab"]
    monkeypatch.setattr(nodes, "clock_skews", lambda *_: skews)
    assert [(f.kind, f.text) for f in nodes._clocks(alive, 5.0)] == told


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_named(two_nodes, capsys):
    words = ["doctor", "--ray", two_nodes.address, "--deadline-s", "1"]
    assert main([*words, "--names", "first,second,third"]) == 2
    error = capsys.readouterr().err
    assert "2 of 3 nodes (first, second) have joined within 1 s: third did not" in error
    assert main([*words, "--nodes", "3"]) == 2
    assert "2 of 3 nodes (first, second) have joined within 1 s; see" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_folder_that_a_node_does_not_see_is_refused(two_nodes, tmp_path, monkeypatch):
    def blind(file):
        return {}, ray.get_runtime_context().get_node_id() == ray.nodes()[0]["NodeID"]

    monkeypatch.setattr(ray_doctor, "_look", blind)
    with pytest.raises(ValueError, match=r"^(first|second) can't see .*run, where the run writes"):
        with ray_doctor.examined(two_nodes.address, 2, tmp_path / "run", deadline_s=30):
            pass
    assert not list((tmp_path / "run").iterdir())
