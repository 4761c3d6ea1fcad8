"""The Triton kernels that process logits, compiled for Hopper without a GPU: how many registers they take."""

import json

import pytest

from tests.support.hopper import GRANULE, REGISTERS, taken, told_by

TYPES = {"slots": "*i64", "positions": "*i64", "tokens": "*i64", "seen": "*i16", "allowed": "*i32", "records": "*i32"}
TYPES |= {"processed": "*fp32", "pitch": "i32", "vocab": "i32", "masks": "i32"}
PROGRAMS = 2  # of a multiprocessor at once, so that one computes while the other waits


def registers() -> dict[str, int]:
    """Returns the registers of all threads of a program."""
    from tandem.workers.kernels.triton import logits

    threads = 32 * logits.WARPS
    options = {"num_warps": logits.WARPS, "maxnreg": logits.MAX_REGISTERS, "launch_pdl": False}
    process = taken(logits._process, {"BLOCK": logits.BLOCK}, TYPES, **options)
    count = taken(logits._count, {}, TYPES, launch_pdl=False)
    return {"process": process.registers * threads, "count": count.registers * 128}


@pytest.mark.long
def test_programs_share_a_multiprocessor() -> None:
    for number in told_by(__name__).values():
        assert -(-number // GRANULE) * GRANULE * PROGRAMS <= REGISTERS


if __name__ == "__main__":
    print(json.dumps(registers()))
