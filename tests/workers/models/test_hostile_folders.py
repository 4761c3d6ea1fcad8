"""A stranger's model folder: whatever its files are, loading ends at once, with an error that names the file."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint import weight_files
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.checkpoint.safetensors_file import HEADER_LIMIT
from tandem.workers.checkpoint.weight_files import INDEX
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights, load_parameters

SINGLE = "model.safetensors"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    SINGLE,
)
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    make_checkpoint(folder, "qwen3", "tiny", seed=1)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def load(folder: Path) -> None:
    check_weights(folder, load_config(folder))
    Tokenizer.from_folder(folder)


def error_of(folder: Path) -> str:
    """Returns the error of loading."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_no_fifo_is_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "special_tokens_map.json":  # read beside older files only
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("x")
    assert f"{folder / name} is a FIFO; it must be a regular file" in error_of(folder)


@pytest.mark.parametrize("name", FILES)
def test_no_device_is_read(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    if name == "special_tokens_map.json":
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("x")
    assert f"{folder / name} is a device; it must be a regular file" in error_of(folder)


def test_a_shard_may_be_no_fifo_either(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / "part.safetensors")
    assert "part.safetensors is a FIFO" in error_of(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "part.safetensors"}}))
    assert "part.safetensors is a FIFO" in error_of(folder)


def test_links_into_a_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    check_weights(folder, load_config(folder))
    assert Tokenizer.from_folder(folder) is not None


@pytest.mark.parametrize("name", [name for name in FILES if name not in (SINGLE, "special_tokens_map.json")])
def test_files_of_many_gigabytes_are_refused_unread(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    assert f"{folder / name} has {1 << 40} bytes; it may have at most" in error_of(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [DEEP, DEEP_OBJECT])
def test_deep_json_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert f"{folder / name} is not readable JSON: it is nested too deeply" in error_of(folder)


def test_a_deep_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(f'{{"model": {DEEP}}}')
    assert "tokenizer.json is not a readable tokenizer" in error_of(folder)


def test_numbers_of_thousands_of_digits_are_refused(folder: Path) -> None:
    fields = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(f'{fields}, "extra": {"9" * 5000}}}')
    assert "config.json is not readable JSON: Exceeds the limit (4300 digits)" in error_of(folder)


def header(folder: Path, content: Any) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / SINGLE).write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))


def entry(shape: list[int], begin: int = 0, end: int = 4, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP.encode(), "no readable safetensors header: it is nested too deeply"),
        (b'{"x": ' + b"9" * 5000 + b"}", "no readable safetensors header"),
        ({"x": entry([2] * 100_000)}, "a shape of 100000 dimensions; it may have at most 8"),
        ({"x": entry([1 << 62, 1 << 62])}, "4 bytes for shape"),
        ({"x": entry([8], 0, 8, "F8_E4M3"), "y": entry([1], 4, 8)}, "tensor y begins at byte .*, within tensor x"),
        ({"x": entry([1 << 40], 0, 1 << 42)}, "is cut short"),
    ],
)
def test_hostile_headers_are_refused(folder: Path, content: Any, message: str) -> None:
    header(folder, content)
    with pytest.raises(ModelError, match=message):
        check_weights(folder, load_config(folder))


def test_more_tensors_than_any_model_has_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.workers.checkpoint.safetensors_file.MAX_TENSORS", 99)
    header(folder, {f"t{number}": entry([1]) for number in range(100)})
    assert "it has 100 tensors; it may have at most 99" in error_of(folder)


def test_a_long_header_is_refused_unread(folder: Path) -> None:
    with (folder / SINGLE).open("wb") as file:
        file.write((HEADER_LIMIT + 1).to_bytes(8, "little"))
        file.truncate(2 * HEADER_LIMIT)
    assert f"has a header of {HEADER_LIMIT + 1} bytes; it may have at most {HEADER_LIMIT}" in error_of(folder)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "a/../b", "x" * 5000, "é" * 128, "a\0b", "\ud800", "../part.safetensors"]
)
def test_an_index_names_files_that_a_folder_can_have(folder: Path, name: str) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": name}}))
    said = error_of(folder)
    assert said.startswith(f"{folder / INDEX}: weight_map names ")
    assert said.endswith("; it must name files of its folder, each in 1 to 255 bytes")


@pytest.mark.parametrize("name", [None, 5, True, [], {"a": "b"}, ["model.safetensors"]])
def test_an_index_names_files_by_text(folder: Path, name: Any) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t" * 5000: name}}))
    said = error_of(folder)
    assert said.startswith(f"{folder / INDEX}: weight_map: ttt")
    assert said.endswith("it must be a string")


def test_a_shard_is_a_regular_file(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": "part"}}))
    assert "lacks part, of 1 files" in error_of(folder)
    (folder / "part").mkdir()
    assert f"{folder / 'part'} is a folder; it must be a regular file" in error_of(folder)
    (folder / "part").rmdir()
    (folder / "part").symlink_to("part")
    assert f"{folder / 'part'} cannot be read: Too many levels of symbolic links" in error_of(folder)


@pytest.mark.parametrize("name", [*FILES, INDEX])
def test_a_link_to_nowhere_is_no_file_that_lacks(folder: Path, name: str) -> None:
    """An interrupted download leaves such a link in a hub cache."""
    if name == INDEX:
        (folder / SINGLE).unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/0")
    if name == "special_tokens_map.json":
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("x")
    assert f"{folder / name} is a link to nowhere; it must lead to a regular file" in error_of(folder)


def test_an_index_of_many_files_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "MAX_FILES", 9)
    (folder / SINGLE).unlink()
    names = {f"t{number}": f"{number}.safetensors" for number in range(10)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "weight_map names 10 files; it may name at most 9" in error_of(folder)


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("qwen3", {"num_hidden_layers": 1000}, r"has \d+ tensors; config.json asks for 1000 layers"),
        ("qwen3_moe", {"num_experts": 16384}, r"has \d+ tensors; config.json asks for \d+ layers with \d+ experts in"),
        ("qwen3", {"hidden_size": 2_000_000_000}, r"config.json asks for \[\d+, 2000000000\]"),
        ("qwen3", {"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1}, "asks for tensors that are too large"),
    ],
)
def test_sizes_beyond_reason_take_no_memory(tmp_path: Path, arch: str, fields: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, arch, "tiny", seed=1)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ModelError, match=message):
        load_parameters(tmp_path, load_config(tmp_path))
