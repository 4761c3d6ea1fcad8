"""One PE's memory: an anonymous file that other processes map through /proc, or private.

    0        random token, by which a handle of another process, or a connection without a handle, is refused
    4096     mailbox   int64 [num_signals, 2]
    …        pool of each layer group, each at a multiple of 4096

The file has no name in any folder, so nothing is left behind however its processes end.
"""

import fcntl
import math
import mmap
import os
import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.transfer.errors import PeerGone, TransportError
from tandem.transfer.machine_memory import machine_memory
from tandem.transfer.membership import Detail, TransportConfig

ALIGNMENT = 4096
TOKEN_BYTES = 16
NAME = "tandem-pages"


def pool_offsets(config: TransportConfig) -> list[int]:
    """Returns the byte at which each pool begins in a segment, and the end of the segment; equal for all PEs."""
    offsets = [ALIGNMENT + _aligned(16 * config.num_signals)]
    for group, count in enumerate(config.num_pages):
        offsets.append(offsets[-1] + _aligned(count * config.layout.page_bytes(group)))
    return offsets


class Segment:
    """A mapped segment. The mapping goes with the last reference to the segment and its tensors and arrays.

    mailbox: int64 [num_signals, 2]. pools: for each layer group [its num_pages, *page_shape].
    """

    def __init__(self, memory: mmap.mmap, config: TransportConfig) -> None:
        layout, words = config.layout, 2 * config.num_signals
        self.token = memory[:TOKEN_BYTES]
        self.mailbox: NDArray[np.int64] = np.frombuffer(memory, np.int64, words, offset=ALIGNMENT).reshape(-1, 2)
        shapes = [(count, *layout.page_shape(group)) for group, count in enumerate(config.num_pages)]
        dtypes = map(layout.stored_dtype_of, range(len(shapes)))
        self.pools: tuple[Tensor, ...] = tuple(
            torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            for shape, dtype, offset in zip(shapes, dtypes, pool_offsets(config), strict=False)
        )


def create_segment(config: TransportConfig) -> tuple[Segment, int]:
    """A new zeroed segment and the descriptor, owned by the caller, through which peers map it.

    TransportError when the machine cannot hold it. Memory is taken as pages are first written.
    """
    num_bytes = _checked_bytes(config)
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        # No peer can shrink the file under us, which would turn our next access into SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise TransportError(f"a segment of {num_bytes} bytes cannot be mapped: {error}") from error
    memory[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    return Segment(memory, config), fd


def create_private_segment(config: TransportConfig) -> Segment:
    """Creates a segment like create_segment(), in memory that no other process maps."""
    num_bytes = _checked_bytes(config)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TransportError(f"a segment of {num_bytes} bytes cannot be mapped: {error}") from error
    memory[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    return Segment(memory, config)


def segment_detail(segment: Segment, fd: int) -> Detail:
    """How another process of this user on this machine finds the segment."""
    return {"pid": os.getpid(), "fd": fd, "token": segment.token.hex()}


def attach_segment(detail: Detail, config: TransportConfig, pe: int) -> Segment:
    """Maps PE pe's segment. PeerGone when its process ended; TransportError when it cannot be reached."""
    pid, fd, token = detail.get("pid"), detail.get("fd"), detail.get("token")
    if not isinstance(pid, int) or not isinstance(fd, int) or not isinstance(token, str):
        raise TransportError(f"PE {pe}'s handle has detail {detail}; it must have pid, fd and token")
    path = f"/proc/{pid}/fd/{fd}"
    num_bytes = pool_offsets(config)[-1]
    try:
        # Look before opening: after a reuse of the pid this may be any file of any process.
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise PeerGone(f"PE {pe}: its process has ended, and pid {pid} belongs to another one")
        peer_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(peer_fd).st_size
            if size != num_bytes:
                raise PeerGone(f"PE {pe}: process {pid} holds a segment of {size} bytes; {num_bytes} are expected")
            memory = mmap.mmap(peer_fd, num_bytes)
        finally:
            os.close(peer_fd)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerGone(f"PE {pe}: process {pid} has ended or has closed its segment") from error
    except OSError as error:
        raise TransportError(
            f"PE {pe}: {path} cannot be mapped ({error}); PEs must be processes of one user in one PID namespace"
        ) from error
    segment = Segment(memory, config)
    if segment.token.hex() != token:
        raise PeerGone(f"PE {pe}: its process has ended, and pid {pid} belongs to another one")
    return segment


def _checked_bytes(config: TransportConfig) -> int:
    num_bytes = pool_offsets(config)[-1]
    available = machine_memory()
    if num_bytes > available:
        raise TransportError(
            f"num_pages {config.num_pages} needs a segment of {num_bytes} bytes; this machine has {available}"
        )
    return num_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
