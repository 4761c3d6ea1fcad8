"""The answer of /metrics: the counts of all the gateway's processes, and the cluster's state."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.keys.book import KeyBook
from tandem.cluster.metrics.cluster_series import gateway_families, island_families, pages_in_use, worker_families
from tandem.cluster.metrics.key_series import key_families
from tandem.cluster.metrics.request_metrics import RequestMetrics
from tandem.cluster.metrics.series import LAYOUT
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.proto import inference_pb2

FRESH_SECONDS = 0.2  # in which one answer serves all callers
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ENGINE = "0"  # vLLM numbers its engines; its dashboards see the whole cluster as one


@dataclass(frozen=True)
class Served:
    """The served model, for the labels of metrics. adaptive: whether any worker may decode."""

    model: str
    page_size: int
    num_pages: int
    kv_cache_dtype: str
    prefix_sharing: bool
    adaptive: bool


class Scrape:
    """Makes the text of /metrics. Owned by the gateway's event loop. Any process answers for all."""

    def __init__(
        self,
        metrics: RequestMetrics,
        served: Served,
        cluster: Callable[[], Awaitable[inference_pb2.ClusterInfo]],
        unready: Callable[[], str],
        keys: KeyBook | None = None,
    ) -> None:
        """cluster: asks the workers. unready: see Readiness.reason. keys: of callers; None: there are none."""
        self._metrics = metrics
        self._served = served
        self._cluster = cluster
        self._unready = unready
        self._keys = keys
        self._made = 0.0
        self._making: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Returns the text in CONTENT_TYPE. Workers are asked at most once in FRESH_SECONDS, however many callers there
        are."""
        now = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now - self._made >= FRESH_SECONDS):
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        info = await self._cluster()
        self._metrics.flush()
        table = self._metrics.table
        common = {"model_name": self._served.model, "engine": ENGINE}
        families = [
            *LAYOUT.families(common, [table.lasting(process) for process in range(table.processes)]),
            *self._states(common, info, table),
            *gateway_families(info),
            *island_families(info.islands),
            *worker_families(info.islands),
        ]
        sums: Mapping[str, Int64Array] = {}
        if self._keys is not None:
            about = "1 while security.keys_file cannot be used, so that the keys from before stay."
            families.append(_gauge("tandem:keys_file_stale", about, {}, self._keys.stale))
            sums = self._keys.sums()
        self._made = asyncio.get_running_loop().time()
        # This takes a few milliseconds, and some 70 with a thousand keys. Streams must not wait for it.
        return await asyncio.to_thread(_text, families, sums)

    def _states(
        self, common: dict[str, str], info: inference_pb2.ClusterInfo, table: GatewayTable
    ) -> list[GaugeMetricFamily]:
        """Returns gauges of requests by where they are, and of pages."""
        queued, decoding = table.total(Column.QUEUED), table.total(Column.DECODING)
        placed = max(0, table.total(Column.ACTIVE) - queued)
        stages = {"queued": queued, "prefill": max(0, placed - decoding), "decode": decoding}
        used = pages_in_use(info.islands, adaptive=self._served.adaptive)
        served = self._served
        cache = {
            "block_size": served.page_size,
            "num_gpu_blocks": served.num_pages,
            "cache_dtype": served.kv_cache_dtype,
            "enable_prefix_caching": served.prefix_sharing,
        }
        gauges = [
            _gauge("vllm:num_requests_running", "Requests that have workers.", common, placed),
            _gauge("vllm:num_requests_waiting", "Requests that wait for room.", common, queued),
            _gauge("vllm:num_requests_waiting_by_reason", "The same, by why.", common | {"reason": "capacity"}, queued),
            _gauge("vllm:kv_cache_usage_perc", "Part of the pages for decoding in use, 0 to 1.", common, used),
            _gauge("vllm:cache_config_info", "1, with the settings of the cache.", common | cache, 1),
            _gauge("tandem:queued_tokens", "Tokens, prompts and outputs, that wait for room.", {},
                   table.total(Column.QUEUED_TOKENS)),
            _gauge("tandem:ready", "1 where requests would be served, as /ready says.", {}, not self._unready()),
        ]  # fmt: skip
        by_stage = GaugeMetricFamily("tandem:requests", "Requests by what they wait for.", labels=["stage"])
        for stage, count in stages.items():
            by_stage.add_metric([stage], count)
        return [*gauges, by_stage]


def _text(families: Sequence[Metric], sums: Mapping[str, Int64Array]) -> bytes:
    """sums: see key_families()."""
    return generate_latest(_Families([*families, *key_families(sums)]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Families:
    """A registry of given families, for the text's writer."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _gauge(name: str, about: str, labels: dict[str, object] | dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=[*labels])
    family.add_metric([str(label) for label in labels.values()], float(value))
    return family
