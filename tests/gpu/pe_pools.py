"""Fills and checks the pools and mailboxes of PeProcesses. Contents: a pool's bits for each group."""

import time

import numpy as np

from tandem.cache.plan.arrays import Int32Array
from tests.gpu.pe_process import PeProcess, together
from tests.transfer.layouts import PAGE_SIZE

Contents = list[np.ndarray]


def fill(island: list[PeProcess], seed: int) -> list[Contents]:
    """Random bits into all pools; what they hold now."""
    return [process.do("fill", seed + process.pe) for process in island]


def check(island: list[PeProcess], expected: list[Contents]) -> None:
    for contents, wanted in zip(together(island, "contents"), expected, strict=True):
        assert all(np.array_equal(pool, want) for pool, want in zip(contents, wanted, strict=True))


def copy_slots(source: np.ndarray, target: np.ndarray, source_slots: Int32Array, target_slots: Int32Array) -> None:
    for s, t in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        target[t // PAGE_SIZE, :, :, :, t % PAGE_SIZE] = source[s // PAGE_SIZE, :, :, :, s % PAGE_SIZE]


def put_tokens(pool: np.ndarray, layer: int, rows: Contents, indices: list[int], slots: Int32Array) -> None:
    """rows: of each plane."""
    for index, slot in zip(indices, slots.tolist(), strict=True):
        for plane, values in enumerate(rows):
            pool[slot // PAGE_SIZE, layer, plane, :, slot % PAGE_SIZE] = values[index]


def wait_for_mail(process: PeProcess, row: int, signal: int) -> np.ndarray:
    """The mailbox, once the signal stands in its row."""
    deadline = time.monotonic() + 10
    while True:
        mail = process.do("call", "mailbox")
        if int(mail[row, 0]) == signal:
            return mail
        assert time.monotonic() < deadline, f"the signal never came; row {row} is {mail[row]}"
