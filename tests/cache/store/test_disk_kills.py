"""A process that writes pages to a disk is killed at any moment."""

import json
import subprocess
import sys
from pathlib import Path

from tests.cache.store.disk_killer import KILLS

ROOT = Path(__file__).parents[3]


def test_a_kill_at_any_moment_leaves_whole_pages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cache.store.disk_killer", str(tmp_path), "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    looks = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(looks) == KILLS
    for look in looks:
        assert (look["wrong"], look["bad"]) == (0, 0)
        assert look["found"] == look["adopted"]
        assert look["used"] <= look["capacity"]
    assert sum(look["found"] for look in looks) > 10 * KILLS
