"""Finds settings that change nothing because of other settings: they are errors, and not ignored."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.cluster.config.errors import shown
from tandem.cluster.config.units import Section


class Unused(NamedTuple):
    """A key that must have its default while another key has certain values. Both are dotted."""

    key: str
    beside: str
    holds: Callable[[Any], bool]  # for a value of beside
    why: str = ""
    device: str | None = None  # of the workers, if the rule is about one kind


BEHIND_HOST = "pages reach the disk through host memory; set cache.host_bytes"

RULES = (
    Unused(
        "gateway.routing_policy",
        "scheduler.roles",
        lambda roles: roles != "split",
        "the router then goes by the time that each worker would take, cached prefixes included",
    ),
    Unused(
        "scheduler.token_seconds",
        "scheduler.roles",
        lambda roles: roles == "split",
        "workers that decode then compute no prompts",
    ),
    Unused("scheduler.token_share", "scheduler.roles", lambda roles: roles == "split"),
    Unused("speculation.tokens", "speculation.method", lambda method: method == "none"),
    Unused("speculation.max_step_tokens", "speculation.method", lambda method: method == "none"),
    Unused("speculation.max_ngram", "speculation.method", lambda method: method != "ngram"),
    Unused("cache.host_bytes", "cache.prefix_sharing", lambda sharing: not sharing, "no prefix is cached then"),
    Unused("cache.verify_host", "cache.host_bytes", lambda host_bytes: host_bytes == 0),
    Unused("cache.verify_host", "cache.host_bytes", lambda host_bytes: host_bytes is None, device="cpu"),
    Unused("cache.disk_path", "cache.host_bytes", lambda host_bytes: host_bytes == 0, BEHIND_HOST),
    Unused("cache.disk_path", "cache.host_bytes", lambda host_bytes: host_bytes is None, BEHIND_HOST, device="cpu"),
    Unused(
        "cache.disk_path",
        "record.folder",
        lambda folder: folder is not None,
        "a replay cannot read what earlier runs have left there",
    ),
    Unused("cache.disk_bytes", "cache.disk_path", lambda path: path is None),
    Unused("scheduler.max_parked", "cache.parked_bytes", lambda parked_bytes: parked_bytes is None),
    Unused("scheduler.parked_seconds", "cache.parked_bytes", lambda parked_bytes: parked_bytes is None),
    Unused(
        "scheduler.reserved_output",
        "cache.parked_bytes",
        lambda parked_bytes: parked_bytes is None,
        "where pages run out, sequences are parked",
    ),
    Unused(
        "cache.parked_bytes",
        "speculation.method",
        lambda method: method not in ("none", "ngram"),
        "what a model or a head drafts from cannot be parked",
    ),
    Unused("adapters.max_rank", "adapters.max_resident", lambda most: not most, "set adapters.max_resident"),
    Unused("adapters.host_bytes", "adapters.max_resident", lambda most: not most, "set adapters.max_resident"),
    Unused("adapters.max_adapters", "adapters.max_resident", lambda most: not most, "set adapters.max_resident"),
    Unused("adapters.folders", "adapters.max_resident", lambda most: not most, "set adapters.max_resident"),
    Unused("adapters.allowed_root", "adapters.max_resident", lambda most: not most, "set adapters.max_resident"),
    Unused("gateway.cors_origins", "gateway.http_port", lambda port: port is None, "there is no HTTP server then"),
    Unused("metrics.host", "metrics.port", lambda port: port is None),
    Unused("record.max_mib", "record.folder", lambda folder: folder is None),
    Unused("record.prompts", "record.folder", lambda folder: folder is None),
    Unused("tracing.sample_ratio", "tracing.endpoint", lambda endpoint: endpoint is None),
)


def check_used(config: Section) -> None:
    """ValueError for a key that changes nothing, with its value and the allowed ones. config: of a cluster."""
    for rule in RULES:
        section, name = _found(config, rule.key)
        value, default = getattr(section, name), type(section).model_fields[name].default
        deciding = getattr(*_found(config, rule.beside))
        applies = rule.device in (None, getattr(*_found(config, "island.device")))
        if applies and value != default and rule.holds(deciding):
            why = rule.why or f"without another {rule.beside} it changes nothing"
            raise ValueError(
                f"{rule.key} is {shown(value)}; it must be {shown(default)} where {rule.beside} is "
                f"{shown(deciding)}: {why}"
            )


def _found(config: Section, key: str) -> tuple[Section, str]:
    """Returns the section that holds a dotted key, and the key's name there."""
    section, _, name = key.partition(".")
    return getattr(config, section), name
