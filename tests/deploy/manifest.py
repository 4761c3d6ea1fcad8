"""The objects of a manifest in deploy/kubernetes/, and what is wrong with them.

What a RayCluster may hold is KubeRay's API, ray.io/v1. The rest is what Kubernetes' core API would refuse, and what
must agree with the configuration in the ConfigMap.
"""

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import yaml

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.frontends.http.monitoring import HEALTH, READY
from tandem.cluster.processes.own_ray import LOOPBACK, OBJECT_STORE_BYTES
from tests.deploy.known import PINS, RAY_START, VERSION, parse_ray, parse_tandem, stop_seconds

KINDS = {"ConfigMap": "v1", "RayCluster": "ray.io/v1", "Service": "v1", "NetworkPolicy": "networking.k8s.io/v1"}
SPEC = {"authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"}
SPEC |= {"headServiceAnnotations", "managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs"}
HEAD = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
WORKERS = {"groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams"}
WORKERS |= {"replicas", "resources", "scaleStrategy", "suspend", "template"}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME_LENGTH = 15
CONFIG = "cluster.yaml"
SECRET = "a-secret-of-enough-characters"
START = "KUBERAY_GEN_RAY_START_CMD"
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest. group: the one whose Pod this is about, the head's or a worker group's."""

    group: dict[str, Any]
    cluster: dict[str, Any]
    service: dict[str, Any]
    policy: dict[str, Any]
    config_name: str
    config_text: str

    @property
    def pod(self) -> dict[str, Any]:
        return self.group["template"]["spec"]

    @property
    def is_head(self) -> bool:
        return "groupName" not in self.group

    @property
    def workers(self) -> list["Manifest"]:
        return [replace(self, group=group) for group in self.cluster["spec"].get("workerGroupSpecs", ())]

    @property
    def container(self) -> dict[str, Any]:
        return self.pod["containers"][0]

    @property
    def script(self) -> str:
        return self.container["args"][0]

    @property
    def environ(self) -> dict[str, str]:
        """Returns the container's environment in the manifest; the image adds more."""
        return {one["name"]: one["value"] for one in self.container.get("env", ()) if "value" in one}

    def config(self) -> ClusterConfig:
        given = {one["name"]: SECRET for one in self.container["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.config_text)
            file.flush()
            return load_config(file.name, (), given)

    def ray_start(self, **more: str) -> str:
        """Returns what KubeRay puts into KUBERAY_GEN_RAY_START_CMD: sorted options, between spaces."""
        limits = self.container["resources"]["limits"]
        given = {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
        given |= {"num-cpus": limits["cpu"]} | ({"dashboard-host": "0.0.0.0"} if self.is_head else {})
        if GPU in limits:
            given["num-gpus"] = limits[GPU]
        given |= self.group["rayStartParams"] | more
        kept = {"include-dashboard", "include-log-monitor", "log-color"}
        flags = [
            f" --{name}={value} " if value not in ("true", "false") or name in kept else f" --{name} "
            for name, value in sorted(given.items())
            if value != "false" or name in kept
        ]
        return f"ray start {'--head ' if self.is_head else ''}" + "".join(flags)


def read(text: str) -> Manifest:
    """Parses a manifest. KeyError for a missing object."""
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    config = objects["ConfigMap"]
    return Manifest(
        objects["RayCluster"]["spec"]["headGroupSpec"],
        objects["RayCluster"],
        objects["Service"],
        objects["NetworkPolicy"],
        config["metadata"]["name"],
        config["data"][CONFIG],
    )


def findings(text: str) -> list[str]:
    """Lists faults; empty for a good manifest."""
    try:
        manifest = read(text)
        config = manifest.config()
    except (ConfigError, KeyError, yaml.YAMLError) as error:
        return [f"{type(error).__name__}: {error}"]
    found = [
        *_of_objects(text),
        *_of_cluster(manifest),
        *_of_services(manifest, config),
        *_of_commands(manifest, config),
    ]
    for one in (manifest, *manifest.workers):
        found += [*_of_group(one), *_of_ports(one, config), *_of_volumes(one, config), *_of_rights(one)]
    found += [finding for one in manifest.workers for finding in _of_workers(one, config)]
    return [*found, *_of_probes(manifest, config), *_of_gpus(manifest, config)]


def _of_objects(text: str) -> Iterator[str]:
    for one in yaml.safe_load_all(text):
        if KINDS.get(one["kind"]) != one["apiVersion"]:
            yield f"{one['kind']} is not in {one['apiVersion']}"
        if not NAME.fullmatch(one["metadata"]["name"]):
            yield f"metadata.name {one['metadata']['name']}"


def _of_cluster(manifest: Manifest) -> Iterator[str]:
    spec, name = manifest.cluster["spec"], manifest.cluster["metadata"]["name"]
    yield from (f"RayCluster has no field spec.{key}" for key in set(spec) - SPEC)
    if spec["rayVersion"] != PINS["ray"]:
        yield f"rayVersion {spec['rayVersion']}: constraints.txt pins {PINS['ray']}"
    if manifest.cluster["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") != "true":
        yield "KubeRay would take its own command"
    for selector in (manifest.service["spec"]["selector"], manifest.policy["spec"]["podSelector"]["matchLabels"]):
        if selector.get("ray.io/cluster") != name:
            yield f"the label ray.io/cluster of Pods is {name}, not {selector}"
    if ("ray.io/node-type" in manifest.service["spec"]["selector"]) == bool(manifest.workers):
        yield "the Service must send clients to each Pod with a gateway"


def _of_group(manifest: Manifest) -> Iterator[str]:
    group = manifest.group
    kind, fields = ("headGroupSpec", HEAD) if manifest.is_head else ("workerGroupSpecs", WORKERS)
    yield from (f"RayCluster has no field {kind}.{key}" for key in set(group) - fields)
    options = {name.lstrip("-") for option in RAY_START.params for name in option.opts}
    yield from (f"ray start has no option {name}" for name in set(group["rayStartParams"]) - options)
    if not all(isinstance(value, str) for value in group["rayStartParams"].values()):
        yield "rayStartParams must be texts"
    elif (manifest.environ.get(LOOPBACK) == "1") != bool(manifest.workers):
        yield f"{LOOPBACK} must be 1 where Pods join each other; the image has 0"
    elif group["rayStartParams"].get("object-store-memory") != str(OBJECT_STORE_BYTES):
        yield f"object-store-memory must be {OBJECT_STORE_BYTES}"


def _of_ports(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in manifest.container["ports"]}
    wanted = _ports(config)
    if {name: ports.get(name) for name in wanted} != wanted:
        yield f"container ports {ports}: the configuration has {wanted}"
    if any(len(name) > PORT_NAME_LENGTH for name in ports):
        yield "a port's name is too long"


def _ports(config: ClusterConfig) -> dict[str, int | None]:
    return {"grpc": config.gateway.port, "https": config.gateway.http_port, "monitor": config.metrics.port}


def _of_services(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    wanted, rules = _ports(config), manifest.policy["spec"]["ingress"]
    targets = {port["targetPort"]: port["port"] for port in manifest.service["spec"]["ports"]}
    if targets != wanted:
        yield f"Service ports {targets}: the configuration has {wanted}"
    admitted = {port["port"] for rule in rules for port in rule.get("ports", ())}
    if admitted != set(wanted):
        yield f"NetworkPolicy admits {admitted}"
    if any(rule["ports"] == [{"port": "monitor"}] and "from" not in rule for rule in rules if "ports" in rule):
        yield "NetworkPolicy admits everybody to metrics"
    own = [{"podSelector": {"matchLabels": {"ray.io/cluster": manifest.cluster["metadata"]["name"]}}}]
    if [rule.get("from") for rule in rules if "ports" not in rule] != [own] * bool(manifest.workers):
        yield "NetworkPolicy must admit the cluster's Pods, and nobody else, to each other's ports"
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
    if manifest.is_head and volumes.get("config", {}).get("configMap", {}).get("name") != manifest.config_name:
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
        address = parse_ray(shlex.split(manifest.ray_start()))[1]["node_ip_address"]
        if address != (None if manifest.workers else "127.0.0.1"):
            yield f"Ray listens on {address}, and " + (
                "other Pods join" if manifest.workers else "not on loopback: Pod's address"
            )
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
    """Yields faults against the Pod Security Standard `restricted`, and images of another version."""
    pod = manifest.pod["securityContext"]
    if not pod.get("runAsNonRoot") or pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "securityContext: not restricted"
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for container in (*manifest.pod["initContainers"], *manifest.pod["containers"]):
        if container["securityContext"] != wanted:
            yield f"{container['name']}: securityContext must be {wanted}"
        if container["image"] != f"tandem:{VERSION}-cuda13":
            yield f"{container['name']}: the Dockerfile makes tandem:{VERSION}-cuda13"


def _of_workers(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    """Yields the faults of a worker group."""
    if manifest.script != f'eval "exec ${{{START}}}"':
        yield f"a worker's Ray is not started by {START}: {manifest.script}"
    group, container = manifest.group, manifest.container
    name, given = parse_ray(shlex.split(manifest.ray_start(address="head:6379")))
    raylet = {port["name"]: port["containerPort"] for port in container["ports"]}.get("raylet")
    if (name, given["node_manager_port"]) != ("start", raylet):
        yield f"the port raylet is {raylet}, and Ray's node is at {given['node_manager_port']}"
    if container["livenessProbe"].get("tcpSocket") != {"port": "raylet"}:
        yield "livenessProbe must ask Ray's node, as the gateway ends with `tandem up`"
    ready = container["readinessProbe"]["httpGet"]
    if ready != {"path": READY, "port": "monitor", "scheme": "HTTPS"}:
        yield f"a worker's readinessProbe asks {ready}; it must ask {READY}"
    if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
        yield "replicas must be between minReplicas and maxReplicas"
    if config.gateway.nodes != "all" or config.island.network != "node":
        yield "gateway.nodes must be all, and island.network node"
    if config.ray.min_hosts != group["replicas"]:
        yield f"ray.min_hosts is {config.ray.min_hosts}, and there are {group['replicas']} replicas"


def _of_gpus(manifest: Manifest, config: ClusterConfig) -> Iterator[str]:
    each = config.island.num_prefill + config.island.num_decode
    groups = manifest.workers or [manifest]
    there = 0
    for one in groups:
        resources = one.container["resources"]
        if resources["requests"] != resources["limits"]:
            yield "resources: requests must be as limits"
        gpus = int(resources["limits"].get(GPU, 0))
        there += gpus * one.group.get("replicas", 1)
        if manifest.workers and (gpus % each or config.island.node_resources.get("GPU") != gpus):
            yield f"an island has {each} GPUs, and island.node_resources must have the GPU of a Pod: {gpus}"
    if there != config.num_islands * each:
        yield f"resources: {config.num_islands * each} GPUs are needed"
