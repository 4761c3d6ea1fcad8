"""What a host's gateway processes tell each other without a message: a table in shared memory, a row for each.

    row 0   port  pid  calls  queued …   tokens placed on each worker   waiting by client  running ids   lasting counts
    row 1   …
    far                                  tokens placed on each worker by gateways of other hosts, see FarPlacements
    keys 0, 1 …, far                     what callers' keys have used, see cluster/keys/key_cells.py

Each process writes its own row and reads all rows, so no lock is needed. A cell is an aligned int64, which is read and
written whole. The supervisor makes the file, and clears the row of a process that has ended. The lasting counts and the
keys' counts stay: the next process of that row goes on counting, so that no sum of all rows ever goes down.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from enum import IntEnum, auto
from hashlib import blake2b
from threading import Lock

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import StartFailed

NAME = "tandem-gateway"
MAX_KEY_SIZE = blake2b.MAX_KEY_SIZE
WORKERS = 512  # of an island: as many of each role as the configuration has
CLIENT_CELLS = 1 << 12
ID_CELLS = 1 << 14
LASTING_CELLS = 1 << 10  # of a process and its successors
KEY_SLOTS = 1 << 11  # keys of a process: the file's, and keys that were in it a minute ago
KEY_WIDTH = 144  # cells of a key
# The keys' cells of a process and its successors. Memory that nobody touches is not taken.
KEY_CELLS = 8 + KEY_SLOTS * (1 + KEY_WIDTH)

KEY_TABLE = 1  # the cell of the last of these rows that has the table's own random number


class Column(IntEnum):
    """The single numbers of a row."""

    SOCKET = 0  # the number of its peer server's; 0: there is no process
    PID = auto()
    CALLS = auto()  # under way, through both frontends
    ACTIVE = auto()  # requests that are placed or wait for room
    QUEUED = auto()  # requests that wait for room
    QUEUED_TOKENS = auto()
    DECODING = auto()  # requests that have their first token
    TURN = auto()  # the number of the turn that the head of the queue has; 0 without a head
    TURN_SINCE = auto()  # in monotonic nanoseconds
    TURN_PRIORITY = auto()  # of the head's request
    TURN_LOOKED = auto()  # when the head last looked for room
    TURNS_DONE = auto()  # the highest number of a turn that found room
    GIVEN_BACK = auto()  # counts what may have made room
    CLOCK = auto()  # the highest number of a claim that the process has given or seen
    RESTARTS = auto()  # written by the supervisor, and kept when the row is cleared


SINGLE = 16
assert len(Column) <= SINGLE


class GatewayTable:
    """One process's view of the table. Its event loop owns it. The supervisor has a view of its own, and the file."""

    def __init__(self, memory: mmap.mmap, processes: int, num_islands: int, process: int = 0, key: str = "") -> None:
        """memory: of table_bytes(). process: whose row this view writes. key: a secret of all views, so that no client
        can choose an id that shares another's cell."""
        self.processes = processes
        self.process = process
        self._width = row_cells(num_islands)
        self._first_client = SINGLE + 2 * num_islands * WORKERS
        self._first_id = self._first_client + 2 * CLIENT_CELLS
        self._first_lasting = self._first_id + ID_CELLS
        self._cells = memoryview(memory).cast("q")
        self._everything = np.frombuffer(memory, np.int64)
        self._first_far = processes * self._width
        first_key = self._first_far + 2 * num_islands * WORKERS
        self._far = self._everything[self._first_far : first_key]
        self.keys: Int64Array = self._everything[first_key:].reshape(processes + 1, KEY_CELLS)
        """[processes + 1, KEY_CELLS]: a row for each process, and one for all other hosts, which one process writes.
        They outlast a process."""
        cells = self._everything[: self._first_far].reshape(processes, self._width)
        self._placed = cells[:, SINGLE : self._first_client]
        self._clients = cells[:, self._first_client : self._first_id].reshape(processes, 2, CLIENT_CELLS)
        self._own = process * self._width
        self._rows = [number * self._width for number in range(processes)]
        self._key = key.encode()[:MAX_KEY_SIZE]
        self._fence = Lock()

    @classmethod
    def alone(cls) -> "GatewayTable":
        """Makes the table of a gateway with one process, without a supervisor, and with one island."""
        return cls(mmap.mmap(-1, table_bytes(1, 1)), 1, 1)

    def placed_columns(self, island: int, pe: int) -> tuple[int, int]:
        """Returns two columns: tokens placed on a worker, and tokens of prompts that it has yet to compute. island: its
        number."""
        first = SINGLE + 2 * (island * WORKERS + pe)
        return first, first + 1

    def client_column(self, client: str) -> int:
        """Returns the column for a client's waiting requests. Two clients may share a column, and then share their
        turns."""
        return self._first_client + self._hash(client) % CLIENT_CELLS

    @staticmethod
    def tokens_column(client_column: int) -> int:
        """The column for the tokens that a client's waiting requests ask for."""
        return client_column + CLIENT_CELLS

    def largest_client(self, *, by_tokens: bool) -> tuple[int, int]:
        """Returns the column of the client that has most waiting requests, or waits for most tokens, and how many."""
        held = self._clients[:, int(by_tokens)].sum(0)
        largest = int(held.argmax())
        return self._first_client + largest, int(held[largest])

    def id_column(self, request_id: str) -> int:
        """Returns the column for an id's running requests. Ids may share a column: it only says where to ask."""
        return self._first_id + self._hash(request_id) % ID_CELLS

    def own(self, column: int) -> int:
        return self._cells[self._own + column]

    def put(self, column: int, value: int) -> None:
        self._cells[self._own + column] = value

    def add(self, column: int, amount: int) -> None:
        """Adds to a cell; a later look sees earlier writes. Of two processes that add and then look, one sees both."""
        self._cells[self._own + column] += amount
        self.fence()

    def fence(self) -> None:
        """Lets others see all that this process has written before it reads on."""
        with self._fence:  # taking a lock is a full memory barrier
            pass

    def total(self, column: int) -> int:
        cells = self._cells
        return sum([cells[row + column] for row in self._rows])

    def placed_elsewhere(self, column: int) -> tuple["memoryview[int]", tuple[int, ...]]:
        """Returns the table's cells, and the indices that other processes and hosts have for one of placed_columns().
        It serves sums that are taken often."""
        others = [row for number, row in enumerate(self._rows) if number != self.process]
        return self._cells, (*(row + column for row in others), self._first_far + column - SINGLE)

    def placed_index(self, columns: Sequence[int]) -> Int64Array:
        """Returns the index for cells_at(), [columns, processes + 1]: each process of this host, then all other hosts.

        columns: of placed_columns().
        """
        rows = [*self._rows, self._first_far - SINGLE]
        return np.add.outer(np.array(columns, np.int64), rows)

    def cells_at(self, index: Int64Array) -> Int64Array:
        """Returns a copy of many cells at once, in the shape of the index."""
        return self._everything[index]

    @property
    def placed(self) -> Int64Array:
        """The tokens that this host's processes have placed, [workers' cells]: all placed_columns() in order."""
        return self._placed.sum(0)

    @property
    def placed_everywhere(self) -> Int64Array:
        """The tokens that all hosts' processes have placed, as `placed`."""
        return self.placed + self._far

    def put_far(self, placed: Int64Array) -> None:
        """Records what all other hosts have placed, as `placed`. One process of a host writes it."""
        self._far[:] = placed

    def highest(self, column: int) -> int:
        cells = self._cells
        return max([cells[row + column] for row in self._rows])

    def of(self, process: int, column: int) -> int:
        return self._cells[process * self._width + column]

    def lasting(self, process: int) -> "memoryview[int]":
        """Returns LASTING_CELLS counts that outlast a process. Only the process itself writes there."""
        begin = process * self._width + self._first_lasting
        return self._cells[begin : begin + LASTING_CELLS]

    def others(self) -> list[int]:
        """Returns the other processes that are there."""
        return [other for other in range(self.processes) if other != self.process and self.of(other, Column.SOCKET)]

    def _hash(self, text: str) -> int:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little")

    def clear(self, process: int, restarts: int) -> None:
        """Clears the row of a process that has ended, but for its lasting counts. The supervisor calls it, and the next
        process."""
        begin = process * self._width
        self._cells[begin : begin + self._first_lasting] = memoryview(bytes(8 * self._first_lasting)).cast("q")
        self._cells[begin + Column.RESTARTS] = restarts


