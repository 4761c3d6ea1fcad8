"""References within a JSON schema, as JSON pointers."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin

from tandem.workers.sampling.subschemas import children, copied

BASE = "https://schema.invalid/"  # of a schema without an id
OLD_DRAFTS = ("http://json-schema.org/draft-03/", "http://json-schema.org/draft-04/")  # whose ids are called `id`
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS = ("$anchor", "$dynamicAnchor")
NAMES = (*ANCHORS, "$recursiveAnchor")
POINTER_MARKS = "/~!$&'()*+,;=:@?"  # what a fragment may have as it stands


class _Place(NamedTuple):
    schema: dict[str, Any]
    pointer: str  # from the whole schema
    base: str  # what its references are relative to
    id_word: str


def with_pointers(schema: Any, root: str = "#") -> Any:
    """Returns the schema with a JSON pointer from `root` for each reference to one of its parts. The reference may be a
    pointer from `#` or from an id, an id, or an anchor. Ids and anchors are left out.

    So it can stand at any place of another schema, whose pointer is root. References to something else stay as they
    are. `$dynamicRef` and `$recursiveRef` lead where `$ref` does, but for schemas with several ids: there they stay.
    RecursionError for deep schemas.
    """
    made = copied(schema)
    if not isinstance(made, dict):
        return made
    places = list(_places(made, "", BASE, "$id"))
    targets = _targets(places)
    alone = len({place.base for place in places}) == 1
    for one, _, base, id_word in places:
        for word in REFERENCES if alone else REFERENCES[:1]:
            target = _target(targets, base, one.get(word))
            if target is not None:
                del one[word]
                one["$ref"] = root + quote(target, safe=POINTER_MARKS)
        for word in (id_word, *NAMES):
            if isinstance(one.get(word), str | bool):
                del one[word]
    return made


def _places(schema: dict[str, Any], pointer: str, base: str, id_word: str) -> Iterator[_Place]:
    draft = schema.get("$schema")
    if isinstance(draft, str):
        id_word = "id" if draft.startswith(OLD_DRAFTS) else "$id"
    own = schema.get(id_word)
    if isinstance(own, str):
        base = _joined(base, own.partition("#")[0])
    yield _Place(schema, pointer, base, id_word)
    for end, child in children(schema):
        yield from _places(child, pointer + end, base, id_word)


def _targets(places: list[_Place]) -> dict[str, str]:
    """Returns the pointers of ids, and of anchors as `id#anchor`."""
    targets: dict[str, str] = {}
    for one, pointer, base, id_word in places:
        targets.setdefault(base, pointer)
        anchors = [one.get(word) for word in ANCHORS]
        own = one.get(id_word)
        if isinstance(own, str):  # older drafts have anchors in ids
            anchors.append(own.partition("#")[2])
        for anchor in anchors:
            if isinstance(anchor, str) and anchor:
                targets.setdefault(f"{base}#{anchor}", pointer)
    return targets


def _target(targets: Mapping[str, str], base: str, reference: object) -> str | None:
    """The pointer that it leads to; None where that is not in the schema."""
    if not isinstance(reference, str):
        return None
    path, _, fragment = reference.partition("#")
    resource, fragment = _joined(base, path), unquote(fragment)
    if fragment and not fragment.startswith("/"):
        return targets.get(f"{resource}#{fragment}")
    begin = targets.get(resource)
    return None if begin is None else begin + fragment


def _joined(base: str, path: str) -> str:
    try:
        return urljoin(base, path) if path else base
    except ValueError:  # no URI
        return path
