"""deploy/kubernetes/raycluster.yaml: fields that Kubernetes and KubeRay know, and our own commands, ports and paths."""

import pytest

from tests.deploy.known import DEPLOY
from tests.deploy.manifest import findings

TEXT = (DEPLOY / "kubernetes" / "raycluster.yaml").read_text(encoding="utf-8")
HOSTS = (DEPLOY / "kubernetes" / "raycluster-hosts.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [TEXT, HOSTS])
def test_the_manifest_is_true(text: str) -> None:
    assert findings(text) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("drain_seconds: 15.0", "drain_seconds: 30.0", "a stop takes up to"),
        ("drain_seconds: 15.0", "drain_second: 15.0", "unknown key gateway.drain_second"),
        ("drain_seconds: 15.0", "drain_seconds: 3.0", "notices a drain after its end"),
        ("terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 30", "Kubernetes 30 s"),
        ('"110"]', '"60"]', "preStop waits 60"),
        ("[tandem, down, tandem,", "[tandem, down, local,", "another cluster"),
        ("--timeout", "--wait", "--wait"),
        ("tandem up /etc", "tandem serve /etc", "none of the commands"),
        ('--address "${RAY_ADDRESS}"', "", "KubeRay's Ray"),
        ("/ --block / }", "}", "without --block"),
        ("exec tandem", 'exec "tandem', "script: "),
        ("include-dashboard:", "include-dashbord:", "include-dashbord"),
        ("node-ip-address: 127.0.0.1", "node-ip-address: 0.0.0.0", "Pod's address"),
        ('"83886080"', '"83886081"', "object-store-memory"),
        ('rayVersion: "2.60.0"', 'rayVersion: "2.50.0"', "constraints.txt"),
        ("  upgradeStrategy:", "  updateStrategy:", "no field spec.updateStrategy"),
        ('overwrite-container-cmd: "true"', 'overwrite-container-cmd: "yes"', "its own command"),
        ("kind: RayCluster", "kind: RayClusters", "KeyError"),
        ("ray.io/v1\n", "ray.io/v1alpha1\n", "is not in"),
        ("containerPort: 50051", "containerPort: 50052", "container ports"),
        ("port: 8000,", "port: 8001,", "Service ports"),
        ("[{port: grpc}, {port: https}]", "[{port: grpc}]", "NetworkPolicy"),
        ("selector: {ray.io/cluster: tandem", "selector: {ray.io/cluster: other", "the label ray.io/cluster"),
        ("path: /ready", "path: /readyz", "readinessProbe asks"),
        ("/ready, port: monitor, scheme: HTTPS", "/ready, port: monitor, scheme: HTTP", "over HTTPS"),
        ("failureThreshold: 12", "failureThreshold: 3", "unresponsive_seconds"),
        ("/tls/tls.crt /tls/tls.key", "/tls/tls.crt", "mode 600"),
        ("{name: tmp, emptyDir: {}}", "{name: temp, emptyDir: {}}", "not mounted, or not there"),
        ("{name: tmp, mountPath: /tmp}", "{name: tmp, mountPath: /temp}", "/tmp cannot be written"),
        ("path: /models/model", "path: /model", "volume of models"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "not restricted"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "securityContext must be"),
        ("num_decode: 1", "num_decode: 3", "4 GPUs are needed"),
        ("tls_key: /run/tandem/tls.key", "token: x", "security.token"),
        ("ray-head\n            image: tandem:", "ray-head\n            image: tandem:0", "the Dockerfile makes"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in TEXT
    found = findings(TEXT.replace(before, after, 1))
    assert any(finding in one for one in found), found


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ('_OSX_CLUSTER, value: "1"}', '_OSX_CLUSTER, value: "0"}', "must be 1 where Pods join"),
        ("replicas: 2", "replicas: 3", "replicas must be between"),
        ("min_hosts: 2", "min_hosts: 3", "ray.min_hosts is 3"),
        ("num_islands: 2", "num_islands: 3", "6 GPUs are needed"),
        ("{GPU: 2.0}", "{GPU: 1.0}", "the GPU of a Pod: 2"),
        ("nodes: all", "nodes: launcher", "gateway.nodes must be all"),
        ("network: node", "network: auto", "island.network node"),
        ("groupName: gpus", "groupNames: gpus", "has no field headGroupSpec.groupNames"),
        ("groupName: gpus", "groupName: gpus\n      hosts: 2", "no field workerGroupSpecs.hosts"),
        ('node-manager-port: "6380"', 'node-manager-port: "6381"', "the port raylet is 6380"),
        ("tcpSocket: {port: raylet}", "tcpSocket: {port: monitor}", "livenessProbe must ask Ray's node"),
        ('eval "exec ${', 'eval "${', "a worker's Ray is not started"),
        ("tandem}  # Pods of both kinds", "tandem, ray.io/node-type: head}", "each Pod with a gateway"),
        ("    - from:\n        - podSelector:", "    - from:\n        - namespaceSelector:", "nobody else"),
        ("include-dashboard:", "node-ip-address: 127.0.0.1\n      include-dashboard:", "other Pods join"),
    ],
)
def test_an_error_in_the_one_of_several_hosts_is_found(before: str, after: str, finding: str) -> None:
    assert before in HOSTS
    found = findings(HOSTS.replace(before, after, 1))
    assert any(finding in one for one in found), found
