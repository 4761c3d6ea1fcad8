"""Chooses the node that a group of processes goes to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

Resources = Mapping[str, float]
CPU_FRACTION = 0.1  # only Ray's accounting; the number of threads limits what a worker uses


@dataclass(frozen=True)
class Node:
    """One host of the cluster's Ray, in its present state. free and total: resources by Ray's names. port: of its
    raylet."""

    address: str
    total: Resources
    free: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    port: int = 0


@dataclass(frozen=True)
class Where:
    """The conditions that a node must meet besides room. here: it is the launcher's own. address: it has this address,
    unless empty. resources: Ray's, of which it must have as many in all. labels: Ray's, with these values. spread:
    members of a group go to as many nodes as there are, not to one."""

    here: bool = False
    resources: Resources = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False
    address: str = ""

    def fits(self, node: Node, here: str) -> bool:
        """here: the address of the launcher's node."""
        return (
            (not self.here or node.address == here)
            and self.address in ("", node.address)
            and all(node.total.get(name, 0) >= amount for name, amount in self.resources.items())
            and all(node.labels.get(name) == value for name, value in self.labels.items())
        )

    def __str__(self) -> str:
        """Describes the conditions in words, empty for any node."""
        parts = ["this host"] * self.here + [f"the address {self.address}"] * bool(self.address)
        parts += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        parts += [f"the label {name}={value}" for name, value in self.labels.items()]
        return " and ".join(parts)


ANYWHERE = Where()


def nodes_with_room(nodes: Sequence[Node], need: Resources, groups: Counter[str]) -> list[Node]:
    """Returns the nodes that have `need` free, the best one first: with the fewest groups, then with the most that is
    free.

    groups: of this cluster, by the addresses of their nodes.
    """
    fitting = [node for node in nodes if _has(node.free, need)]
    return sorted(fitting, key=lambda node: (groups[node.address], -node.free.get("GPU", 0), -node.free.get("CPU", 0)))


def spread_over(nodes: Sequence[Node], bundles: Sequence[Resources], groups: Counter[str]) -> list[Node]:
    """Returns a node with room for each bundle: the node with the fewest bundles, else the best one. Empty without room
    for all.

    The largest bundles come first: a small one on the largest node would leave no room for them.
    """
    left = {node.address: node for node in nodes}
    chosen: dict[int, Node] = {}
    for number, need in sorted(enumerate(bundles), key=lambda one: size_of(one[1]), reverse=True):
        taken = Counter(node.address for node in chosen.values())
        fitting = sorted(nodes_with_room([*left.values()], need, groups), key=lambda node: taken[node.address])
        if not fitting:
            return []
        chosen[number] = left[fitting[0].address] = _without(fitting[0], need)
    return [chosen[number] for number in range(len(bundles))]


def could_have_room(nodes: Sequence[Node], need: Resources) -> bool:
    """Returns whether a node has `need` in all, free or not."""
    return any(_has(node.total, need) for node in nodes)


def places(nodes: Sequence[Node], need: Resources) -> int:
    """Returns how many times `need` fits into what is free on all nodes together."""
    return sum(
        int(min((node.free.get(name, 0) + 1e-6) / amount for name, amount in need.items() if amount)) for node in nodes
    )


def spread_places(nodes: Sequence[Node], bundles: Sequence[Resources], most: int) -> int:
    """Returns how many times all bundles, which go to several nodes, have room; `most` at most."""
    found = 0
    while found < most and spread_over(nodes, [*bundles] * (found + 1), Counter()):
        found += 1
    return found


def in_words(nodes: Sequence[Node]) -> str:
    """Describes what is free on each node."""
    return "; ".join(
        f"{node.address} has " + " and ".join(
            f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}s" for name in ("CPU", "GPU")
        ) + " free" for node in nodes
    )  # fmt: skip


def size_of(need: Resources) -> tuple[float, float]:
    """The key by which bundles are ordered by size."""
    return need.get("GPU", 0), need.get("CPU", 0)


def _without(node: Node, need: Resources) -> Node:
    """Returns the node with `need` subtracted from what is free."""
    return replace(node, free={**node.free, **{name: node.free.get(name, 0) - need[name] for name in need}})


def _has(there: Resources, need: Resources) -> bool:
    return all(there.get(name, 0) >= amount - 1e-6 for name, amount in need.items())
