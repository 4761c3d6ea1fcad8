"""Writes down what an engine does."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cache.plan.page_writer import PageWriter
from tandem.workers.config import WorkerConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.watched_engine import PARAMETERS
from tandem.workers.errors import RankLost
from tandem.workers.replay.codec import Encoder
from tandem.workers.replay.errors import NotAValue, RecordError
from tandem.workers.replay.pseudonyms import Pseudonyms
from tandem.workers.replay.pushes import PushLog
from tandem.workers.replay.record_file import Header, RecordWriter
from tandem.workers.replay.value_types import (
    HANDLES,
    RANK_LOST,
    SECRET_RESULTS,
    UNNOTED,
    ActionEntry,
    EndEntry,
    ResultEntry,
    TokensEntry,
    Unnoted,
    schema,
    secret_arguments,
    value_types,
)
from tandem.workers.sampling.pending_samples import PendingSamples, Samples

log = logging.getLogger(__name__)
END_BYTES = 512  # kept for the last entry


class Recorder:
    """One record, until it is full or cannot be written; the worker then goes on without. Owned by the step thread."""

    def __init__(self, writer: RecordWriter, began: int, pseudonyms: Pseudonyms | None) -> None:
        """began: when the record began, of time.monotonic_ns(). pseudonyms: of a record without prompts."""
        self._writer: RecordWriter | None = writer
        self._began = began
        self._tells = pseudonyms is None
        self._encoder = Encoder(value_types(pseudonyms), secrets=pseudonyms is None)
        self._secrets = secret_arguments(pseudonyms) if pseudonyms else {}
        self._pushes: PushLog | None = None
        self._actions = 0
        self._acting = False

    def watch(self, writer: PageWriter) -> PageWriter:
        """Returns the writer that the cache is to use in place of `writer`."""
        self._pushes = PushLog(writer)
        return self._pushes

    def act(self, engine: Engine, name: str, arguments: tuple[Any, ...], action: Callable[..., Any]) -> Any:
        """Does the engine's action, and writes it down. arguments: all parameters in order."""
        if self._writer is None or self._acting:
            return action(engine, *arguments)
        self._acting = True
        try:
            self._begin(name, arguments)
            try:
                result = action(engine, *arguments)
            except RankLost:
                self.close(RANK_LOST, logging.WARNING)
                raise
            except BaseException as error:
                self._write(ResultEntry(None, type(error).__name__, self._pushed(), engine.pages), name)
                raise
            result, noted = self._noted(result)
            if not self._tells and name in SECRET_RESULTS:
                noted = Unnoted()
            self._write(ResultEntry(noted, "", self._pushed(), engine.pages), name)
            return result
        finally:
            self._acting = False

    def read(self, samples: "RecordedSamples", found: Samples) -> None:
        """Records the tokens of a launch, which have come."""
        if self._tells and self._writer is not None:
            self._write(TokensEntry(samples.number, found.token_ids), "samples")

    def close(self, reason: str = "the worker left its island", level: int = logging.INFO) -> None:
        """Idempotent. level: of the log's line that says so."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.write(self._encoder.encode(EndEntry(reason[: END_BYTES // 2]), "end"))
        except OSError:
            log.exception("the record's last entry could not be written")
        writer.close()
        log.log(level, "the record %s ends: %s", writer.path, reason)

    def _begin(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self._secrets:
            names = PARAMETERS[name]
            arguments = tuple(
                self._secrets.get(f"{name}.{parameter}", _itself)(value)
                for parameter, value in zip(names, arguments, strict=True)
            )
        now = max(1, time.monotonic_ns() - self._began)
        self._write(ActionEntry(self._actions, self._encoder.gone(), name, arguments), name, now)
        self._actions += 1

    def _pushed(self) -> tuple[Any, ...]:
        return () if self._pushes is None else self._pushes.take()

    def _noted(self, result: Any) -> tuple[Any, Any]:
        """Returns the result as the caller gets it, and as it is written."""
        if isinstance(result, UNNOTED):
            return result, Unnoted()
        if isinstance(result, HANDLES):
            self._encoder.number(result)
        elif hasattr(result, "is_done"):
            result = RecordedSamples(result, self)
            result.number = self._encoder.number(result)
        elif isinstance(result, list | tuple):
            pairs = [self._noted(part) for part in result]
            parts = [part for part, _ in pairs]
            if isinstance(result, tuple) and hasattr(result, "_fields"):
                result = result._make(parts)  # type: ignore[attr-defined]
            else:
                result = type(result)(parts)
            return result, tuple(noted for _, noted in pairs)
        return result, result

    def _write(self, entry: ActionEntry | ResultEntry | TokensEntry, where: str, stamp: int = 0) -> None:
        """Writes an entry; ends the record where that cannot be."""
        writer = self._writer
        if writer is None:
            return
        try:
            data = self._encoder.encode(entry, where)
            if writer.takes(data, END_BYTES):
                writer.write(data, stamp)
            else:
                self.close("it is full", logging.WARNING)
        except NotAValue as error:
            self.close(f"{where}: {error}", logging.ERROR)
        except OSError as error:
            self.close(f"the file cannot be written: {error.strerror}", logging.ERROR)


def begin_record(config: WorkerConfig, num_pages: int, layout: int, vocab_size: int) -> Recorder | None:
    """The record of a worker that begins to serve, if its configuration asks for one. num_pages, layout: see Header.
    Raises RecordError where the file cannot be made. A rank that follows has none: its leader's says what it does."""
    settings = config.record
    if settings is None or config.rank:
        return None
    header = Header.of(config, num_pages, layout, schema())
    name = f"{config.island}-{header.run[:8]}-epoch{config.epoch}-pe{config.pe}"
    try:
        writer = RecordWriter(Path(settings.folder), name, header, settings.max_bytes)
    except OSError as error:
        raise RecordError(f"record.folder {settings.folder}: no record can be made there: {error.strerror}") from error
    pseudonyms = None if settings.prompts else Pseudonyms(config.page_size, vocab_size)
    return Recorder(writer, header.began, pseudonyms)


class RecordedSamples:
    """Samples on their way, whose tokens are written down when they are read first; see PendingSamples."""

    number = -1

    def __init__(self, samples: PendingSamples, recorder: Recorder) -> None:
        self._samples = samples
        self._recorder = recorder
        self._noted = False

    def is_done(self) -> bool:
        return self._samples.is_done()

    def wait(self) -> Samples:
        found = self._samples.wait()
        if not self._noted:
            self._noted = True
            self._recorder.read(self, found)
        return found


def _itself(value: Any) -> Any:
    return value
