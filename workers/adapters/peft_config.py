"""adapter_config.json of a PEFT folder: which modules an adapter changes, by which ranks and scales."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.checkpoint.fields import SHOWN, Fields

FILE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_ENTRIES = 4096  # of a list or an object
MAX_PATTERN = 1024  # characters
MAX_ALPHA = 1e6
ALL_LINEAR = "all-linear"
# Fields that make an adapter more than B·A·x: each with what it is in an adapter that is served, beside null.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_dora": ("DoRA", (False,)),
    "bias": ("biases", ("none",)),
    "lora_bias": ("biases", (False,)),
    "modules_to_save": ("whole modules", ([],)),
    "target_parameters": ("parameters of experts", ([],)),
    "trainable_token_indices": ("embeddings of tokens", ([], {})),
    "layer_replication": ("replicated layers", ([],)),
    "fan_in_fan_out": ("transposed weights", (False,)),
    "use_qalora": ("QALoRA", (False,)),
    "alora_invocation_tokens": ("activated LoRA", ([],)),
    "arrow_config": ("Arrow", ()),
    "kasa_config": ("KaSA", ()),
    "monteclora_config": ("MonteCLoRA", ()),
    "velora_config": ("VeLoRA", ()),
    "use_bdlora": ("block-diagonal LoRA", (False,)),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights by which training changes the base, too, unless the adapter was converted."""


@dataclass(frozen=True)
class PeftConfig:
    """An adapter that adds scale · B·A·x to the outputs of its modules."""

    source: str
    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] | str = ()  # names of modules or their ends; a pattern; or ALL_LINEAR
    excluded: tuple[str, ...] | str = ()
    layers: frozenset[int] | None = None  # the only ones
    ranks: Mapping[str, int] = field(default_factory=dict)  # by patterns of modules, as PEFT matches them
    alphas: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Raises CheckpointMissing and InvalidConfig."""
        fields = Fields.from_file(folder / FILE)
        kind = fields.text("peft_type")
        if kind != "LORA":
            raise fields.invalid("peft_type", "LORA")
        for name, (what, accepted) in REFUSED.items():
            if fields.raw(name) is not None and fields.raw(name) not in accepted:
                shown = " or ".join(map(repr, accepted)) or "null"
                raise fields.invalid(name, f"{shown}: adapters with {what} are not served")
        initial = fields.raw("init_lora_weights")
        if isinstance(initial, str) and initial.lower().startswith(CHANGES_BASE):
            raise fields.invalid("init_lora_weights", "one that leaves the base as it is; PEFT can convert the adapter")
        targets = _names(fields, "target_modules")
        if not targets:
            raise fields.invalid("target_modules", f"a list of modules, a pattern or {ALL_LINEAR!r}")
        layers = fields.integers("layers_to_transform", "layer")
        return cls(
            source=fields.source,
            rank=fields.integer("r", minimum=1),
            alpha=_alpha(fields, "lora_alpha"),
            rslora=fields.boolean("use_rslora", False),
            targets=targets,
            excluded=_names(fields, "exclude_modules"),
            layers=frozenset(layers) if layers else None,
            ranks={name: of.integer(name, minimum=1) for name, of in _patterns(fields, "rank_pattern")},
            alphas={name: _alpha(of, name) for name, of in _patterns(fields, "alpha_pattern")},
        )

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _of_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def takes(self, module: str) -> bool:
        """Returns whether the adapter changes the module of this name."""
        if self.excluded and _matches(self.excluded, module):
            return False
        layer = re.search(r"\.(\d+)\.", module)
        if self.layers is not None and (layer is None or int(layer[1]) not in self.layers):
            return False
        return _matches(self.targets, module)


def _alpha(fields: Fields, name: str) -> float:
    alpha = fields.number(name)
    if alpha > MAX_ALPHA:
        raise fields.invalid(name, f"at most {MAX_ALPHA:g}")
    return alpha


def _names(fields: Fields, name: str) -> tuple[str, ...] | str:
    """Returns names or their ends, or a pattern; () if there is none."""
    value = fields.raw(name)
    if value is None:
        return ()
    if isinstance(value, str):
        _check_pattern(fields, name, value)
        return value
    texts = isinstance(value, list) and all(isinstance(one, str) and len(one) <= MAX_PATTERN for one in value)
    if not texts or len(value) > MAX_ENTRIES:
        raise fields.invalid(name, f"a pattern, or a list of at most {MAX_ENTRIES} names")
    return tuple(value)


def _patterns(fields: Fields, name: str) -> Iterator[tuple[str, Fields]]:
    section = fields.section(name)
    if len(section.names()) > MAX_ENTRIES:
        raise fields.invalid(name, f"an object of at most {MAX_ENTRIES} patterns")
    for pattern in section.names():
        _check_pattern(fields, name, pattern)
        yield pattern, section


def _check_pattern(fields: Fields, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidConfig(
            f"{fields.source}: {name} has {SHOWN.repr(pattern)}, which is no pattern: {error!s:.100}"
        ) from None
    if len(pattern) > MAX_PATTERN:
        raise fields.invalid(name, f"at most {MAX_PATTERN} characters")


def _matches(targets: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
    return module.endswith(tuple(f".{one}" for one in targets)) or module in targets


def _of_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Returns the value of the first pattern that matches the module or the end of its name."""
    return next((value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", module)), otherwise)
