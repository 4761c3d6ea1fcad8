"""Links between hosts that are down for a while, as idle connections see them."""

import subprocess
import sys
import time

import pytest

from tandem.transfer.tcp.connections import keepalive_seconds
from tests.support.hosts import can_make_hosts, hosts

PARTITION_SECONDS = 3.0
SILENT_SECONDS = 2 * PARTITION_SECONDS + 1  # as recovery.silent_seconds


@pytest.mark.long
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
@pytest.mark.timeout(120)
def test_an_idle_connection_outlasts_a_link_that_is_down_for_a_moment() -> None:
    """Its probes are lost meanwhile, and the next one comes in time."""
    program = [sys.executable, "-m", "tests.transfer.idle_connection", str(SILENT_SECONDS)]
    with hosts(2) as made:

        def end(host: int, *address: str) -> "subprocess.Popen[str]":
            return subprocess.Popen(
                made.command(host, *program, *address), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

        def line(process: "subprocess.Popen[str]") -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        with end(0, made.addresses[0]) as one, end(1, made.addresses[0], line(one)) as other:
            assert [line(one), line(other)] == ["connected"] * 2
            connected = time.monotonic()
            for seconds, down in ((4.0, True), (6.5, False)):
                time.sleep(connected + seconds - time.monotonic())
                made.unplug(1, down)
            time.sleep(connected + 11.0 - time.monotonic())
            for process in (one, other):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.close()
            assert [line(one), line(other)] == ["answered"] * 2


@pytest.mark.parametrize("partition", [1.0, 1.5, 2, 3, 4, 5, 7, 8.5, 10, 30, 600])
def test_the_probe_after_a_pause_is_due_in_time_whenever_that_began(partition: float) -> None:
    silent = 2 * partition + 1
    pause = keepalive_seconds(silent)
    down = 0.99 * partition
    for began in range(20):  # parts of the time between the last sign of life and the first probe
        back = pause * began / 20 + down
        due = next(probe for probe in range(pause, 10_000, pause) if probe >= back)
        assert due < silent
