"""Metrics of the cluster's state: processes, islands and workers at the time of a scrape."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from tandem.proto import inference_pb2

ISLAND = ("island",)
WORKER = ("island", "pe", "role")
Samples = Iterable[tuple[Sequence[object], float]]


def gateway_families(info: inference_pb2.ClusterInfo) -> list[Metric]:
    """Returns the metrics of the gateway's processes."""
    there = [one for one in info.gateways if one.pid]
    return [
        _gauge("tandem:info", "1, with the cluster's name and tandem's version.", ("name", "version"),
               [((info.name, info.version), 1)]),
        _gauge("tandem:uptime_seconds", "Since the gateway started.", (), [((), info.uptime_seconds)]),
        _gauge("tandem:gateway_processes", "Gateway processes that are there.", (), [((), len(there))]),
        _gauge("tandem:gateway_calls", "Calls under way, through gRPC and HTTP.", (),
               [((), sum(one.calls for one in there))]),
        _counter("tandem:gateway_restarts", "Restarts of gateway processes.", (), [((), info.gateway_restarts)]),
        _gauge("tandem:starts_nothing", "Whether no process can be started, because Ray's GCS is away.", (),
               [((), bool(info.starts_nothing))]),
        _gauge("tandem:islands", "Islands, those that are started again included.", (), [((), len(info.islands))]),
        _gauge("tandem:wanted_islands", "Islands that the scaling policy wants.", (),
               [((), info.scaling.wanted_islands)] if info.HasField("scaling") else []),
    ]  # fmt: skip


def island_families(islands: Sequence[inference_pb2.IslandInfo]) -> list[Metric]:
    def each(value: Callable[[inference_pb2.IslandInfo], float]) -> Samples:
        return [((island.name,), value(island)) for island in islands]

    def alive(island: inference_pb2.IslandInfo) -> int:
        return sum(worker.alive for worker in island.workers)

    return [
        _gauge("tandem:island_epoch", "The island's incarnation.", ISLAND, each(lambda one: one.epoch)),
        _counter("tandem:island_restarts", "Restarts after losses.", ISLAND, each(lambda one: one.restarts)),
        _gauge("tandem:island_up", "Whether the island takes requests.", ISLAND, each(lambda one: bool(one.workers))),
        _gauge("tandem:island_workers", "Workers that answer.", ISLAND, each(alive)),
    ]


