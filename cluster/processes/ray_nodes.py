"""The nodes of a Ray, and places on them."""

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import ray
import ray._private.worker
import ray._raylet
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tandem.cluster.errors import NoRoom, RayAway, StartFailed
from tandem.cluster.processes.placement import (
    CPU_FRACTION,
    Node,
    Where,
    could_have_room,
    in_words,
    nodes_with_room,
    places,
    size_of,
    spread_over,
    spread_places,
)

NODE_FRACTION = 0.001  # of the resource that every node has under its own name, to be placed there
PLACEMENT_SECONDS = 30.0
POLL_SECONDS = 0.2
ANSWER_SECONDS = 2.0
GCS_SECONDS = 10.0  # on a busy machine it answers late
_worker: Any = ray._private.worker.global_worker
_numbers = count(1)  # of placement groups


def process_resources(gpus: int) -> dict[str, float]:
    """Returns the resources of one process."""
    return {"CPU": CPU_FRACTION, "GPU": gpus} if gpus else {"CPU": CPU_FRACTION}


def on_node(address: str) -> dict[str, float]:
    """Returns the resource that names a node."""
    return {f"node:{address}": NODE_FRACTION}


def check_answers() -> None:
    """Raises RayAway unless the GCS answers in time. Ray's other calls wait for an absent GCS without a limit."""
    try:
        _worker.gcs_client.check_alive([], timeout=GCS_SECONDS)
    except ray.exceptions.RpcError as error:
        reason = str(error).splitlines()[0]
        raise RayAway(f"Ray's GCS does not answer, and nothing is started until it does: {reason}") from error


def own_cluster() -> Any:
    """Returns Ray's id of the cluster that this process has joined."""
    return _worker.gcs_client.cluster_id


def answered_cluster(host: str, port: int) -> Any:
    """Returns the id of the cluster whose GCS answers there, or None. A GCS that has started without its state has a
    new id. Ray ends a process that asks such a GCS for anything else."""
    try:
        return vars(ray._raylet)["GcsClient"](address=f"{host}:{port}").cluster_id
    except ray.exceptions.RpcError:
        return None


def alive_nodes() -> list[Node]:
    """Lists the nodes. StartFailed when there is none, RayAway while that is not known."""
    check_answers()
    free = available_resources_per_node()
    nodes = [
        Node(
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], {}),
            node.get("Labels") or {},
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    if not nodes:
        raise StartFailed("Ray has no node any more: its raylet, or the whole of Ray, has ended")
    return nodes


def log_folder() -> str:
    """Returns the folder where Ray keeps what processes of this node write to stderr."""
    return _worker.node.get_logs_dir_path()


def own_node_address() -> str:
    """Returns the address of the node that this process is on."""
    return _address_of(ray.get_runtime_context().get_node_id())


@cache
def _address_of(node_id: str) -> str:
    """Returns the address of a node, which never changes. StartFailed if Ray does not know the node."""
    check_answers()
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return node["NodeManagerAddress"]
    raise StartFailed(f"Ray does not know the node {node_id} of this process")


def check_there(bundles: Sequence[dict[str, float]]) -> None:
    """Raises StartFailed if all nodes together do not have what the bundles need, free or not."""
    there, needed = ray.cluster_resources(), sum_of(bundles)
    if not there:
        raise StartFailed("Ray has no node any more: its raylet, or the whole of Ray, has ended")
    if any(there.get(name, 0) < amount for name, amount in needed.items()):
        raise StartFailed(
            f"{words_of(needed)} are needed; Ray has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
        )


def check_growth(
    now: int, more: int, need: dict[str, float], where: Where, held: Mapping[str, Mapping[str, float]]
) -> None:
    """Raises NoRoom if a group of `now` processes could not get `more`, even if only this cluster's ran on fitting
    nodes.

    need: of each process. held: what this cluster's processes hold, by the addresses of their nodes.
    """
    here = own_node_address()
    nodes = [_without(node, held.get(node.address, {})) for node in alive_nodes() if where.fits(node, here)]
    fitting = places(nodes, need)
    if more > fitting:
        raise NoRoom(
            f"{now + more} processes are needed, with {words_of(sum_of([need]))} for each; at most {now + fitting} "
            f"fit: {in_words(nodes)}"
        )


def _without(node: Node, held: Mapping[str, float]) -> Node:
    return replace(node, free={name: amount - held.get(name, 0) for name, amount in node.total.items()})


