"""The packages of each folder and the imports between them: `python -m tests.support.import_graph [CHECKOUT]`.

A room is a package, or a module beside the packages. An arrow is a pair of rooms, of which the first imports the
second. A room stands one floor above the highest room that it imports.
"""

import ast
import json
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cache", "transfer", "workers", "cluster", "proto")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def sources(root: Path = ROOT) -> list[str]:
    """Lists the packages' hand-written files, relative to the root."""
    found = (path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in found if not path.name.endswith(GENERATED))


@cache
def imports(file: str, root: Path = ROOT) -> frozenset[str]:
    """Returns the dotted names that the file imports, also inside functions; `from a import b` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            names.update(f"{node.module}.{name.name}" for name in node.names)
    return frozenset(names)


def rooms(folder: str, root: Path = ROOT) -> dict[str, set[str]]:
    """Returns each room of a folder, and the rooms of the same folder that it imports."""
    files = [file for file in sources(root) if file.startswith(f"{folder}/") and file != f"{folder}/__init__.py"]
    found: dict[str, set[str]] = {_room(file): set() for file in files}
    for file in files:
        for name in imports(file, root):
            parts = name.split(".")
            if parts[:2] == ["tandem", folder] and len(parts) > 2 and parts[2] in found:
                found[_room(file)].add(parts[2])
        found[_room(file)].discard(_room(file))
    return found


def modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Returns each file, and the files that it imports."""
    names = {f"tandem.{file[:-3].removesuffix('/__init__').replace('/', '.')}": file for file in sources(root)}
    return {
        file: {
            names[found] for name in imports(file, root) for found in (name, name.rpartition(".")[0]) if found in names
        }
        - {file}
        for file in names.values()
    }


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Returns the floor of each room, from 1. CycleError if rooms import each other in a circle."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        height[room] = 1 + max((height[below] for below in graph[room]), default=0)
    return height


def _room(file: str) -> str:
    return file.split("/")[1].removesuffix(".py")


def summary(root: Path = ROOT) -> dict[str, dict[str, object]]:
    """Returns rooms, floors, arrows, modules and lines of each folder; floors is the circle if there is one."""
    found: dict[str, dict[str, object]] = {}
    for folder in FOLDERS:
        graph = rooms(folder, root)
        files = [file for file in sources(root) if file.startswith(f"{folder}/")]
        try:
            height: object = max(floors(graph).values())
        except CycleError as error:
            height = " → ".join(error.args[1])
        found[folder] = {
            "rooms": len(graph),
            "floors": height,
            "arrows": sum(map(len, graph.values())),
            "modules": len(files),
            "lines": sum(len((root / file).read_text(encoding="utf-8").splitlines()) for file in files),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(summary(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT), indent=1, ensure_ascii=False))
