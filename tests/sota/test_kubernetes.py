"""The RayJob is well formed, asks for what its pods have, and lets no one in without the token."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings

FILE = Path(__file__).resolve().parents[2] / "sota" / "kubernetes" / "rayjob.yaml"


@pytest.fixture(scope="module")
def documents():
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}


@pytest.fixture(scope="module")
def job(documents):
    return documents["RayJob"]["spec"]


@pytest.fixture(scope="module")
def words(job):
    """The words of the entrypoint's command."""
    found = shlex.split(job["entrypoint"])
    assert found[found.index("python") + 1].endswith("/sota/grpo_async.py")
    return found[found.index("python") + 2 :]


def gpus(pod):
    return sum(int(c["resources"]["limits"].get("nvidia.com/gpu", 0)) for c in pod["template"]["spec"]["containers"])


def test_the_entrypoints_overrides_are_a_config_that_can_run_on_the_pods(job, words):
    cfg = Settings.read(compose_config("grpo_gsm8k", [*words, "mode=async"]))
    cluster = job["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"]
    assert cfg.ray.nodes == 1 + sum(group["replicas"] for group in workers)
    devices = allocate(cfg, "async", visible=sum(group["replicas"] * gpus(group) for group in workers))
    assert len(devices.train) + len(devices.inference) == 16 and not devices.colocated
    assert gpus(cluster["headGroupSpec"]) == 0


def test_every_pod_asks_for_the_token_and_shares_the_volume(job):
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "grpo-ray-token"}
    for pod in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = pod["template"]["spec"]["containers"]
        names = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert not {e["name"] for e in container["env"]} & {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"}  # the operator sets them


def test_the_dashboard_is_reached_by_the_cluster_and_the_operator_alone(documents, job):
    cluster = job["rayClusterSpec"]
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP" and "enableIngress" not in cluster["headGroupSpec"]
    policy = documents["NetworkPolicy"]["spec"]
    labels = policy["podSelector"]["matchLabels"]
    for pod in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert pod["template"]["metadata"]["labels"].items() >= labels.items()
    (rule,) = policy["ingress"]
    allowed = [source["podSelector"]["matchLabels"] for source in rule["from"]]
    assert allowed == [labels, {"app.kubernetes.io/name": "kuberay-operator"}]
