"""Reads a checkpoint's config by the family of its architecture. A new one is a function and a row of FAMILIES."""

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from tandem.cache.plan.layout import DTYPES
from tandem.workers.checkpoint.architectures import FAMILIES, read_architecture
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.files import is_there
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.weights import stored_dtype


def _reader(family: str, function: str) -> Callable[[Fields], ModelConfig]:
    return getattr(import_module(f"tandem.workers.models.families.{family}"), function)


READERS: Mapping[str, Callable[[Fields], ModelConfig]] = MappingProxyType(
    {name: _reader(*function.split(".")) for name, function in FAMILIES.items()}
)
PARTS = ("text_config", "encoder", "decoder")  # of a config.json that is made of several


def load_config(folder: Path, dtype: str = "auto") -> ModelConfig:
    """Reads config.json and generation_config.json of a checkpoint folder. Raises ModelError.

    dtype: "auto" takes config.json's, else the weights', as transformers does; else a name of
    tandem.cache.plan.layout.DTYPES. The end-of-sequence ids come from generation_config.json where it has any, as in
    transformers' generate; end_tokens() adds the tokenizer's.
    """
    if not folder.is_dir():
        raise CheckpointMissing(f"model folder {folder} is not there; it must be a folder with config.json")
    fields = Fields.from_file(folder / "config.json")
    config = READERS[read_architecture(fields)](fields)
    if dtype == "auto" and not _names_dtype(fields):
        dtype = stored_dtype(folder) or dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
        config = dataclasses.replace(config, dtype=DTYPES[dtype])
        if config.encoder is not None:
            config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, dtype=config.dtype))
    generation = folder / "generation_config.json"
    if is_there(generation):
        fields = Fields.from_file(generation)
        config = dataclasses.replace(config, eos_token_ids=fields.integers("eos_token_id") or config.eos_token_ids)
        starts = (*fields.integers("decoder_start_token_id"), *fields.integers("bos_token_id"))
        if config.encoder is not None and starts:
            config = dataclasses.replace(config, decoder_start_token_id=starts[0])
    return config


def _names_dtype(fields: Fields) -> bool:
    """Whether a dtype stands in config.json, or in its part about the text or a half of the model."""
    parts = [fields.section(name) for name in PARTS if isinstance(fields.raw(name), dict)]
    return any(name in part for part in (fields, *parts) for name in ("dtype", "torch_dtype"))
