"""Finds the served families that are nearest to a model, by the layers that its config.json describes and not by its
name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandem.cluster.tools.architectures import ARCHITECTURES, HALVES
from tandem.workers.checkpoint.structure import structure

MINOR = (
    "shared experts",
    "groups of experts",
    "sliding windows",
    "softcaps",
    "inputs of each layer",
)  # count half of what others do
FARTHEST = 4  # the largest distance at which a family is named
LISTED = 3  # families in a sentence
HALF = {"encoder": True}


class Family(NamedTuple):
    """A served family. architecture: as config.json names it. has: its structure(). fields: names that it has besides
    common ones."""

    architecture: str
    has: frozenset[str]
    fields: frozenset[str]


def families() -> list[Family]:
    """Returns the served families."""
    found = []
    for name, fields in ARCHITECTURES.items():
        values = {**fields, **(HALF | HALVES[name] if name in HALVES else {})}
        (architecture,) = fields["architectures"]  # type: ignore[misc]
        found.append(Family(architecture, structure(values), frozenset(values)))
    return found


def nearest_families(values: Mapping[str, Any]) -> str:
    """Returns a sentence that names them. values: the fields of config.json."""
    has, served = structure(values), families()
    alien = has - frozenset().union(*(one.has for one in served))
    if alien:
        return f"its fields tell of {_listing(alien)}, which no served family has"
    distances = {one.architecture: _distance(has, values, one) for one in served}
    least = min(distances.values())
    near = [one for one in served if distances[one.architecture] == least]
    if least[0] > FARTHEST:
        return f"its fields tell of {_listing(has)}, which no served family has together"
    alike = {
        kind: [one.architecture for one in near if one.has == kind][:LISTED]
        for kind in dict.fromkeys(one.has for one in near)
    }
    return f"by its fields the nearest is {'; or '.join(_compared(has, *one) for one in alike.items())}"


def _distance(has: frozenset[str], values: Mapping[str, Any], family: Family) -> tuple[int, int]:
    """Returns the distance by features, then by fields that both have, which decides between equally near families."""
    apart = sum(1 if feature in MINOR else 2 for feature in has ^ family.has)
    return apart, -len(family.fields & set(values))


def _compared(here: frozenset[str], there: frozenset[str], names: Sequence[str]) -> str:
    has_it = "has" if len(names) == 1 else "have"
    return f"{' or '.join(names)}, which {_differences(here, there, has_it)}"


def _differences(here: frozenset[str], there: frozenset[str], has_it: str) -> str:
    if here == there:
        return f"{has_it} {_listing(here) if here else 'attention and dense feed-forwards'}, too"
    lacks = f"{has_it} no {_listing(here - there, 'or')}" if here - there else ""
    besides = f"also {has_it} {_listing(there - here)}" if there - here else ""
    return " and ".join(filter(None, (lacks, besides)))


def _listing(features: frozenset[str], last: str = "and") -> str:
    *before, end = sorted(features)
    return f"{', '.join(before)} {last} {end}" if before else end