def choose_nodes(bundles: Sequence[dict[str, float]], where: Where, groups: Counter[str], deadline: float) -> list[str]:
    """Returns the address of a node for each bundle, by the deadline at the latest. All bundles get one node unless
    `where` spreads them.

    groups: see nodes_with_room(). NoRoom at once if no node has so much, free or not. A node that does not answer is
    not chosen: Ray takes half a minute or more to see that it is gone. If no other node may be chosen, NoRoom comes at
    once.
    """
    if not bundles:
        return []  # of a group that only shrinks
    needed = sum_of(bundles)
    text, here = words_of(needed), own_node_address()
    silent: set[str] = set()
    while True:
        nodes = alive_nodes()
        fitting = [node for node in nodes if where.fits(node, here)]
        if not fitting:
            raise NoRoom(f"Ray has no node with {where}; its nodes: {in_words(nodes)}")
        if where.spread:
            if not spread_over([replace(node, free=node.total) for node in fitting], bundles, groups):
                most = words_of(sum_of([max(bundles, key=size_of)]))
                raise NoRoom(f"{text} are needed, {most} of them on one node; {in_words(fitting)}")
            chosen = spread_over([node for node in fitting if node.address not in silent], bundles, groups)
        else:
            if not could_have_room(fitting, needed):
                raise NoRoom(f"{text} are needed on one node; {in_words(fitting)}")
            heard = [node for node in fitting if node.address not in silent]
            chosen = nodes_with_room(heard, needed, groups)[:1] * len(bundles)
        others = {node.address: node for node in chosen if node.address != here}
        mute = {address for address, node in others.items() if not _answers(node)}
        if chosen and not mute:
            return [node.address for node in chosen]
        silent |= mute
        if (mute and where.address) or time.monotonic() >= deadline:  # others wait for their places meanwhile
            unheard = f"; no answer from {', '.join(sorted(silent))}" if silent else ""
            raise NoRoom(f"Ray has no node with {text} free: {in_words(fitting)}{unheard}")
        if not chosen:
            silent.clear()
            time.sleep(POLL_SECONDS)


def _answers(node: Node) -> bool:
    """Returns whether the node's raylet can be reached."""
    try:
        socket.create_connection((node.address, node.port), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def free_places(most: int, bundles: Sequence[dict[str, float]], where: Where) -> int:
    """Returns how many groups of these bundles, `most` at most, could be placed now."""
    here = own_node_address()
    fitting = [node for node in alive_nodes() if where.fits(node, here)]
    return spread_places(fitting, bundles, most) if where.spread else min(most, places(fitting, sum_of(bundles)))


def request_nodes(groups: int, bundles: Sequence[dict[str, float]], where: Where) -> None:
    """Tells Ray's autoscaler, and so KubeRay's, that so many groups should fit, running ones included. The request
    holds until the next call: 0 groups withdraw it. Without an autoscaler it has no effect."""
    from ray.autoscaler.sdk import request_resources

    marks = {name: min(amount, NODE_FRACTION) for name, amount in where.resources.items()}  # nodes that have them
    apart = bundles if where.spread else [sum_of(bundles)]  # one bundle is on one node
    wanted = [{name: amount for name, amount in need.items() if amount} | marks for need in apart] * groups
    request_resources(bundles=wanted, bundle_label_selectors=[dict(where.labels)] * len(wanted))


def place(bundles: Sequence[dict[str, float]], names: Sequence[str], seconds: float) -> list[PlacementGroup]:
    """Makes one placement group for each bundle, with these names. StartFailed leaves none."""
    check_answers()
    check_there(bundles)
    placed = [
        # A number follows the name: Ray frees the name of a group that is gone only after a while.
        placement_group([bundle], strategy="STRICT_PACK", name=f"{name} #{next(_numbers)}")
        for bundle, name in zip(bundles, names, strict=True)
    ]
    deadline = time.monotonic() + seconds
    if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in placed):
        for group in placed:
            remove_placement_group(group)
        raise NoRoom(f"Ray has no node with {words_of(sum_of(bundles))} free: {in_words(alive_nodes())}")
    return placed


def bundles_of(resources: dict[str, float], places: Sequence[int]) -> list[dict[str, float]]:
    """Returns the bundle of each place, by its number of processes. resources: of each process."""
    return [sum_of([resources] * processes) for processes in places]


def sum_of(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(sum(bundle.get(name, 0) for bundle in bundles), 4) for name in ("CPU", "GPU")}


def words_of(needed: dict[str, float]) -> str:
    return f"{needed['CPU']:.1f} CPUs" + (f" and {needed['GPU']:.0f} GPUs" if needed["GPU"] else "")
