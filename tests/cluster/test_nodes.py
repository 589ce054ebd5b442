"""Two nodes on this machine: a cluster's nodes are counted and asked, and room is taken or refused with numbers."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
from ray.cluster_utils import Cluster

from grpo_rl.cluster.nodes import _private_folder, check_nodes, cluster, nodes, places
from grpo_rl.settings.config import RunIsOver


@pytest.fixture(scope="module")
def two_nodes():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"slot": 2}})
    made.add_node(num_cpus=1, resources={"slot": 4})
    with cluster(made.address):
        yield made
    made.shutdown()


def test_every_node_that_joined_is_asked(two_nodes):
    assert [node.resources["slot"] for node in nodes()] in ([2, 4], [4, 2])
    check_nodes(expected=2)
    with pytest.raises(ValueError, match=r"2 of 3 nodes \(.*\) have joined"):
        check_nodes(expected=3)


def test_room_is_taken_for_all_at_once_and_given_back(two_nodes):
    with places([{"slot": 2}, {"slot": 4}]) as taken:
        assert taken.bundle_count == 2
        with pytest.raises(ValueError, match="Ray found no place for 1 bundles within 1 s, of {'slot': 1}"):
            begun = time.monotonic()
            with places([{"slot": 1}], deadline_s=1):
                pass
    assert time.monotonic() - begun < 1 + 30
    with places([{"slot": 1}]):
        pass


@pytest.mark.nightly
def test_a_node_that_is_gone_is_missed(two_nodes):
    lost = two_nodes.add_node(num_cpus=1)
    check_nodes(expected=3)
    two_nodes.remove_node(lost)
    with pytest.raises(ValueError, match=r"2 of 3 nodes \(.*\) have joined"):
        check_nodes(expected=3)


@pytest.mark.parametrize(
    ("end", "stays"),
    [(None, False), (SystemExit("stopped"), False), (KeyboardInterrupt(), False), (RunIsOver(), False),
     (RuntimeError(), True)],
)  # fmt: skip
def test_rays_folder_stays_after_an_error_alone(end, stays, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    with contextlib.suppress(SystemExit, KeyboardInterrupt, RunIsOver, RuntimeError), _private_folder() as folder:
        os.mkdir(folder)
        if end:
            raise end
    assert os.path.exists(folder) == stays == bool(os.listdir(tmp_path / "new"))


@pytest.mark.nightly
def test_ray_asks_for_a_token_whichever_part_of_a_run_is_imported_first():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    code = "import os, grpo_rl.assembly.asynchronous; print(os.environ['RAY_AUTH_MODE'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "token"
