"""How device_puts.cu is compiled and kept, with a compiler that only writes down what it was asked for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.transfer.errors import TransportError
from tandem.transfer.nvshmem.device_puts import KERNELS
from tandem.transfer.nvshmem.kernels import device_build
from tandem.transfer.nvshmem.kernels.device_build import HEADER, LIBRARY, build_device_puts

HOPPER = (9, 0)
# Its arguments end with `-o FILE`, which it writes; each call leaves a line in `calls`.
NVCC = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then cat "$here/version"; exit; fi
echo "$*" >> "$here/calls"
if [ -e "$here/broken" ]; then echo "error: no such thing" >&2; exit 1; fi
for last; do :; done
echo compiled > "$last"
"""


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nvcc, on the PATH, and NVSHMEM's library."""
    folder = tmp_path / "toolkit"
    for file, text in (("nvcc", NVCC), ("version", "release 13.0"), ("calls", ""), (HEADER, ""), (LIBRARY, "one")):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(device_build, "find_spec", lambda name: spec)
    return folder


def calls(toolkit: Path) -> list[str]:
    return (toolkit / "calls").read_text().splitlines()


def test_it_is_compiled_and_linked_once(toolkit: Path, tmp_path: Path) -> None:
    cubin = build_device_puts(tmp_path / "cache", HOPPER)
    assert cubin.read_text() == "compiled\n"
    compiled, linked = calls(toolkit)
    assert all("arch=compute_90,code=sm_90" in call for call in (compiled, linked))
    assert "device_puts.cu" in compiled
    assert f"-I{toolkit}/include" in compiled
    assert f"-L{toolkit}/lib -lnvshmem_device" in linked
    assert build_device_puts(tmp_path / "cache", HOPPER) == cubin
    assert len(calls(toolkit)) == 2
    assert list((tmp_path / "cache").iterdir()) == [cubin]


def test_it_is_compiled_anew_for_what_is_different(toolkit: Path, tmp_path: Path) -> None:
    made = {build_device_puts(tmp_path, HOPPER), build_device_puts(tmp_path, (10, 0))}
    (toolkit / "version").write_text("release 13.1")
    made.add(build_device_puts(tmp_path, HOPPER))
    (toolkit / LIBRARY).write_text("two")
    made.add(build_device_puts(tmp_path, HOPPER))
    assert len(made) == 4


def test_a_failure_says_why_and_leaves_nothing(toolkit: Path, tmp_path: Path) -> None:
    (toolkit / "broken").touch()
    with pytest.raises(TransportError, match=r"device_puts\.cu cannot be compiled: error: no such thing"):
        build_device_puts(tmp_path / "cache", HOPPER)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("missing", ["nvcc", LIBRARY, HEADER], ids=str)
def test_what_is_missing_is_named(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | Path
) -> None:
    (toolkit / missing).unlink()
    monkeypatch.setenv("PATH", str(toolkit))
    with pytest.raises(TransportError, match=f"{Path(missing).name} .*`tandem doctor` says what this host lacks"):
        build_device_puts(tmp_path, HOPPER)


def test_the_host_passes_what_each_kernel_takes() -> None:
    source = device_build.SOURCE.read_text()
    for name, parameters in KERNELS.items():
        declared = source.split(f"__global__ void {name}(")[1].split(")")[0]
        names = [part.split()[-1].lstrip("*") for part in declared.split(",") if part.strip()]
        assert tuple(names) == parameters
