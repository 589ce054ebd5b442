"""The RayJob is well formed, asks for what its pods have, and lets no one in without the token."""

import shlex
from pathlib import Path

import yaml

from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings

FILE = Path(__file__).resolve().parents[2] / "sota" / "kubernetes" / "rayjob.yaml"
DOCUMENTS = {document["kind"]: document["spec"] for document in yaml.safe_load_all(FILE.read_text())}
CLUSTER = DOCUMENTS["RayJob"]["rayClusterSpec"]
PODS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def test_the_entrypoints_overrides_are_a_config_that_can_run_on_the_pods():
    words = shlex.split(DOCUMENTS["RayJob"]["entrypoint"])
    script = words.index("python") + 1
    assert words[script].endswith("/sota/grpo_async.py")
    cfg = Settings.read(compose_config("grpo_gsm8k", [*words[script + 1 :], "mode=async"]))
    gpus = [
        pod.get("replicas", 1) * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        for pod in PODS
        for container in pod["template"]["spec"]["containers"]
    ]
    assert cfg.ray.nodes == sum(pod.get("replicas", 1) for pod in PODS) and gpus[0] == 0
    devices = allocate(cfg, "async", visible=sum(gpus))
    assert len(devices.train) + len(devices.inference) == 16 and not devices.colocated


def test_every_pod_asks_for_the_token_and_only_the_cluster_and_the_operator_reach_the_dashboard():
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "grpo-ray-token"}
    assert CLUSTER["headGroupSpec"]["serviceType"] == "ClusterIP" and "enableIngress" not in CLUSTER["headGroupSpec"]
    labels = DOCUMENTS["NetworkPolicy"]["podSelector"]["matchLabels"]
    for pod in PODS:
        (container,) = pod["template"]["spec"]["containers"]
        names = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert not {e["name"] for e in container["env"]} & {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"}  # the operator sets them
        assert pod["template"]["metadata"]["labels"].items() >= labels.items()
    (rule,) = DOCUMENTS["NetworkPolicy"]["ingress"]
    allowed = [source["podSelector"]["matchLabels"] for source in rule["from"]]
    assert allowed == [labels, {"app.kubernetes.io/name": "kuberay-operator"}]
