"""Loading: shards, conversion, memory, and each way in which a checkpoint can be incomplete."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, InvalidWeights, ModelError
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile
from tandem.workers.checkpoint.weight_files import INDEX, weight_files
from tandem.workers.models.parameters import allocate_parameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import check_weights, load_parameters
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.oracle import load_oracle

SINGLE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen2", "tiny", seed=3)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen2", "tiny", seed=3, shard_bytes=100_000)
    return tmp_path


def load_places(folder: Path, dtype: str = "auto", load_format: str = "safetensors") -> dict[str, Tensor]:
    """Loads by load_parameters. check_weights must refuse what that refuses, in the same words, and nothing else."""
    config = load_config(folder, dtype)
    if load_format == "safetensors":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SafetensorsFile, "read", None)  # it reads headers only
            refused = _refusal(lambda: check_weights(folder, config))
        loaded = _refusal(lambda: load_parameters(folder, config))
        assert repr(refused) == repr(loaded)
    return named_weights(config, load_parameters(folder, config, load_format=load_format))


def _refusal(act: Callable[[], object]) -> ModelError | None:
    try:
        act()
    except ModelError as error:
        return error
    return None


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE)


def test_every_tensor_lands_in_its_place(folder: Path) -> None:
    places = load_places(folder)
    stored = load_file(folder / SINGLE)
    assert places.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(places[name], tensor), name


def test_shards_give_what_one_file_gives(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("sharded")
    make_checkpoint(other, "qwen2", "tiny", seed=3, shard_bytes=100_000)
    assert len(list(other.glob("*.safetensors"))) > 2
    one, many = load_places(folder), load_places(other)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_shards_written_by_transformers_load(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, max_shard_size="50KB")
    assert (tmp_path / INDEX).exists()
    load_places(tmp_path)


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    """The file was saved over shards. transformers does likewise."""
    save_checkpoint("llama", tmp_path, max_shard_size="50KB")
    shards = weight_files(tmp_path)
    make_checkpoint(tmp_path / "other", "llama", "tiny", seed=3)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert len(shards) > 1
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_any_safetensors_do_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    load_places(sharded)


def test_parts_are_read_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reads wait for each other."""
    monkeypatch.setattr("tandem.workers.checkpoint.safetensors_file.PART_BYTES", 1000)
    together, met = threading.Barrier(4), threading.Event()
    read = SafetensorsFile.read

    def reading(self: SafetensorsFile, offset: int, target: Tensor) -> None:
        if not met.is_set():
            together.wait(60)
            met.set()
        read(self, offset, target)

    monkeypatch.setattr(SafetensorsFile, "read", reading)
    places = named_weights(config := load_config(folder), load_parameters(folder, config))
    assert all(torch.equal(places[name], tensor) for name, tensor in load_file(folder / SINGLE).items())


