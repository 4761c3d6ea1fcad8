"""Recorded workers, made again in this process, and what they did."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tandem.cache.plan.errors import CacheError
from tandem.cache.plan.page_writer import PageWriter
from tandem.cluster.cli.recorded_config import check_recorded
from tandem.cluster.errors import UsageError
from tandem.transfer.errors import TransferError
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.workers.config import WorkerConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import NoRanks
from tandem.workers.following.worker_ranks import WorkerRanks
from tandem.workers.pool_pages import pool_pages
from tandem.workers.replay.errors import NoReplay
from tandem.workers.replay.player import Playback, Show, Summary, replay
from tandem.workers.replay.pushes import PushLog
from tandem.workers.replay.record_file import Header, RecordReader, model_digest
from tandem.workers.replay.value_types import schema
from tandem.workers.worker import Worker

TRANSPORT = "shared_memory"  # all PEs are in this process
Ranks = list[Worker]  # of one recorded worker, the leader first


def replay_files(
    files: Sequence[Path], model: str | None = None, until: int | None = None, show: Show = lambda *_: None
) -> Summary:
    """model: the checkpoint's folder, where it is not the one that was recorded. Raises RecordError, which says what
    is wrong with a file or missing here."""
    readers = sorted((RecordReader(path) for path in files), key=lambda reader: reader.header.config.pe)
    headers = [reader.header for reader in readers]
    _check(headers)
    missing = sorted(set(range(headers[0].config.num_pes)) - {header.config.pe for header in headers})
    names, prompts = [reader.path.name for reader in readers], all(header.prompts for header in headers)
    summary = Summary(files=names, missing=missing, prompts=prompts)
    with ExitStack() as stack:
        try:
            workers = [_loaded(header, model, stack) for header in headers]
            _join(workers, headers, missing, stack)
            engines = [_engine(ranks) for ranks in workers]
        except (CacheError, TransferError, NoRanks, MemoryError, OSError) as error:  # more than this host has or takes
            raise NoReplay(f"workers of the header's configuration cannot be made here: {error!s:.200}") from error
        whole = not missing
        playbacks = [Playback(one, *parts, summary, whole=whole) for one, parts in zip(readers, engines, strict=True)]
        replay(playbacks, summary, until=until, show=show)
    return summary


def _check(headers: Sequence[Header]) -> None:
    """Checks that the records are of one epoch of one island, and can be replayed here."""
    first = headers[0]
    for header in headers:
        one, other = header.config, first.config
        mine, first_one = (
            (of.run, of.config.island, of.config.epoch, of.config.num_pes, of.config.ranks, of.num_pages, of.host)
            for of in (header, first)
        )
        if mine != first_one:
            raise NoReplay(
                f"the files are of {other.island!r} epoch {other.epoch}, start {first.run:.8} on boot "
                f"{first.host:.8}, and of {one.island!r} epoch {one.epoch}, start {header.run:.8} on boot "
                f"{header.host:.8}; give files of one start, epoch and host"
            )
        if one.device != "cpu":
            raise NoReplay(f"the worker of PE {one.pe} computed on {one.device}; give records of cpu")
        if header.types != schema():
            raise NoReplay(f"the record is of tandem {header.tandem}, whose values have other fields than those here")
        check_recorded(header)
    pes = [header.config.pe for header in headers]
    if len(set(pes)) < len(pes):
        raise UsageError(f"the files are of PEs {', '.join(map(str, pes))}; give one file of each")


def _loaded(header: Header, model: str | None, stack: ExitStack) -> Ranks:
    config = replace(header.config, transport=TRANSPORT, model_path=model or header.config.model_path)
    folder = Path(config.model_path)
    if not (folder / "config.json").is_file():
        raise NoReplay(f"model is {config.model_path!r}, which has no config.json; give --model the folder")
    if model_digest(folder) != header.model:
        raise NoReplay(f"model is {config.model_path!r}, whose config.json is not the one that was recorded")
    made: Ranks = []
    for rank in reversed(range(config.island_ranks[config.pe])):  # the leader stops first, and tells the others
        worker = Worker(replace(config, rank=rank))
        stack.callback(worker.stop)
        worker.load()
        made.insert(0, worker)
    return made


def _join(workers: Sequence[Ranks], headers: Sequence[Header], missing: Sequence[int], stack: ExitStack) -> None:
    """Opens the memory of all ranks, also of workers without a record: peers write there."""
    num_pages = headers[0].num_pages
    handles = {(one.config.pe, one.config.rank): one.open(num_pages) for ranks in workers for one in ranks}
    for header, (leader, *_) in zip(headers, workers, strict=True):
        if leader.layout.fingerprint != header.layout:
            raise NoReplay(f"the cache of PE {header.config.pe} has another layout here than was recorded")
    one = workers[0][0].config
    for pe in missing:
        for rank in range(one.island_ranks[pe]):
            config = replace(one, pe=pe, rank=rank)
            handles[pe, rank] = _open_missing(WorkerRanks(config), config, num_pages, stack)
    for ranks in workers:
        for worker in ranks:
            worker.join([handles[process] for process in sorted(handles)])


def _open_missing(ranks: WorkerRanks, config: WorkerConfig, num_pages: int, stack: ExitStack) -> bytes:
    """Returns the handle of the memory of a rank whose worker has no record here."""
    member = TransportConfig(
        pe=config.pe,
        num_pes=config.num_pes,
        layout=ranks.layout,
        num_pages=pool_pages(config, ranks.largest_layout, num_pages),
        num_signals=mailbox_rows(config.num_signals, config.num_pes),
        island=config.island,
        epoch=config.epoch,
    )
    transport = ranks.transport(create_transport, member)
    stack.callback(transport.close)
    stack.callback(ranks.leave)
    return ranks.opened(transport.open())


def _engine(ranks: Ranks) -> tuple[Engine, list[PushLog]]:
    """Returns the leader's engine as it was when the worker began to serve, and what each rank pushes."""
    logs: list[PushLog] = []

    def watch(writer: PageWriter) -> PageWriter:
        logs.append(PushLog(writer))
        return logs[-1]

    engine, *_ = [worker.assemble(watch) for worker in ranks]
    return engine, logs
