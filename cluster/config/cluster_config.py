"""A cluster's configuration: all sections of its YAML together, and how it is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from tandem.cluster.config.adapters import AdaptersSection
from tandem.cluster.config.cache_section import CacheSection
from tandem.cluster.config.embeddings import EmbeddingsSection
from tandem.cluster.config.errors import explain, names
from tandem.cluster.config.file import environment_keys, parse_override, put, read_mapping
from tandem.cluster.config.island import IslandSection
from tandem.cluster.config.scaling import ScalingSection
from tandem.cluster.config.sections import (
    GatewaySection,
    LoggingSection,
    MetricsSection,
    ModelSection,
    RaySection,
    RecordSection,
    RecoverySection,
    SchedulerSection,
    Section,
    SecuritySection,
    TracingSection,
)
from tandem.cluster.config.speculation import SpeculationSection
from tandem.cluster.config.units import Islands
from tandem.cluster.config.unused import check_used
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ConfigError


class ClusterConfig(Section):
    """One cluster."""

    name: str = Field(default="local", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """the cluster's name: 1 to 63 letters, digits and . _ -, a letter or digit first"""
    model: ModelSection = ModelSection()
    """the served model"""
    cache: CacheSection = CacheSection()
    """each worker's KV"""
    scheduler: SchedulerSection = SchedulerSection()
    """limits of one forward"""
    speculation: SpeculationSection = SpeculationSection()
    """drafted tokens, which decode steps verify"""
    adapters: AdaptersSection = AdaptersSection()
    """LoRA adapters over the served model"""
    embeddings: EmbeddingsSection = EmbeddingsSection()
    """embeddings, scores and rankings"""
    num_islands: Islands = Field(default=1, le=256)
    """islands of the shape that `island` gives; a lost worker stops its own island only"""
    island: IslandSection = IslandSection()
    """the workers that can write into each other"""
    gateway: GatewaySection = GatewaySection()
    """the servers for clients"""
    scaling: ScalingSection = ScalingSection()
    """how many islands there may be while the cluster runs, and how many workers in each"""
    metrics: MetricsSection = MetricsSection()
    """metrics for Prometheus"""
    logging: LoggingSection = LoggingSection()
    """logs of all processes"""
    tracing: TracingSection = TracingSection()
    """spans of requests"""
    record: RecordSection = RecordSection()
    """records of workers' actions"""
    recovery: RecoverySection = RecoverySection()
    """what happens when a process ends or falls silent"""
    security: SecuritySection = SecuritySection()
    """who may call the gateway"""
    ray: RaySection = RaySection()
    """the Ray that places the workers"""

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if not self.security.is_guarded and not is_loopback(self.gateway.host):
            raise ValueError(
                f"gateway.host is {self.gateway.host!r}; it must be a loopback address, 127.0.0.1, ::1 or localhost, "
                "unless there are a token and TLS: set security.token_file or api_key, tls_cert and tls_key, or "
                "tls_at_proxy where a proxy in front of it has them"
            )
        return self

    @model_validator(mode="after")
    def _is_reached(self) -> Self:
        """Checks that gateways on other hosts can reach the workers, and that keys for such hosts have a use."""
        gateway = self.gateway
        if gateway.nodes == "launcher":
            for key in ("node_resources", "node_labels"):
                if getattr(gateway, key):
                    raise ValueError(
                        f"gateway.{key} is {getattr(gateway, key)}; it must be empty where gateway.nodes is launcher: "
                        "set gateway.nodes=all"
                    )
        elif self.island.network == "loopback":
            raise ValueError(
                f"gateway.nodes is {gateway.nodes}; it must be launcher where island.network is loopback: gateways on "
                "other hosts could not reach the workers"
            )
        return self

    @model_validator(mode="after")
    def _are_counted(self) -> Self:
        metrics, guarded = self.metrics, self.security.is_guarded
        if metrics.port is None:
            return self
        if not metrics.enabled:
            raise ValueError(f"metrics.port is {metrics.port}; it must be null where metrics.enabled is false")
        if metrics.port and metrics.port in (self.gateway.port, self.gateway.http_port):
            raise ValueError(f"metrics.port is {metrics.port}; it must be another one than those of the gateway")
        if not (guarded or metrics.public or is_loopback(metrics.host)):
            raise ValueError(
                f"metrics.host is {metrics.host!r}; it must be a loopback address unless metrics.public is true, or "
                "security has a token and TLS, as for gateway.host"
            )
        return self

    @model_validator(mode="after")
    def _computes_prompts(self) -> Self:
        if not self.island.num_prefill and self.scheduler.roles == "split":
            raise ValueError(
                "island.num_prefill is 0; it must be at least 1 where scheduler.roles is split: set "
                "scheduler.roles=colocated, with which decode workers compute the prompts"
            )
        return self

    @model_validator(mode="after")
    def _can_scale(self) -> Self:
        scaling, most = self.scaling, self.scaling.max_islands
        if most is not None and self.num_islands > most:
            raise ValueError(f"num_islands is {self.num_islands}; it must be at most scaling.max_islands, {most}")
        if not (scaling.is_automatic or scaling.moves_roles):
            return self
        if scaling.moves_roles:
            self._check_roles()
        if scaling.is_automatic and self.num_islands < scaling.min_islands:
            raise ValueError(
                f"num_islands is {self.num_islands}; it must be at least scaling.min_islands, {scaling.min_islands}, "
                f"where scaling.{' or scaling.'.join(scaling.targets)} is set"
            )
        if not self.metrics.enabled:
            named = " and ".join(f"scaling.{name}" for name in scaling.targets)
            raise ValueError(f"metrics.enabled is false; it must be true where {named} is set: the policy reads them")
        return self

    def _check_roles(self) -> None:
        scaling, island = self.scaling, self.island
        if self.scheduler.roles != "split":
            raise ValueError(
                f"scaling.max_workers is {scaling.max_workers}; it must be null where scheduler.roles is "
                f"{self.scheduler.roles}: any worker does what is missing there"
            )
        for name in ("prefill", "decode"):
            workers, least = getattr(island, f"num_{name}"), getattr(scaling, f"min_{name}")
            if workers < least:
                raise ValueError(
                    f"island.num_{name} is {workers}; it must be at least scaling.min_{name}, {least}, where "
                    "scaling.max_workers is set"
                )
        workers = island.num_prefill + island.num_decode
        if scaling.max_workers is not None and workers > scaling.max_workers:
            raise ValueError(
                f"island.num_prefill and island.num_decode are {workers} together; they must be at most "
                f"scaling.max_workers, {scaling.max_workers}"
            )

    @property
    def processes(self) -> int:
        """The number of processes of all islands' workers."""
        return self.num_islands * self.island.ranks.processes

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        check_used(self)
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        both = sorted(self.adapters.folders.keys() & set(self.model.names if self.model.path is not None else ()))
        if both:
            raise ValueError(f"adapters.folders has {both[0]!r}, which is a name of the model; choose another one")
        return self

    @model_validator(mode="after")
    def _adapters_fit_roles(self) -> Self:
        roles = self.scheduler.roles
        if self.adapters.max_resident == 1 and roles != "split":
            raise ValueError(
                f"adapters.max_resident is 1; it must be 0, or at least 2, where scheduler.roles is {roles}: a worker "
                "keeps one slot for its own prompts, and one for those of others"
            )
        return self

    @model_validator(mode="after")
    def _fit_device(self) -> Self:
        utilization = self.cache.gpu_memory_utilization
        if self.island.device == "cpu" and utilization is not None:
            raise ValueError(
                f"cache.gpu_memory_utilization is {utilization}; it must be null where island.device is cpu: "
                "cache.num_pages says how large the pools are there"
            )
        return self


