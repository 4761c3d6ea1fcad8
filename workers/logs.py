"""Opens a process's log and formats its lines."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

LOGGER = "tandem"
FILE_BYTES = 64 << 20  # then a file is renamed, and a new one begins; one old one is kept
MAX_LINES = 4096  # not yet written; more are dropped, for no request waits for a disk
MAX_CHARACTERS = 8192  # of a message; its traceback has as many
MAX_FIELD = 160  # characters of a field
PLAIN = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class LogSettings:
    """The configuration's section `logging`. access: one line for each finished request, of gateway processes."""

    access: bool = False
    format: str = "text"  # text or json
    folder: str | None = None  # None: stderr


class TextFormatter(logging.Formatter):
    """Time, message and fields in one line, tracebacks after it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)[:MAX_CHARACTERS]
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in _fields(record).items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, process and message, and then the record's fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        value: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage()[:MAX_CHARACTERS],
        }
        if record.exc_info:
            value["traceback"] = self.formatException(record.exc_info)[-MAX_CHARACTERS:]
        return json.dumps(value | _fields(record))


def formatter(settings: LogSettings, process: str) -> logging.Formatter:
    """process: the name that JSON lines carry."""
    return JsonFormatter(process) if settings.format == "json" else TextFormatter()


class _Queued(QueueHandler):
    """Hands records to the thread that writes them. A record that finds no room is dropped."""

    def __init__(self, target: logging.Handler) -> None:
        self._waiting: Queue[logging.LogRecord] = Queue()
        super().__init__(self._waiting)
        self._listener = QueueListener(self._waiting, target)
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < MAX_LINES:
            self._waiting.put_nowait(record)

    def close(self) -> None:
        self._listener.stop()
        for handler in self._listener.handlers:
            handler.close()
        super().close()


def open_log(settings: LogSettings, process: str) -> logging.Handler:
    """Lets this process log as configured, until close_log(). Workers, gateways and the launcher write the same lines.

    process: its name, and the file's. OSError when the file cannot be opened.
    """
    target: logging.Handler = logging.StreamHandler()
    if settings.folder is not None:
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        path = Path(settings.folder) / f"{process.replace('/', '-')}.log"
        target = RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
    target.setFormatter(formatter(settings, process))
    handler = _Queued(target)
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


def close_log(handler: logging.Handler) -> None:
    """Writes what waits. Idempotent."""
    if handler in logging.getLogger(LOGGER).handlers:
        logging.getLogger(LOGGER).removeHandler(handler)
        handler.close()


def with_fields(**fields: object) -> dict[str, object]:
    """`extra` of a log call: what a JSON line has as keys, and a text line as key=value after the message."""
    return {"fields": fields}


class Named(Protocol):
    @property
    def request_id(self) -> str: ...


def of_requests(*requests: Named) -> dict[str, object]:
    """Returns the `extra` of a log call about these requests: request_id of one, request_ids of several, none
    without."""
    names = [request.request_id[:MAX_FIELD] for request in requests]
    if not names:
        return with_fields()
    return with_fields(request_id=names[0]) if len(names) == 1 else with_fields(request_ids=names)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return {name: value[:MAX_FIELD] if isinstance(value, str) else value for name, value in fields.items()}


def _plain(value: object) -> str:
    """Returns the text of a value, quoted where spaces or line ends from a client could break the line."""
    text = str(value)
    return text if PLAIN.fullmatch(text) and '"' not in text else json.dumps(text)
