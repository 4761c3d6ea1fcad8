"""The text of a file of keys, changed by one entry. Its other lines stay, comments included."""

import re
from collections.abc import Mapping

import yaml

from tandem.cluster.errors import ConfigError, UsageError
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_file import MAX_KEYS, parse_keys

NO_KEYS = re.compile(r"^(?P<indent>[ ]*)keys:[ ]*(\[[ ]*\])[ ]*$", re.MULTILINE)
EMPTY = "keys: []\n"


def entry_text(fields: Mapping[str, object]) -> str:
    """Returns an entry of the list, with a line for each field that is not None."""
    lines = [f"{name}: {_inline(value)}" for name, value in fields.items() if value is not None]
    return "- " + "\n  ".join(lines) + "\n"


def with_entry(text: str, fields: Mapping[str, object], source: str) -> str:
    """Returns a file's text with an entry at its end. Raises UsageError for a name that is there, ConfigError for a bad
    file.

    source: what errors call the file.
    """
    text = text if text.strip() else EMPTY
    before = parse_keys(text.encode(), source)
    if fields["name"] in {key.name for key in before}:
        raise UsageError(
            f"NAME is {fields['name']!r}; {source} has a key of that name: remove it first, or take another"
        )
    if len(before) >= MAX_KEYS:
        raise UsageError(f"{source} has {len(before)} keys; it may have at most {MAX_KEYS}: remove one first")
    entry = entry_text(fields)
    wanted = [*_by_name(before), str(fields["name"])]
    whole = NO_KEYS.sub(r"\g<indent>keys:", text, count=1)
    whole += "" if whole.endswith("\n") else "\n"
    for indent in ("", "  ", "    "):
        changed = whole + re.sub("^", indent, entry.rstrip("\n"), flags=re.MULTILINE) + "\n"
        if _holds(changed, wanted, before):
            return changed
    values = yaml.safe_load(text)
    values["keys"].append({name: value for name, value in fields.items() if value is not None})
    return _written_anew(text, values, source)


def without_entry(text: str, name: str, source: str) -> str:
    """Returns a file's text without an entry. Raises UsageError if no key has this name, ConfigError for a bad file."""
    before = parse_keys(text.encode(), source)
    names = _by_name(before)
    if name not in names:
        some = f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}" or "none"
        raise UsageError(f"NAME is {name!r:.80}; {source} has no key of that name. It has: {some}")
    index = names.index(name)
    wanted = [one for one in names if one != name]
    changed = _cut(text, index) if wanted else _emptied(text)
    if changed is not None and _holds(changed, wanted, before):
        return changed
    values = yaml.safe_load(text)
    del values["keys"][index]
    return _written_anew(text, values, source)


def _holds(text: str, names: list[str], before: tuple[Key, ...]) -> bool:
    """Returns whether the text has keys with these names in this order, and each old key is as it was."""
    try:
        keys = parse_keys(text.encode(), "")
    except ConfigError:
        return False
    return _by_name(keys) == names and all(key in before for key in keys if key.name in _by_name(before))


def _cut(text: str, index: int) -> str | None:
    """Returns the text without an entry's lines. Comments above the next entry stay. None if entries share lines."""
    lines = text.splitlines(keepends=True)
    items = _items(text)
    begin = items[index].start_mark.line
    end = items[index + 1].start_mark.line if index + 1 < len(items) else min(items[index].end_mark.line, len(lines))
    while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return "".join(lines[:begin] + lines[end:]) if end > begin else None


def _emptied(text: str) -> str | None:
    """Returns the text without its only entry."""
    cut = _cut(text, 0)
    return None if cut is None else re.sub(r"^([ ]*)keys:[ ]*$", r"\1keys: []", cut, count=1, flags=re.MULTILINE)


def _items(text: str) -> list[yaml.Node]:
    (node,) = [value for key, value in yaml.compose(text, yaml.SafeLoader).value if key.value == "keys"]
    return node.value


def _written_anew(text: str, values: object, source: str) -> str:
    """Returns the file in another form, which loses comments. So it refuses a file that has any."""
    if "#" in text:
        raise UsageError(
            f"{source} has comments, and its keys are no list of lines that begin with '- '; edit it by hand"
        )
    changed = yaml.safe_dump(values, sort_keys=False)
    parse_keys(changed.encode(), source)
    return changed


def _by_name(keys: tuple[Key, ...]) -> list[str]:
    return [key.name for key in keys]


def _inline(value: object) -> str:
    """Returns YAML on one line, with quotes where a name would read as a number."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False).removesuffix("...\n").strip()