def load_config(
    path: Path | str | None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> ClusterConfig:
    """Reads a cluster's YAML, then applies the environment's keys, then overrides; None is an empty file.

    overrides: dotted keys and values, or `dotted.key=value` with the value in YAML. environ: see environment_keys().
    Raises ConfigError with one line for each finding.
    """
    values = {} if path is None else read_mapping(Path(path), names(ClusterConfig))
    given = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    pairs = [
        (f"{variable}: ", *pair)
        for variable, pair in environment_keys(environ, ClusterConfig.model_fields, _takes_text)
    ]
    pairs += [("", *pair) for pair in given]
    for _, key, value in pairs:
        put(values, key, value)
    sources = {key: source for source, key, _ in pairs}
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_source(finding, path, sources) + explain(finding, ClusterConfig) for finding in error.errors())
        ) from None


def _source(finding: ErrorDetails, path: Path | str | None, sources: Mapping[str, str]) -> str:
    """Names the source of the value: the file, unless a variable or an override has given it, or may have."""
    if not finding["loc"] and sources:
        return ""
    dotted = ".".join(map(str, finding["loc"])) + "."
    over = [source for key, source in sources.items() if dotted.startswith(f"{key}.")]
    beside = {key.partition(".")[0] for key in sources}  # sections that a variable or an override sets partly
    return over[-1] if over else "" if path is None or dotted.partition(".")[0] in beside else f"{path}: "


def _takes_text(key: str) -> bool:
    """Returns whether the key, which is dotted, accepts texts only."""
    kind: Any = ClusterConfig
    for name in key.split("."):
        field = kind.model_fields.get(name) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        kind = None if field is None else field.annotation
    return bool({str, SecretStr} & {kind, *get_args(kind)})
