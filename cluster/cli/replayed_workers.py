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
from tandem.workers.engine.engine import Engine
from tandem.workers.pool_pages import pool_pages
from tandem.workers.replay.errors import NoReplay
from tandem.workers.replay.player import Playback, Show, Summary, replay
from tandem.workers.replay.pushes import PushLog
from tandem.workers.replay.record_file import Header, RecordReader, model_digest
from tandem.workers.replay.value_types import schema
from tandem.workers.worker import Worker

TRANSPORT = "shared_memory"  # all PEs are in this process


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
            engines = [_engine(worker) for worker in workers]
        except (CacheError, TransferError, MemoryError, OSError) as error:  # more than this host has or takes
            raise NoReplay(f"workers of the header's configuration cannot be made here: {error!s:.200}") from error
        whole = not missing
        playbacks = [Playback(one, *parts, summary, whole=whole) for one, parts in zip(readers, engines, strict=True)]
        replay(playbacks, summary, until=until, show=show)
    return summary


def _check(headers: Sequence[Header]) -> None:
    """That they are of one epoch of one island, and can be replayed here."""
    first = headers[0]
    for header in headers:
        one, other = header.config, first.config
        mine, first_one = (
            (of.run, of.config.island, of.config.epoch, of.config.num_pes, of.num_pages, of.host)
            for of in (header, first)
        )
        if mine != first_one:
            raise NoReplay(
                f"the files are of {other.island!r} epoch {other.epoch}, start {first.run:.8} on boot {first.host:.8}, "
                f"and of {one.island!r} epoch {one.epoch}, start {header.run:.8} on boot {header.host:.8}; files "
                "of one start, epoch and host are accepted together"
            )
        if one.device != "cpu":
            raise NoReplay(f"the worker of PE {one.pe} computed on {one.device}; records of cpu are accepted")
        if header.types != schema():
            raise NoReplay(f"the record is of tandem {header.tandem}, whose values have other fields than those here")
        check_recorded(header)
    pes = [header.config.pe for header in headers]
    if len(set(pes)) < len(pes):
        raise UsageError(f"the files are of PEs {', '.join(map(str, pes))}; one file of each is accepted")


def _loaded(header: Header, model: str | None, stack: ExitStack) -> Worker:
    config = replace(header.config, transport=TRANSPORT, model_path=model or header.config.model_path)
    folder = Path(config.model_path)
    if not (folder / "config.json").is_file():
        raise NoReplay(f"model is {config.model_path!r}, which has no config.json; give --model the folder")
    if model_digest(folder) != header.model:
        raise NoReplay(f"model is {config.model_path!r}, whose config.json is not the one that was recorded")
    worker = Worker(config)
    stack.callback(worker.stop)
    worker.load()
    return worker


def _join(workers: Sequence[Worker], headers: Sequence[Header], missing: Sequence[int], stack: ExitStack) -> None:
    """Opens the memory of all PEs, of those without a record, too: peers write there."""
    handles = {worker.config.pe: worker.open(headers[0].num_pages) for worker in workers}
    for header, worker in zip(headers, workers, strict=True):
        if worker.layout.fingerprint != header.layout:
            raise NoReplay(f"the cache of PE {header.config.pe} has another layout here than was recorded")
    one, layout = workers[0].config, workers[0].layout
    for pe in missing:
        config = TransportConfig(
            pe=pe,
            num_pes=one.num_pes,
            layout=layout,
            num_pages=pool_pages(one, workers[0].largest_layout, headers[0].num_pages),
            num_signals=mailbox_rows(one.num_signals, one.num_pes),
            island=one.island,
            epoch=one.epoch,
        )
        transport = create_transport(TRANSPORT, config)
        stack.callback(transport.close)
        handles[pe] = transport.open()
    for worker in workers:
        worker.join([handles[pe] for pe in range(one.num_pes)])


def _engine(worker: Worker) -> tuple[Engine, PushLog]:
    """As it was when the worker began to serve."""
    logs: list[PushLog] = []

    def watch(writer: PageWriter) -> PageWriter:
        logs.append(PushLog(writer))
        return logs[0]

    engine = worker.assemble(watch)
    return engine, logs[0]
