"""The overlays of `deploy/kubernetes`: what `kubectl kustomize` makes of them is valid, and names what there is."""

import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fxlib.zoo.manifest import read_manifest
from fxlib_workers.config import APPLICATION as WORKER
from tests.deploy import crd_schemas

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = [FOLDER / "base", *sorted(FOLDER.glob("overlays/*"))]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs `kubectl`, which Debian has no package of"
)
overlays = pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: str(path.relative_to(FOLDER)))


@cache
def _made(folder: Path) -> list[Any]:
    told = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(told.stdout))


def made(folder: Path, kind: str = "") -> list[Any]:
    """Return the resources that an overlay makes, or those of a kind."""
    return [deepcopy(each) for each in _made(folder) if kind in ("", each["kind"])]


def names(folder: Path, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in made(folder, kind)}


def pods(folder: Path, **labels: str) -> list[Any]:
    """Return the templates of the pods that an overlay's workloads describe, or those that have the labels."""
    found = [template for each in made(folder) for template in crd_schemas.templates(each.get("spec"))]
    assert found
    return [each for each in found if labels.items() <= each["metadata"]["labels"].items()]


def containers(pod: Any) -> list[Any]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.mark.slow
@needs_kubectl
@overlays
def test_resources_are_valid_and_pods_have_no_more_than_they_need(folder: Path) -> None:
    assert made(folder)
    for each in made(folder):
        if crd_schemas.kind(each) in crd_schemas.defined():
            crd_schemas.check(each)
        else:
            kubernetes_validate.validate(each, "1.33", strict=True)
    for pod in pods(folder):
        speaks_to_kubernetes = pod["metadata"]["labels"].get("fxlib.ray/part") == "head"
        assert pod["spec"]["automountServiceAccountToken"] is speaks_to_kubernetes
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in containers(pod):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert "memory" in container["resources"]["limits"]


@needs_kubectl
@overlays
def test_what_resources_name_is_there(folder: Path) -> None:
    """Secrets, of which the kustomizations tell, aside."""
    for pod in pods(folder):
        volumes = {each["name"] for each in pod["spec"]["volumes"]} | {"data"}
        assert {each["name"] for container in containers(pod) for each in container["volumeMounts"]} <= volumes
        for volume in pod["spec"]["volumes"]:
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {
                None,
                *names(folder, "PersistentVolumeClaim"),
            }
            assert volume.get("configMap", {}).get("name") in {None, *names(folder, "ConfigMap")}
    for service in made(folder, "Service"):
        chosen = pods(folder, **service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= _ports(*chosen)


def _ports(*chosen: Any) -> set[str]:
    return {port["name"] for pod in chosen for container in containers(pod) for port in container.get("ports", [])}


@needs_kubectl
@overlays
def test_a_policy_says_what_each_pod_reaches_and_those_that_ask_the_service_reach_it(folder: Path) -> None:
    policies = [each["spec"] for each in made(folder, "NetworkPolicy") if "Egress" in each["spec"]["policyTypes"]]
    for pod in pods(folder):
        labels = pod["metadata"]["labels"].items()
        chosen = [each for each in policies if each["podSelector"].get("matchLabels", {"": ""}).items() <= labels]
        assert chosen, labels
        asks = "FXLIB_SERVICE'" in str(pod) or "--service" in str(pod)
        assert asks is any("fxlib-service" in str(each.get("egress")) for each in chosen)


@needs_kubectl
def test_the_worker_of_a_ray_cluster_finds_it_and_trials_begin_with_no_node() -> None:
    ray = FOLDER / "overlays" / "ray"
    assert "fxlib-worker" not in names(ray, "Deployment") | names(ray, "NetworkPolicy")
    (cluster,) = made(ray, "RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    trials = groups["trials"]
    assert trials["replicas"] == trials["minReplicas"] == 0 < trials["maxReplicas"]
    for other in (cluster["spec"]["headGroupSpec"], groups["home"]):  # no trial comes to pods that have other work
        assert other["rayStartParams"]["num-cpus"] == "0"
    (home,) = pods(ray, **{"fxlib.ray/part": "worker"})
    (worker,), (node,) = home["spec"]["initContainers"], home["spec"]["containers"]
    variables = {each["name"]: each for each in worker["env"]}
    config = WORKER.read([], {key: each["value"] for key, each in variables.items() if "value" in each})
    # As KubeRay names the service of the head, and the secret of the token.
    assert config.trial.ray_address == f"{cluster['metadata']['name']}-head-svc:6379"
    secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}
    # A driver of Ray needs the node beside it: its processes, sockets and memory.
    assert home["spec"]["shareProcessNamespace"] is True
    assert {each["mountPath"] for each in node["volumeMounts"]} == {"/tmp/ray", "/dev/shm"}  # noqa: S108 - Ray's own
    assert all(each in worker["volumeMounts"] for each in node["volumeMounts"])


@needs_kubectl
@pytest.mark.parametrize(
    "kind, broken",
    [
        ("RayCluster", lambda spec: spec["workerGroupSpecs"][1].update(minReplica=0)),
        ("RayCluster", lambda spec: spec["autoscalerOptions"].update(version="v3")),
        ("RayCluster", lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(img="x")),
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(scheme="gopher")),
    ],
)
def test_what_an_operator_s_definition_does_not_know_is_refused(kind: str, broken: Callable[[Any], None]) -> None:
    (resource,) = made(FOLDER / "overlays" / {"RayCluster": "ray", "PodMonitor": "monitoring"}[kind], kind)
    broken(resource["spec"])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        crd_schemas.check(resource)


@needs_kubectl
def test_a_monitor_scrapes_a_port_that_there_is_under_the_name_that_alerts_ask_for() -> None:
    monitoring = FOLDER / "overlays" / "monitoring"
    (monitor,) = made(monitoring, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (pod,) = pods(monitoring, **monitor["spec"]["selector"]["matchLabels"])
    assert endpoint["port"] in _ports(pod)
    assert endpoint["scheme"].upper() == pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["scheme"]
    (label,) = endpoint["relabelings"]
    assert f'{label["targetLabel"]}="{label["replacement"]}"' in (ROOT / "deploy" / "alerts.yml").read_text()


@pytest.mark.slow
def test_the_nightly_zoo_has_a_manifest_whose_models_can_be_made() -> None:
    manifest = read_manifest(FOLDER / "overlays" / "zoo" / "zoo.toml")
    assert manifest.entries
    for entry in manifest.entries:
        module, _, function = entry.target.partition(":")
        assert getattr(import_module(module), function)(**entry.arguments)
