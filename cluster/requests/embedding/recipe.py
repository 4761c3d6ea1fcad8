"""The recipe for a checkpoint's embeddings, from its files for sentence-transformers.

| file | what it has |
|---|---|
| modules.json | the steps after the model: Pooling, Normalize |
| 1_Pooling/config.json | which hidden states count |
| config_sentence_transformers.json | prompts by name |
| sentence_bert_config.json | the longest input |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.files import is_there, read_text

MODULES = "modules.json"
MAX_BYTES = 1 << 20
MODES = {"lasttoken": False, "mean": True}
"""The pooling modes that are served; True if all hidden states count."""
OLDER_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class EmbeddingRecipe:
    """The recipe. refused, unpooled: why no embedding can be made, by the model and by its modules; empty if it can.
    Texts of prompts go before inputs."""

    mean: bool = False  # of all hidden states; else the last token's
    normalizes: bool = True
    counts_prompt: bool = True  # whether the mean has the prompt's tokens, too
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""  # of requests that name none
    longest: int | None = None  # tokens of an input; None: the model's limit
    refused: str = ""
    unpooled: str = ""

    def configured(self, pooling: str, normalize: bool | None) -> "EmbeddingRecipe":
        """Returns the recipe with the values that the cluster's configuration sets: see EmbeddingsSection."""
        recipe = self if normalize is None else replace(self, normalizes=normalize)
        return recipe if pooling == "auto" else replace(recipe, mean=pooling == "mean", unpooled="")


def read_recipe(folder: Path) -> EmbeddingRecipe:
    """Reads the recipe of a checkpoint's folder. Raises InvalidConfig for files that cannot be read."""
    named = _fields(folder / "config_sentence_transformers.json")
    texts = named.section("prompts")
    prompts = {name: text for name in texts.names() if isinstance(text := texts.raw(name), str)}
    default = named.text("default_prompt_name", "")
    if default and default not in prompts:
        raise named.invalid("default_prompt_name", f"a name in prompts: {', '.join(prompts)}")
    longest = _fields(folder / "sentence_bert_config.json").integer("max_seq_length", 0) or None
    refused = _refused(_fields(folder / "config.json"))
    recipe = EmbeddingRecipe(prompts=prompts, default_prompt=prompts.get(default, ""), longest=longest, refused=refused)
    return recipe if not is_there(folder / MODULES) else _with_modules(recipe, folder)


def _refused(config: Fields) -> str:
    """Returns why a model's hidden states are not a decoder's; empty if they are."""
    text = config.section("text_config") if "text_config" in config else config
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if text.raw(name) is value:
            return f"config.json has {name} {str(value).lower()}; each token sees those before it alone here"
    return ""


def _with_modules(recipe: EmbeddingRecipe, folder: Path) -> EmbeddingRecipe:
    modules = _modules(folder / MODULES)
    unknown = [kind for kind in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        return replace(
            recipe, unpooled=f"{MODULES} has {unknown[0]:.80}; Transformer, Pooling and Normalize are served"
        )
    if "Pooling" not in modules:
        return replace(recipe, unpooled=f"{MODULES} has no Pooling")
    pooling = _fields(folder / modules["Pooling"] / "config.json")
    modes = _modes(pooling)
    if len(modes) != 1 or modes[0] not in MODES:
        named = " and ".join(modes) or "none"
        return replace(recipe, unpooled=f"{pooling.source}: the pooling is {named:.80}; lasttoken or mean is served")
    return replace(
        recipe,
        mean=MODES[modes[0]],
        normalizes="Normalize" in modules,
        counts_prompt=pooling.boolean("include_prompt", True),
    )


def _modes(pooling: Fields) -> list[str]:
    given = pooling.raw("pooling_mode")
    if given is not None:
        return [str(one) for one in (given if isinstance(given, list) else [given])]
    return [mode for name, mode in OLDER_MODES.items() if pooling.boolean(name, False)]


def _modules(path: Path) -> dict[str, str]:
    """Returns the last part of each module's type, and its folder."""
    try:
        listed: Any = json.loads(read_text(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not readable JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidConfig(f"{path} is {listed!r:.80}; it must be a list of modules")
    modules = [Fields(one, str(path)) for one in listed]
    found = {one.text("type").rpartition(".")[2]: one.text("path", "") for one in modules}
    for kind, place in found.items():
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise InvalidConfig(f"{path}: path of {kind:.80} is {place!r:.80}; it must be a folder of the checkpoint")
    return found


def _fields(path: Path) -> Fields:
    """Reads the fields; empty without such a file."""
    return Fields.from_file(path) if is_there(path) else Fields({}, str(path))
