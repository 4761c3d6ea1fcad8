"""deploy/prometheus and deploy/kubernetes: what Prometheus, its operator, kustomize and Kubernetes would refuse."""

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.frontends.http.monitoring import METRICS
from tests.deploy import manifest
from tests.deploy.known import DEPLOY

FOLDER = DEPLOY / "kubernetes"
MONITORING = FOLDER / "monitoring"
MANIFESTS = [FOLDER / "raycluster.yaml", FOLDER / "raycluster-hosts.yaml"]
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
RELEASE = "1.32"  # of Kubernetes
# Of monitoring.coreos.com/v1: what a ServiceMonitor may hold, as far as it is of use here.
SPEC = {"attachMetadata", "endpoints", "jobLabel", "namespaceSelector", "sampleLimit", "selector", "targetLabels"}
ENDPOINT = {"authorization", "honorLabels", "interval", "metricRelabelings", "params", "path", "port", "relabelings"}
ENDPOINT |= {"scheme", "scrapeTimeout", "targetPort", "tlsConfig"}
TLS = {"ca", "cert", "insecureSkipVerify", "keySecret", "maxVersion", "minVersion", "serverName"}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def unknown(monitor: dict[str, Any]) -> Iterator[str]:
    """Fields that the operator's API does not have."""
    yield from set(monitor["spec"]) - SPEC
    for endpoint in monitor["spec"]["endpoints"]:
        yield from set(endpoint) - ENDPOINT
        yield from set(endpoint.get("tlsConfig", {})) - TLS


def misses(monitor: dict[str, Any], cluster: manifest.Manifest) -> Iterator[str]:
    """Yields why a ServiceMonitor would not find the metrics of a cluster."""
    wanted, service = monitor["spec"]["selector"]["matchLabels"], cluster.service
    if not wanted.items() <= service["metadata"]["labels"].items():
        yield f"the labels {wanted} are not the Service's"
    (endpoint,) = monitor["spec"]["endpoints"]
    ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
    config = cluster.config()
    if ports.get(endpoint["port"]) != config.metrics.port:
        yield f"the port {endpoint['port']} is not metrics.port"
    if endpoint["path"] != METRICS or endpoint["scheme"] != ("https" if config.security.tls_cert else "http"):
        yield f"the metrics are at {METRICS}"
    if not config.metrics.public and "authorization" not in endpoint:
        yield "a token is needed"
    secrets = {one["secret"]["secretName"] for one in cluster.pod["volumes"] if "secret" in one}
    if endpoint["tlsConfig"]["ca"]["secret"]["name"] not in secrets:
        yield "the Secret of the certificate is another one"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_service_monitor_finds_each_gateway(path: Path) -> None:
    monitor, cluster = load(MONITORING / "servicemonitor.yaml"), manifest.read(path.read_text(encoding="utf-8"))
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert [*unknown(monitor), *misses(monitor, cluster)] == []
    wrong = copy.deepcopy(monitor)
    wrong["spec"]["selector"]["matchLabels"] = {"app": "tandem"}
    wrong["spec"]["endpoints"][0] |= {"port": "https", "paths": "/metrics"}
    assert len([*unknown(wrong), *misses(wrong, cluster)]) == 3


def test_the_operator_gets_the_same_alerts() -> None:
    rule = load(MONITORING / "prometheusrule.yaml")
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == load(ALERTS), f"copy the groups of {ALERTS.name} to prometheusrule.yaml"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_alerts(tmp_path: Path) -> None:
    def check(text: str) -> int:
        (tmp_path / "alerts.yaml").write_text(text)
        command = ["promtool", "check", "rules", str(tmp_path / "alerts.yaml")]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode

    text = ALERTS.read_text(encoding="utf-8")
    assert check(text) == 0
    assert check(text.replace("sum by", "some by")) != 0


@pytest.mark.parametrize("folder", [FOLDER, MONITORING], ids=lambda path: path.name)
def test_a_kustomization_names_files_that_are_there(folder: Path) -> None:
    found = load(folder / "kustomization.yaml")
    assert (found.pop("apiVersion"), found.pop("kind")) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert [*found] == ["resources"]
    assert all((folder / name).is_file() for name in found["resources"])


def built(folder: Path) -> list[Any]:
    """The objects that kustomize makes."""
    command = ["kubectl", "kustomize", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [*yaml.safe_load_all(made)]


@needs_kubectl
@pytest.mark.long
def test_an_overlay_changes_the_base(tmp_path: Path) -> None:
    """kustomize takes no base outside of a folder's own file system, so it is copied."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    base = built(tmp_path / "kubernetes")
    plain = [*yaml.safe_load_all(MANIFESTS[0].read_text(encoding="utf-8"))]
    assert {one["kind"]: one for one in base} == {one["kind"]: one for one in plain}
    assert [one["kind"] for one in built(tmp_path / "kubernetes" / "monitoring")] == [
        "PrometheusRule",
        "ServiceMonitor",
    ]
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    claim = "/spec/headGroupSpec/template/spec/volumes/3/persistentVolumeClaim/claimName"
    wanted = {
        "namespace": "models",
        "resources": ["../kubernetes", "../kubernetes/monitoring"],
        "images": [{"name": "tandem", "newName": "registry.example/tandem", "newTag": "1"}],
        "patches": [
            {
                "target": {"kind": "RayCluster"},
                "patch": json.dumps([{"op": "replace", "path": claim, "value": "qwen"}]),
            }
        ],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    made = built(overlay)
    assert {one["metadata"]["namespace"] for one in made} == {"models"}
    pod = manifest.read(yaml.safe_dump_all(made)).pod
    assert {one["image"] for one in (*pod["initContainers"], *pod["containers"])} == {"registry.example/tandem:1"}
    assert pod["volumes"][3]["persistentVolumeClaim"]["claimName"] == "qwen"


def pods(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The Pods of a RayCluster, as Kubernetes gets them."""
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"].get("workerGroupSpecs", ())):
        template = group["template"]
        yield {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod", **template["metadata"]}}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_takes_the_objects(path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        for each in pods(one) if one["kind"] == "RayCluster" else [one]:
            schemas.validate(each, RELEASE, strict=True)
            with pytest.raises(schemas.ValidationError):
                schemas.validate({**each, "specs": {}}, RELEASE, strict=True)
