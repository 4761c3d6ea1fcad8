"""Llama 4's calls: a Python list."""

import ast
import json

from tandem.cluster.text.parsers.calls import Schemas, offered, whole_call
from tandem.cluster.text.parsers.parts import ParsedParts
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting

MOST_PYTHON, MOST_VALUES = 1 << 18, 1 << 12  # characters, and values, of calls in Python: they are read at once
JSON_NAMES = {"true": True, "false": False, "null": None}  # JSON's constants, which models write for Python's


def pythonic(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads an answer that is a list of calls with keyword arguments. The calls come when the list is whole. A list
    that takes longer than some milliseconds to read is content."""
    texts: list[str] = []
    yield from source.spaces(texts.append)
    if (yield from source.peek()) != "[":
        parts.content("".join(texts))
        return
    yield from source.upto((), texts.append)
    text = "".join(texts)
    if len(text) > MOST_PYTHON or sum(map(text.count, "[({,")) > MOST_VALUES:
        parts.content(text)
        return
    try:
        calls = [_python_call(node, schemas) for node in _list_of(text)]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        parts.content(text)
        return
    for name, arguments in calls:
        whole_call(source, parts, name, arguments)


def _list_of(text: str) -> list[ast.expr]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return tree.elts


def _python_call(node: ast.expr, schemas: Schemas) -> tuple[str, str]:
    """Returns name, and arguments as JSON. Malformed for a function that is not offered."""
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise Malformed("no call with keywords")
    values = {word.arg: ast.literal_eval(_WithJsonNames().visit(word.value)) for word in node.keywords}
    return offered(ast.unparse(node.func), schemas), json.dumps(values, ensure_ascii=False, allow_nan=False)


class _WithJsonNames(ast.NodeTransformer):
    """Replaces JSON's constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