def worker_families(islands: Sequence[inference_pb2.IslandInfo]) -> list[Metric]:
    """Returns the metrics of workers. Counters begin anew with a worker's epoch."""
    workers = [(island.name, worker) for island in islands for worker in island.workers]

    def name(island: str, worker: inference_pb2.WorkerInfo) -> tuple[object, ...]:
        return island, worker.pe, inference_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()

    def each(value: Callable[[inference_pb2.WorkerInfo], float]) -> Samples:
        return [(name(island, worker), value(worker)) for island, worker in workers if worker.alive]

    def states(of: Callable[[inference_pb2.WorkerInfo], dict[str, int]]) -> Samples:
        return [
            ((*name(island, worker), state), count)
            for island, worker in workers
            if worker.alive
            for state, count in of(worker).items()
        ]

    def ranks(value: Callable[[inference_pb2.RankInfo], float]) -> Samples:
        return [((*name(island, worker), one.rank), value(one)) for island, worker in workers for one in worker.ranks]

    families: list[Metric] = [
        _gauge("tandem:rank_up", "Whether a process of a worker of several is there, and no other waits for it.",
               (*WORKER, "rank"), ranks(lambda one: one.alive and not one.stalled)),
        _gauge("tandem:rank_resident_bytes", "Resident memory of each process of a worker of several.",
               (*WORKER, "rank"), ranks(lambda one: one.resident_bytes)),
        _gauge("tandem:worker_up", "Whether the worker answers.", WORKER,
               [(name(island, worker), worker.alive) for island, worker in workers]),
        _gauge("tandem:worker_pages", "Pages of the pool by state. Free ones can be had.", (*WORKER, "state"),
               states(_pages)),
        _gauge("tandem:worker_cached_pages", "Pages with a reusable prefix, in use or free.", WORKER,
               each(lambda one: one.cached_pages)),
        _gauge("tandem:worker_state_pages", "Pages of recurrent states, as worker_pages.", (*WORKER, "state"),
               states(_state_pages)),
        _gauge("tandem:worker_snapshots", "Recurrent states of earlier positions.", WORKER,
               each(lambda one: one.snapshots)),
        _gauge("tandem:worker_snapshot_bytes", "What these take.", WORKER,
               each(lambda one: one.snapshot_bytes)),
        _gauge("tandem:worker_host_bytes", "Host memory for evicted prefixes.", WORKER,
               each(lambda one: one.host_bytes)),
        _gauge("tandem:worker_host_bytes_used", "What is in use of it.", WORKER,
               each(lambda one: one.host_bytes_used)),
        _gauge("tandem:worker_disk_bytes", "Disk behind that host memory.", WORKER,
               each(lambda one: one.disk_bytes)),
        _gauge("tandem:worker_disk_bytes_used", "What is in use of it.", WORKER,
               each(lambda one: one.disk_bytes_used)),
        _gauge("tandem:worker_requests", "Requests in forwards, and those before them.", (*WORKER, "state"),
               states(lambda one: {"running": one.running, "waiting": one.waiting, "parked": one.parked})),
        _gauge("tandem:worker_parked_bytes", "Host memory for parked requests.", WORKER,
               each(lambda one: one.parked_bytes)),
        _gauge("tandem:worker_parked_bytes_used", "What is in use of it.", WORKER,
               each(lambda one: one.parked_bytes_used)),
        _gauge("tandem:worker_adapters", "LoRA adapters by where they are: resident ones are on the device.",
               (*WORKER, "state"), states(_adapters)),
        _gauge("tandem:worker_adapter_bytes", "Host memory for LoRA adapters.", WORKER,
               each(lambda one: sum(adapter.bytes for adapter in one.adapters))),
        _gauge("tandem:adapter_sequences", "Sequences at all workers that use a LoRA adapter.", ("adapter",),
               _sequences(worker for _, worker in workers)),
        _gauge("tandem:worker_resident_bytes", "Resident memory.", WORKER, each(lambda one: one.resident_bytes)),
        _gauge("tandem:worker_gpu_bytes_of_others", "Memory of its GPU that other processes hold.", WORKER,
               [(name(island, worker), worker.gpu_bytes_of_others) for island, worker in workers
                if worker.alive and worker.HasField("gpu_bytes_of_others")]),
        _gauge("tandem:worker_token_seconds", "From one decode step to the next, of late.", WORKER,
               each(lambda one: one.token_seconds)),
        _gauge("tandem:worker_prompt_tokens_per_second", "While it computes prompts, of late.", WORKER,
               each(lambda one: one.prompt_tokens_per_second)),
    ]  # fmt: skip
    for field in inference_pb2.WorkerCounters.DESCRIPTOR.fields:
        values = each(lambda one, name=field.name: getattr(one.counters, name))
        families.append(_counter(f"tandem:worker_{field.name}", f"WorkerCounters.{field.name}.", WORKER, values))
    return families


def pages_in_use(islands: Sequence[inference_pb2.IslandInfo], *, adaptive: bool) -> float:
    """Returns the fraction of decode workers' pages that are in use; of all workers' pages if any worker may decode."""
    pools = [
        worker
        for island in islands
        for worker in island.workers
        if worker.alive and (adaptive or worker.role == inference_pb2.ROLE_DECODE)
    ]
    total = sum(worker.num_pages for worker in pools)
    return 1 - sum(worker.free_pages for worker in pools) / total if total else 0.0


def _pages(worker: inference_pb2.WorkerInfo) -> dict[str, int]:
    return {
        "used": worker.num_pages - worker.free_pages - worker.draining_pages,
        "draining": worker.draining_pages,
        "free": worker.free_pages,
    }


def _state_pages(worker: inference_pb2.WorkerInfo) -> dict[str, int]:
    used = worker.state_pages - worker.free_state_pages
    return {"used": used, "free": worker.free_state_pages} if worker.state_pages else {}


def _adapters(worker: inference_pb2.WorkerInfo) -> dict[str, int]:
    resident = sum(one.resident for one in worker.adapters)
    return {"resident": resident, "host": len(worker.adapters) - resident} if worker.adapters else {}


def _sequences(workers: Iterable[inference_pb2.WorkerInfo]) -> Samples:
    """Counts sequences by adapter name. A removed adapter counts while sequences use it; workers bound how many there
    are."""
    counts: Counter[str] = Counter()
    for worker in workers:
        for one in worker.adapters:
            counts[one.name] += one.sequences
    return [((name,), count) for name, count in sorted(counts.items())]


def _gauge(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=labels), samples)


def _counter(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), samples)


def _filled(family: "GaugeMetricFamily | CounterMetricFamily", samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric([*map(str, labels)], float(value))
    return family
