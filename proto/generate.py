"""Generates the protobuf and gRPC modules beside the .proto files, and the types of sampling parameters.

`python proto/generate.py` writes them; with `--check` it writes nothing and exits with 1 when one is not up to date.
Generated code refuses a grpcio older than its generator, so the generator is the oldest version that tandem supports.
"""

import argparse
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
GENERATOR = "1.78."
SAMPLING = "sampling.py"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", SAMPLING)
SAMPLING_MODULE = '''\
"""SamplingParams of inference.proto as type checkers see them in Python. proto/generate.py makes this file."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Sampling(TypedDict, total=False):
    """Sampling parameters by vLLM's names."""

'''
PYTHON = {
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_UINT32: "int",
    FieldDescriptor.CPPTYPE_UINT64: "int",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_STRING: "str",
}


def generate() -> dict[str, str]:
    """File name and text of every generated module. Raises RuntimeError when protoc refuses a file."""
    if not version("grpcio-tools").startswith(GENERATOR):
        raise RuntimeError(f"grpcio-tools is {version('grpcio-tools')}; the generated code is made with {GENERATOR}x")
    with tempfile.TemporaryDirectory() as root:
        # protoc derives the import path of a module from the path of its file: build the tree tandem/proto/ for it.
        tree = Path(root, "source", "tandem", "proto")
        tree.mkdir(parents=True)
        out = Path(root, "out")
        out.mkdir()
        sources = [shutil.copy(path, tree) for path in sorted(PROTO.glob("*.proto"))]
        flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        descriptors = Path(root, "descriptors")
        flags.append(f"--descriptor_set_out={descriptors}")
        if protoc.main(["protoc", f"-I{Path(root, 'source')}", *flags, *map(str, sources)]):
            raise RuntimeError(f"protoc refused a file of {', '.join(Path(path).name for path in sources)}")
        files = {path.name: path.read_text() for path in sorted((out / "tandem" / "proto").iterdir())}
        return files | {SAMPLING: sampling_module(FileDescriptorSet.FromString(descriptors.read_bytes()))}


def sampling_module(descriptors: FileDescriptorSet) -> str:
    pool = DescriptorPool()
    for file in descriptors.file:
        pool.Add(file)
    fields = pool.FindMessageTypeByName("tandem.v1.SamplingParams").fields
    return SAMPLING_MODULE + "".join(f"    {field.name}: {python_type(field)}\n" for field in fields)


def python_type(field: FieldDescriptor) -> str:
    """Returns the type of the value that callers may give for a field. A message is a mapping, or a list where it has
    nothing else; one text stands for a list of it."""
    message = field.message_type
    if message is None:
        kind = PYTHON[field.cpp_type]
    elif message.GetOptions().map_entry:
        return f"Mapping[{', '.join(map(python_type, message.fields))}]"
    elif len(message.fields) == 1:
        kind = python_type(message.fields[0])
    else:
        kinds = {*map(python_type, message.fields)}
        kind = f"Mapping[str, {kinds.pop() if len(kinds) == 1 else 'Any'}]"
    if not field.is_repeated:
        return kind
    return "str | Sequence[str]" if kind == "str" else f"Sequence[{kind}]"


def outdated(files: dict[str, str]) -> list[str]:
    """Names whose file here is missing, differs, or should not be here."""
    here = {path.name: path.read_text() for path in PROTO.iterdir() if path.name.endswith(SUFFIXES)}
    return sorted(name for name in files.keys() | here.keys() if files.get(name) != here.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is not up to date")
    check = parser.parse_args().check
    files = generate()
    stale = outdated(files)
    if check:
        for name in stale:
            print(f"proto/{name} is not up to date: run `make proto`", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        if name in files:
            (PROTO / name).write_text(files[name])
        else:
            (PROTO / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