class GatewayFile:
    """The memory of a table: a file without a name, which ends with those that map it. Owned by the supervisor."""

    def __init__(self, processes: int, num_islands: int) -> None:
        num_bytes = table_bytes(processes, num_islands)
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.table = GatewayTable(mmap.mmap(self._fd, num_bytes), processes, num_islands)
        self.table.keys[-1, KEY_TABLE] = secrets.randbits(62)

    def close(self) -> None:
        """Closes this process's file. Processes that have the table open keep it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_table(path: str, processes: int, num_islands: int, process: int, key: str) -> GatewayTable:
    """Opens the table in the file of a supervisor on this host. Raises StartFailed if it is gone."""
    num_bytes = table_bytes(processes, num_islands)
    try:
        # Look before opening: after a reuse of the pid this may be any file of any process.
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise StartFailed(f"{path} is not the table of the gateway's processes; their supervisor has ended")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StartFailed(
            f"{path}, the table of the gateway's processes, cannot be opened ({error.strerror}); "
            "they must run on one host, as one user"
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise StartFailed(f"{path} has {size} bytes; the table of {processes} gateway processes has {num_bytes}")
        return GatewayTable(mmap.mmap(fd, num_bytes), processes, num_islands, process, key)
    finally:
        os.close(fd)


def row_cells(num_islands: int) -> int:
    return SINGLE + 2 * num_islands * WORKERS + 2 * CLIENT_CELLS + ID_CELLS + LASTING_CELLS


def table_bytes(processes: int, num_islands: int) -> int:
    return 8 * (processes * row_cells(num_islands) + 2 * num_islands * WORKERS + (processes + 1) * KEY_CELLS)
