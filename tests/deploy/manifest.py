"""The objects of deploy/kubernetes/raycluster.yaml, and what is wrong with them.

What a RayCluster may hold is KubeRay's API, ray.io/v1. The rest is what Kubernetes' core API would refuse, and what
must agree with the configuration in the ConfigMap.
"""

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import yaml

from tandem.cluster.config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.frontends.http.monitoring import HEALTH, READY
from tandem.cluster.processes.own_ray import OBJECT_STORE_BYTES
from tests.deploy.known import PINS, RAY_START, VERSION, parse_ray, parse_tandem, stop_seconds

KINDS = {"ConfigMap": "v1", "RayCluster": "ray.io/v1", "Service": "v1", "NetworkPolicy": "networking.k8s.io/v1"}
SPEC = {"authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"}
SPEC |= {"headServiceAnnotations", "managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs"}
HEAD = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME_LENGTH = 15
CONFIG = "cluster.yaml"
SECRET = "a-secret-of-enough-characters"
START = "KUBERAY_GEN_RAY_START_CMD"


@dataclass(frozen=True)
class Manifest:
    """Parsed. config: the cluster's."""

    cluster: dict[str, Any]
    service: dict[str, Any]
    policy: dict[str, Any]
    config_name: str
    config_text: str

    @property
    def pod(self) -> dict[str, Any]:
        return self.cluster["spec"]["headGroupSpec"]["template"]["spec"]

    @property
    def container(self) -> dict[str, Any]:
        return self.pod["containers"][0]

    @property
    def script(self) -> str:
        return self.container["args"][0]

    def config(self) -> ClusterConfig:
        given = {one["name"]: SECRET for one in self.container["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.config_text)
            file.flush()
            return load_config(file.name, (), given)

    def ray_start(self, **more: str) -> str:
        """What KubeRay puts into KUBERAY_GEN_RAY_START_CMD: sorted options, between spaces."""
        limits = self.container["resources"]["limits"]
        given = {"block": "true", "dashboard-agent-listen-port": "52365", "dashboard-host": "0.0.0.0"}
        given |= {"metrics-export-port": "8080", "num-cpus": limits["cpu"], "num-gpus": limits["nvidia.com/gpu"]}
        given |= self.cluster["spec"]["headGroupSpec"]["rayStartParams"] | more
        kept = {"include-dashboard", "include-log-monitor", "log-color"}
        flags = [
            f" --{name}={value} " if value not in ("true", "false") or name in kept else f" --{name} "
            for name, value in sorted(given.items())
            if value != "false" or name in kept
        ]
        return "ray start --head " + "".join(flags)


def read(text: str) -> Manifest:
    """KeyError for a missing object."""
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    config = objects["ConfigMap"]
    return Manifest(
        objects["RayCluster"],
        objects["Service"],
        objects["NetworkPolicy"],
        config["metadata"]["name"],
        config["data"][CONFIG],
    )


def findings(text: str) -> list[str]:
    """Empty for a good manifest."""
    try:
        manifest = read(text)
        config = manifest.config()
    except (ConfigError, KeyError, yaml.YAMLError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [
        *_of_objects(text),
        *_of_cluster(manifest),
        *_of_ports(manifest, config),
        *_of_volumes(manifest, config),
        *_of_commands(manifest, config),
        *_of_probes(manifest, config),
        *_of_rights(manifest),
    ]


def _of_objects(text: str) -> Iterator[str]:
    for one in yaml.safe_load_all(text):
        if KINDS.get(one["kind"]) != one["apiVersion"]:
            yield f"{one['kind']} is not in {one['apiVersion']}"
        if not NAME.fullmatch(one["metadata"]["name"]):
            yield f"metadata.name {one['metadata']['name']}"


def _of_cluster(manifest: Manifest) -> Iterator[str]:
    spec, name = manifest.cluster["spec"], manifest.cluster["metadata"]["name"]
    head = spec["headGroupSpec"]
    yield from (f"RayCluster has no field spec.{key}" for key in set(spec) - SPEC)
    yield from (f"RayCluster has no field headGroupSpec.{key}" for key in set(head) - HEAD)
    if spec["rayVersion"] != PINS["ray"]:
        yield f"rayVersion {spec['rayVersion']}: constraints.txt pins {PINS['ray']}"
    if manifest.cluster["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") != "true":
        yield "KubeRay would take its own command"
    options = {name.lstrip("-") for option in RAY_START.params for name in option.opts}
    yield from (f"ray start has no option {name}" for name in set(head["rayStartParams"]) - options)
    if not all(isinstance(value, str) for value in head["rayStartParams"].values()):
        yield "rayStartParams must be texts"
    elif head["rayStartParams"].get("object-store-memory") != str(OBJECT_STORE_BYTES):
        yield f"object-store-memory must be {OBJECT_STORE_BYTES}"
    for selector in (manifest.service["spec"]["selector"], manifest.policy["spec"]["podSelector"]["matchLabels"]):
        if selector.get("ray.io/cluster") != name:
            yield f"the label ray.io/cluster of Pods is {name}, not {selector}"


def _of_ports(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in manifest.container["ports"]}
    wanted = {"grpc": config.gateway.port, "https": config.gateway.http_port, "monitor": config.metrics.port}
    if ports != wanted:
        yield f"container ports {ports}: the configuration has {wanted}"
    if any(len(name) > PORT_NAME_LENGTH for name in ports):
        yield "a port's name is too long"
    targets = {port["targetPort"]: port["port"] for port in manifest.service["spec"]["ports"]}
    if targets != wanted:
        yield f"Service ports {targets}: the configuration has {wanted}"
    admitted = {port["port"] for rule in manifest.policy["spec"]["ingress"] for port in rule["ports"]}
    if admitted != set(wanted):
        yield f"NetworkPolicy admits {admitted}"
    if config.gateway.host != "0.0.0.0" or config.metrics.host != "0.0.0.0":
        yield "the gateway does not listen on the Pod's address"


def _of_volumes(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    containers = [*manifest.pod["initContainers"], *manifest.pod["containers"]]
    mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in manifest.pod["volumes"]}
    if mounted != set(volumes):
        yield f"volumes {sorted(mounted ^ set(volumes))} are not mounted, or not there"
    paths = {mount["name"]: mount["mountPath"] for mount in manifest.container["volumeMounts"]}
    for path in ("/tmp", "/dev/shm", "/home/tandem", "/var/cache/tandem"):  # where tandem and Ray write
        if path not in paths.values():
            yield f"{path} cannot be written"
    if volumes.get("config", {}).get("configMap", {}).get("name") != manifest.config_name:
        yield "the ConfigMap is not mounted"
    if not str(config.model.path).startswith(f"{paths.get('models')}/"):
        yield f"model.path {config.model.path} is not on the volume of models"
    prepared = manifest.pod["initContainers"][0]["args"][0]
    for file in (config.security.tls_cert, config.security.tls_key):
        source = str(file).replace(paths.get("run", ""), "/tls")
        if source not in prepared or "--mode=600" not in prepared:
            yield f"{file}: the initContainer does not install it with mode 600"


def _of_commands(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    for script in (manifest.script, manifest.pod["initContainers"][0]["args"][0]):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=10, check=False)
        if checked.returncode:
            yield f"script: {checked.stderr}"
            return
    start, up = manifest.script.strip().splitlines()
    if start != f'eval "${{{START}/ --block / }}"':
        yield f"Ray is not started by {START} without --block: {start}"
    stop = manifest.container["lifecycle"]["preStop"]["exec"]["command"]
    try:
        if parse_ray(shlex.split(manifest.ray_start()))[1]["node_ip_address"] != "127.0.0.1":
            yield "Ray listens on the Pod's address"
        name, given = parse_tandem(shlex.split(up)[1:])
        if (name, str(given["config"]), given["address"]) != ("up", f"/etc/tandem/{CONFIG}", "${RAY_ADDRESS}"):
            yield f"not the ConfigMap's configuration on KubeRay's Ray: {up}"
        name, given = parse_tandem(stop)
    except click.UsageError as error:
        yield str(error)
        return
    grace = manifest.pod["terminationGracePeriodSeconds"]
    if (name, given["name"]) != ("down", config.name):
        yield f"preStop stops another cluster than {config.name}: {stop}"
    if not stop_seconds(config.gateway.drain_seconds) <= given["timeout"] < grace:
        yield f"preStop waits {given['timeout']} s and Kubernetes {grace} s; a stop takes up to " + str(
            stop_seconds(config.gateway.drain_seconds)
        )


def _of_probes(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    container = manifest.container
    wanted = {"startupProbe": HEALTH, "livenessProbe": HEALTH, "readinessProbe": READY}
    scheme = "HTTPS" if config.security.tls_cert else "HTTP"
    for name, path in wanted.items():
        get = container[name]["httpGet"]
        if get != {"path": path, "port": "monitor", "scheme": scheme}:
            yield f"{name} asks {get}; it must ask {path} of the port monitor over {scheme}"
    alive = container["livenessProbe"]
    if alive["periodSeconds"] * alive["failureThreshold"] <= config.recovery.unresponsive_seconds:
        yield "livenessProbe ends the Pod before recovery.unresponsive_seconds"
    ready = container["readinessProbe"]
    if ready["periodSeconds"] * ready["failureThreshold"] >= config.gateway.drain_seconds:
        yield "readinessProbe notices a drain after its end"


def _of_rights(manifest: Manifest) -> Iterator[str]:
    """The Pod Security Standard `restricted`, and images of this version."""
    pod = manifest.pod["securityContext"]
    if not pod.get("runAsNonRoot") or pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "securityContext: not restricted"
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for container in (*manifest.pod["initContainers"], *manifest.pod["containers"]):
        if container["securityContext"] != wanted:
            yield f"{container['name']}: securityContext must be {wanted}"
        if container["image"] != f"tandem:{VERSION}-cuda13":
            yield f"{container['name']}: the Dockerfile makes tandem:{VERSION}-cuda13"
    limits, config = manifest.container["resources"]["limits"], manifest.config()
    gpus = config.num_islands * (config.island.num_prefill + config.island.num_decode)
    if limits["nvidia.com/gpu"] != str(gpus) or manifest.container["resources"]["requests"] != limits:
        yield f"resources: {gpus} GPUs are needed, and requests must be as limits"
