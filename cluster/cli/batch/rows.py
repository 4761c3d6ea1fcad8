"""The two files of a batch, in OpenAI's format: requests with a custom_id each, and their results.

The file of results is all that a batch keeps. A row that stands there whole is done; a new run sends the others.
"""

import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.errors import TandemError, UsageError

MOST_LINE = 64 << 20  # bytes
MOST_ROWS = 1_000_000
MOST_ID = 512  # characters of a custom_id
MOST_SHOWN = 10  # errors of one file
BLOCK = 1 << 20


@dataclass(frozen=True)
class Row:
    """One request. number: of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_rows(path: Path, urls: Set[str], largest: int = MOST_LINE) -> Iterator["Row | str"]:
    """Yields each row, or what is wrong with its line. Empty lines are left out. Raises UsageError for a file that
    cannot be read."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(largest + 1):
                number += 1
                if len(line) > largest:
                    yield f"line {number} has more than {largest} bytes"
                    return
                if line.strip():
                    yield _row(number, line, urls)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _row(number: int, line: bytes, urls: Set[str]) -> "Row | str":
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"line {number} is no JSON: {error!s:.80}"
    if not isinstance(value, dict):
        return f"line {number} is no JSON object with custom_id, method, url and body"
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID:
        return f"line {number}: custom_id is {custom_id!r:.80}; it must be a text of 1 to {MOST_ID} characters"
    if method != "POST":
        return f"line {number}: method is {method!r:.80}; it must be POST"
    if not isinstance(url, str) or url not in urls:
        return f"line {number}: url is {url!r:.80}; it must be one of {', '.join(sorted(urls))}"
    if not isinstance(body, dict):
        return f"line {number}: body is {body!r:.80}; it must be a JSON object"
    if body.get("stream"):
        return f"line {number}: body.stream is {body['stream']!r:.80}; a batch takes whole answers: leave it out"
    return Row(number, custom_id, url, body)


def check_rows(path: Path, urls: Set[str]) -> frozenset[str]:
    """Returns the ids of all rows. Raises UsageError, with a line for each of the first errors."""
    ids, wrong = set[str](), list[str]()
    for row in read_rows(path, urls):
        if isinstance(row, str):
            wrong.append(row)
        elif row.custom_id in ids:
            wrong.append(f"line {row.number}: custom_id is {row.custom_id!r:.80}, as in an earlier line")
        else:
            ids.add(row.custom_id)
        if len(wrong) >= MOST_SHOWN or len(ids) > MOST_ROWS:
            break
    if len(ids) > MOST_ROWS:
        wrong.append(f"it has more than {MOST_ROWS} rows: divide it")
    if wrong:
        raise UsageError("\n".join(f"{path}: {one}" for one in wrong))
    return frozenset(ids)


def result(row: Row, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Returns the line of a request that got an answer, even an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_id(), "custom_id": row.custom_id, "response": response, "error": None}


def failure(row: Row, code: str, message: str) -> dict[str, Any]:
    """Returns the line of a request that got no answer."""
    error = {"code": code, "message": message}
    return {"id": _new_id(), "custom_id": row.custom_id, "response": None, "error": error}


def is_good(line: dict[str, Any]) -> bool:
    return line["error"] is None and line["response"]["status_code"] == 200


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


class Results:
    """The file of results. This process has it alone, until close() or the end of the process.

    done: ids of rows that stand there. failed: how many of these rows are errors.
    """

    def __init__(self, path: Path, ids: Set[str]) -> None:
        """ids: of the file of requests. Cuts off a line that a kill has left without its end. Raises UsageError for a
        file of anything else, TandemError for one that another process has, or that cannot be written."""
        self._path = path
        self._lock = threading.Lock()
        self.done = set[str]()
        self.failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TandemError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            self._claim()
            self._size = self._read(ids)
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def add(self, line: dict[str, Any]) -> None:
        """Writes a row, all or nothing of it. TandemError when there is no room, say. From any thread."""
        content = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(self._file, left) :]
            except OSError as error:
                os.ftruncate(self._file, self._size)
                raise TandemError(f"{self._path}: cannot be written: {error.strerror}") from None
            self._size += len(content)
            self.done.add(line["custom_id"])
            self.failed += not is_good(line)

    def close(self) -> None:
        """Closes the file once everything written is on the disk."""
        with self._lock:
            os.fsync(self._file)
            os.close(self._file)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TandemError(f"{self._path}: another `tandem batch` writes it") from None

    def _read(self, ids: Set[str]) -> int:
        """Reads the rows that are there. Returns the byte at which the last whole line ends."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._take(number, line, ids)
                end += len(line)
        return end

    def _take(self, number: int, line: bytes, ids: Set[str]) -> None:
        try:
            value = json.loads(line)
            custom_id, good = value["custom_id"], is_good(value)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{self._path}: line {number} is no result of a batch; give a new file") from None
        if custom_id not in ids:
            raise UsageError(f"{self._path}: line {number} is about {custom_id!r:.80}, which the requests do not have")
        if custom_id in self.done:
            raise UsageError(f"{self._path}: line {number} is about {custom_id!r:.80}, as an earlier line is")
        self.done.add(custom_id)
        self.failed += not good