@pytest.mark.parametrize("inference", [False, True])
def test_dtype_is_converted(folder: Path, monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    monkeypatch.setattr(
        "tandem.workers.checkpoint.safetensors_file.PART_BYTES", 1000
    )  # so that a tensor takes several reads
    stored = load_file(folder / SINGLE)
    with torch.inference_mode(inference):
        places = load_places(folder, dtype="bfloat16")
    assert all(torch.equal(places[name], tensor.bfloat16()) for name, tensor in stored.items())


def test_dummy_weights_need_only_a_config_and_repeat(folder: Path) -> None:
    (folder / SINGLE).unlink()
    first, second = load_places(folder, load_format="dummy"), load_places(folder, load_format="dummy")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(first["lm_head.weight"].std()) > 0
    with pytest.raises(InvalidConfig, match="load_format is 'pt'; it must be one of safetensors, dummy"):
        load_places(folder, load_format="pt")


def test_progress_counts_all_bytes(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = load_config(sharded)
    places = named_weights(
        config, load_parameters(sharded, config, report=lambda done, total: seen.append((done, total)))
    )
    total = sum(place.nbytes for place in places.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_tied_embeddings_are_one_tensor_though_the_head_is_stored(tmp_path: Path) -> None:
    save_checkpoint("llama-tied", tmp_path)
    head = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    rewrite(tmp_path, {"lm_head.weight": head.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_places(tmp_path)
    parameters = load_parameters(tmp_path, load_config(tmp_path))
    assert parameters.lm_head is parameters.embedding


def test_a_stored_head_that_is_not_the_embedding_is_not_tied_to_it(tmp_path: Path) -> None:
    """transformers does likewise, whatever tie_word_embeddings says."""
    save_checkpoint("llama-tied", tmp_path)
    head = torch.randn(199, 64)
    rewrite(tmp_path, {"lm_head.weight": head})
    assert torch.equal(load_oracle(tmp_path).lm_head.weight, head)
    load_places(tmp_path)
    assert torch.equal(load_parameters(tmp_path, load_config(tmp_path)).lm_head.tensor(), head)
    rewrite(tmp_path, {"lm_head.weight": torch.randn(200, 64)})
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight has shape \[200, 64\]; config\.json asks for"):
        load_places(tmp_path)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    """Chance would decide which of them is read last."""
    shards = sorted(sharded.glob("model-*.safetensors"))
    first, last = load_file(shards[0]), load_file(shards[-1])
    name = next(iter(first))
    save_file({**last, name: first[name] + 1}, shards[-1])
    with pytest.raises(InvalidWeights, match=f"{shards[-1].name}: tensor {name} is in another file, too"):
        load_places(sharded)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_load_as_those_of_their_own(case: str, tmp_path: Path) -> None:
    """transformers saves an expert a tensor; its own modules, whose names some checkpoints have, hold one for all."""
    save_checkpoint(case, tmp_path)
    separate = load_places(tmp_path)
    parameters = dict(make_model(case).named_parameters())
    save_file({name: tensor.detach().contiguous() for name, tensor in parameters.items()}, tmp_path / SINGLE)
    joined = load_parameters(tmp_path, load_config(tmp_path))
    places = named_weights(load_config(tmp_path), joined)
    assert places.keys() == separate.keys()
    assert all(torch.equal(places[name], separate[name]) for name in places)


def test_missing_tensors_are_listed(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.self_attn.k_proj.weight": None, "lm_head.weight": None})
    with pytest.raises(
        InvalidWeights, match=r"lacks lm_head\.weight, model\.layers\.1\.self_attn\.k_proj\.weight, of 27"
    ):
        load_places(folder)


def test_unknown_tensors_are_listed(folder: Path) -> None:
    rewrite(folder, {f"extra.{index}": torch.zeros(1) for index in range(7)})
    with pytest.raises(
        InvalidWeights, match=r"has extra\.0, .*extra\.4 and 2 more, which Qwen2ForCausalLM does not use"
    ):
        load_places(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(65)})
    with pytest.raises(InvalidWeights, match=r"model\.norm\.weight has shape \[65\]; config\.json asks for \[64\]"):
        load_places(folder)


def test_an_integer_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(InvalidWeights, match=r"model\.norm\.weight is stored as I8; it must be one of F32"):
        load_places(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 100_000])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidWeights, match=r"model\.safetensors is cut short"):
        load_places(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}',
        b'{"x": {"shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InvalidWeights, match="no readable safetensors header"):
        SafetensorsFile(path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    next(iter(sorted(sharded.glob("model-00002*")))).unlink()
    with pytest.raises(CheckpointMissing, match=r"lacks model-00002-of-.*safetensors, of \d+ files that"):
        load_places(sharded)


def test_an_index_may_not_lead_out_of_the_folder(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidConfig, match=r"names \.\./elsewhere\.safetensors; it must name files of its folder"):
        load_places(sharded)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointMissing, match=r"pytorch_model\.bin is a pickle, which is never read: convert it"):
        load_places(folder)


MEASURE = """
import sys, torch
from pathlib import Path
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
config = load_config(folder, sys.argv[2])
before = peak()
load_decoder(folder, config)
print(peak() - before)
"""


@pytest.mark.gate("llama-bfloat16")
@pytest.mark.parametrize(("arch", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen3_moe", "float32")])
def test_peak_memory_is_about_the_parameters(tmp_path: Path, arch: str, dtype: str) -> None:
    """About 90 MiB in one file, loaded in a process of its own, as stored and converted.

    While a float32 weight is repacked it is there twice; the head, here a large part of all, until the decoder stands.
    """
    folder = save_large(tmp_path, arch)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), dtype], capture_output=True, text=True, check=True
    )
    parameters = (folder / SINGLE).stat().st_size / (1 if dtype == "float32" else 2)
    assert int(result.stdout) < 1.5 * parameters + (16 << 20)


LARGE = {"llama": {"vocab_size": 3 << 16}, "qwen3_moe": {"num_hidden_layers": 6, "moe_intermediate_size": 2400}}


def save_large(folder: Path, arch: str) -> Path:
    make_checkpoint(folder, arch, "tiny")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **LARGE[arch]}))
    config = load_config(folder)
    places = named_weights(config, allocate_parameters(config, torch.device("cpu")))
    save_file({name: torch.zeros_like(place) for name, place in places.items()}, folder / SINGLE)
    return folder


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    """DeepSeek-V3's stand after the two of the model; a layer after them is unknown."""
    save_checkpoint("deepseek_v3", tmp_path)
    rewrite(tmp_path, {"model.layers.2.eh_proj.weight": torch.ones(2, 2)})
    load_places(tmp_path)
    rewrite(tmp_path, {"model.layers.3.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(InvalidWeights, match=r"the checkpoint has model\.layers\.3\.eh_proj\.weight"):
        load_places(tmp_path)
