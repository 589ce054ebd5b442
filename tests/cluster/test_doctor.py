"""`grpo-rl doctor` on two nodes of this machine: who is missing, blind or different is named."""

from __future__ import annotations

import pytest

import grpo_rl.cluster  # noqa: F401, before ray

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from grpo_rl.cli import main  # noqa: E402
from grpo_rl.cluster import doctor as ray_doctor  # noqa: E402


@pytest.fixture(scope="module")
def two_nodes():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "first"})
    made.add_node(num_cpus=2, node_name="second")
    yield made
    made.shutdown()


@pytest.mark.slow
def test_nodes_that_are_fit_are_listed_and_nothing_is_left_in_their_folder(two_nodes, capsys, tmp_path):
    folder = tmp_path / "run"
    assert main(["doctor", "--ray", two_nodes.address, "--names", "first,second", "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "first (" in out and "second (" in out and ": 2 CPUs, 0 GPUs" in out and "All 2 nodes answer" in out
    assert folder.is_dir() and not list(folder.iterdir())


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(two_nodes, capsys):
    words = ["doctor", "--ray", two_nodes.address, "--deadline-s", "1"]
    assert main([*words, "--names", "first,second,third"]) == 2
    error = capsys.readouterr().err
    assert "2 of 3 nodes (first, second) have joined within 1 s: third did not" in error
    assert main([*words, "--nodes", "3"]) == 2
    assert "2 of 3 nodes (first, second) have joined within 1 s; see" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_a_node_does_not_see_is_refused(two_nodes, tmp_path, monkeypatch):
    @ray.remote(num_cpus=0)
    def blind(file):
        return {}, ray.get_runtime_context().get_node_id() == ray.nodes()[0]["NodeID"]

    monkeypatch.setattr(ray_doctor, "_look", blind)
    with pytest.raises(ValueError, match=r"^(first|second) can't see .*run, where the run writes"):
        ray_doctor.examine(two_nodes.address, 2, tmp_path / "run", deadline_s=30)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at ray.address=127.0.0.1:1"),
        (["--ray", "auto", "env.repeats=4"], "doctor takes no overrides such as env.repeats=4"),
    ],
)
def test_what_it_cant_do_is_told_in_one_line(words, message, capsys):
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
