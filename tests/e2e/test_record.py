"""A storm of requests through the gateway is recorded by its workers, and replayed: the same pages, tokens, pushes."""

import json
import math
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.replayed_workers import replay_files
from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.following.follower import Follower
from tandem.workers.ranks.shared_ranks import SharedRanks
from tandem.workers.replay.errors import RecordError
from tandem.workers.replay.pushes import PushLog
from tandem.workers.replay.record_file import FRAME, RecordReader
from tandem.workers.replay.value_types import RANK_LOST, TokensEntry, schema
from tests.e2e.test_adaptive import in_graphs
from tests.support.island import running_island
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller
from tests.support.local_processes import LocalProcesses
from tests.support.moves import move_back_and_forth
from tests.support.waiting import until

__all__ = ["in_graphs"]

SHARED = random.Random(0).sample(range(40, 200), 50)  # in no order that page ids have
KINDS = ("greedy", "drawn", "drawn", "penalties", "logprobs", "guided", "prompt_logprobs", "sliding")
TOKENS = [kind[0] for kind in schema()].index(TokensEntry.__name__)  # what such an entry begins with, behind its tag


def sampling(dice: random.Random, kinds: Sequence[str]) -> dict[str, Any]:
    """Draws the sampling parameters of one request."""
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    kind = dice.choice(kinds)
    if kind != "greedy":
        given |= {"temperature": 1.0, "seed": dice.randrange(1 << 30)}
    if kind == "penalties":
        given |= {"presence_penalty": 0.5, "repetition_penalty": 1.2, "bad_words": ["a"], "logit_bias": {7: 2.0}}
    elif kind in ("logprobs", "prompt_logprobs"):
        given |= {kind: 2}
    elif kind == "sliding":
        given |= {"sliding": {"window": 24, "sinks": 2}}
    elif kind == "guided":
        given |= {"guided": {"regex": "[a-f]{3,30}"}, "ignore_eos": False}
    return given


@dataclass
class Storm:
    """Concurrent requests, some of which their clients give up."""

    address: str
    kinds: Sequence[str] = KINDS
    left: int = 0
    moves: int = 0

    def run(self, requests: int) -> "Storm":
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(self._send, range(requests)))
        return self

    def _send(self, number: int) -> None:
        dice = random.Random(number)
        prompt = SHARED[: dice.choice((0, 20, 50))] + [dice.randrange(2, 200) for _ in range(dice.randrange(1, 60))]
        leaves, most, seen = dice.choice((1, 3, None, None)), dice.randrange(1, 60), list[GenerateUpdate]()
        with Client(self.address) as client:
            updates = client.generate(prompt, max_tokens=most, timeout=60, **sampling(dice, self.kinds))
            for update in updates:
                seen.append(update)
                if len(seen) == leaves:
                    updates.close()
                    self.left += 1
                    return
        timings = seen[-1].timings
        self.moves += 0 if timings is None else timings.moves


def record_storm(
    model: Path, folder: Path, overrides: dict[str, Any], requests: int = 60, kinds: Sequence[str] = KINDS
) -> tuple[Storm, list[Path]]:
    """Records a storm. Returns it and the files of its workers, PE by PE."""
    given = {"record.folder": str(folder), "record.prompts": True, "island.num_decode": 2, **overrides}
    with running_island(model, given) as island:
        storm = Storm(island.address, kinds).run(requests)
    assert storm.left
    return storm, sorted(folder.glob("*.tandemrec"))


@pytest.fixture(scope="module")
def files(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Makes the files of one storm that no test changes."""
    settings = {"speculation.method": "ngram", "cache.num_pages": 40}
    return record_storm(small_model, tmp_path_factory.mktemp("records"), settings, 50)[1]


def edited(paths: Sequence[Path], folder: Path, edit: Callable[[int, int, bytes], bytes | None]) -> list[Path]:
    """Copies the files. edit: gets a file's PE, an entry's number and the entry; returns the replacement, if any."""
    copies = []
    for pe, path in enumerate(paths):
        head = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
        parts = [head]
        for number, (stamp, entry) in enumerate(RecordReader(path).entries()):
            instead = edit(pe, number, entry)
            if instead is not None:
                parts += [FRAME.pack(len(instead), crc32(instead), stamp), instead]
        copies.append(folder / path.name)
        copies[-1].write_bytes(b"".join(parts))
    return copies


def forged(path: Path, folder: Path, field: str, value: object) -> Path:
    """Copies the record, with the value in a field of its header, by its dotted name."""
    magic, line, entries = path.read_bytes().split(b"\n", 2)
    header = json.loads(line.rpartition(b" ")[0])
    *above, name = field.split(".")
    reduce(getitem, above, header)[name] = value
    text = json.dumps(header).encode()
    copy = folder / path.name
    copy.write_bytes(b"%s\n%s %08x\n%s" % (magic, text, crc32(text), entries))
    return copy


def test_a_storm_is_replayed(files: list[Path]) -> None:
    summary = replay_files(files)
    assert summary.difference is None
    assert summary.missing == []
    assert summary.tokens > 300
    assert summary.tokens_left == 0
    assert summary.pushes
    assert summary.page_ids > 100
    assert summary.prefix_hits
    assert summary.by_name["take_back"]  # drafts that were not accepted
    assert summary.by_name["mask"]
    assert set(summary.ends.values()) == {"the worker left its island"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["draft_model", "mtp", "eagle3", "fp8", "states", "mtp of states"])
def test_other_storms_are_replayed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "states" in kind:
        make_checkpoint(model := tmp_path / "model", "qwen3_next", mtp="mtp" in kind)
    else:
        model = (make_mtp if kind == "mtp" else make_llama)(tmp_path / "model")
    settings: dict[str, Any] = {"speculation.method": kind.removesuffix(" of states"), "speculation.tokens": 4}
    if kind in ("draft_model", "eagle3"):
        make = make_smaller if kind == "draft_model" else make_head
        settings["speculation.draft"] = str(make(tmp_path / "draft", model))
    if kind == "draft_model":
        settings |= {"scheduler.roles": "adaptive", "island.num_prefill": 0}
        move_back_and_forth(3, monkeypatch)
    elif kind == "fp8":
        settings = {"cache.kv_cache_dtype": "fp8_e4m3"}
    elif kind == "states":
        settings = {"cache.state_interval": 16}
    storm, files = record_storm(model, tmp_path / "records", settings, 40, KINDS[:-1] if "states" in kind else KINDS)
    summary = replay_files(files)
    assert summary.difference is None
    assert summary.tokens
    assert summary.prefix_hits
    assert storm.moves if kind == "draft_model" else summary.pushes


@pytest.fixture(scope="module")
def files_of_leaders(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Makes the files of a prefill worker with two ranks and of a decode worker with one."""
    settings = {"island.prefill_ranks": 2, "island.num_decode": 1, "cache.num_pages": 40}
    return record_storm(small_model, tmp_path_factory.mktemp("leaders"), settings, 20)[1]


def test_a_storm_over_workers_of_several_ranks_is_replayed(files_of_leaders: list[Path]) -> None:
    assert len(files_of_leaders) == 2, "only a leader has a record"
    summary = replay_files(files_of_leaders)
    assert summary.difference is None
    assert summary.tokens > 100
    assert summary.tokens_left == 0
    assert summary.pushes
    assert summary.prefix_hits
    for file, missing in zip(files_of_leaders, ([1], [0]), strict=True):
        summary = replay_files([file])
        assert (summary.difference, summary.missing) == (None, missing)


def test_what_one_rank_computes_otherwise_is_found(
    files_of_leaders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up = SharedRanks.sum
    monkeypatch.setattr(SharedRanks, "sum", lambda self, x: add_up(self, -x if self.rank == 1 else x))
    found = replay_files(files_of_leaders).difference
    assert found is not None
    assert found.what == "tokens"


def test_what_a_following_rank_pushes_elsewhere_is_found(
    files_of_leaders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    note = PushLog._note

    def note_more(self: PushLog, pe: int, written: bytes, positions: int) -> None:
        note(self, pe, written, positions + threading.current_thread().name.startswith("step"))

    monkeypatch.setattr(PushLog, "_note", note_more)
    found = replay_files(files_of_leaders).difference
    assert found is not None
    assert found.what == "pushes of rank 1[0][2]"


def test_a_rank_that_cannot_follow_is_the_first_difference(
    files_of_leaders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "_settle", lambda self, _: self.give_up("it is lost"))
    found = replay_files(files_of_leaders[:1]).difference
    assert found is not None
    assert (found.what, found.replayed) == ("ranks", "a rank cannot continue; its log has the reason")


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 2), (2, 4)])
def test_storms_over_workers_of_any_ranks_are_replayed(
    prefill: int, decode: int, small_model: Path, tmp_path: Path
) -> None:
    ranks = {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    _, files = record_storm(small_model, tmp_path, ranks | {"speculation.method": "ngram", "cache.num_pages": 40}, 40)
    summary = replay_files(files)
    assert summary.difference is None
    assert summary.tokens > 100
    assert summary.pushes
    assert summary.by_name["take_back"]


@pytest.mark.long
@pytest.mark.usefixtures("in_graphs")
def test_steps_that_overlap_are_replayed(small_model: Path, tmp_path: Path) -> None:
    """Steps are launched before the previous tokens are read: with prompts, foreseen, and without masks at first."""
    settings = {"scheduler.roles": "adaptive", "speculation.method": "ngram"}
    _, files = record_storm(small_model, tmp_path, settings, 40)
    summary = replay_files(files)
    assert summary.difference is None
    assert summary.tokens
    assert summary.by_name["mask"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "killed"), [(1, "decode (PE 1)"), (2, "decode (PE 1, rank 0)"), (2, "decode (PE 1, rank 1)")]
)
def test_what_a_killed_worker_has_recorded_is_replayed(
    ranks: int, killed: str, small_model: Path, tmp_path: Path
) -> None:
    settings = {"model.path": str(small_model), "island.threads_per_worker": 1, "gateway.processes": 1}
    settings |= {"island.decode_ranks": ranks}
    settings |= {"gateway.port": 0, "cache.num_pages": 128, "record.folder": str(tmp_path), "record.prompts": True}
    processes = LocalProcesses()
    cluster = Cluster(load_config(None, settings), processes)
    try:
        address = cluster.start()
        with ThreadPoolExecutor(1) as aside:
            storm = aside.submit(Storm(address, KINDS[:-1]).run, 60)  # sliding requests are not placed again
            until(lambda: sum(path.stat().st_size for path in tmp_path.iterdir()) > 100_000)
            os.kill(next(pid for name, pid in processes.pids.items() if killed in name), signal.SIGKILL)
            storm.result()
    finally:
        cluster.stop()
    summary = replay_files(sorted(tmp_path.glob("*-epoch1-*.tandemrec")))
    assert summary.difference is None
    assert summary.tokens
    assert {"its process ended", RANK_LOST}.intersection(summary.ends.values())


def test_a_changed_token_is_the_first_difference(files: list[Path], tmp_path: Path) -> None:
    changed: list[int] = []

    def change(pe: int, number: int, entry: bytes) -> bytes:
        is_tokens = entry[1] == TOKENS
        if pe == 2 and is_tokens and not changed:
            changed.append(number)
            return entry[:-8] + bytes((entry[-8] ^ 1,)) + entry[-7:]
        return entry

    found = replay_files(edited(files, tmp_path, change)).difference
    assert changed
    assert found is not None
    assert (found.file, found.what) == (files[2].name, "tokens")


def test_an_action_that_is_missing_is_found_where_it_was(files: list[Path], tmp_path: Path) -> None:
    dropped: list[int] = []

    def drop(pe: int, number: int, entry: bytes) -> bytes | None:
        if pe == 1 and b"free" in entry and not dropped:
            dropped.append(number)
        return None if pe == 1 and dropped and number in (dropped[0], dropped[0] + 1) else entry

    found = replay_files(edited(files, tmp_path, drop)).difference
    assert found is not None
    assert (found.file, found.what) == (files[1].name, "number of the action")


def test_a_file_alone_compares_pages_and_pushes(files: list[Path]) -> None:
    summary = replay_files(files[:1])
    assert summary.difference is None
    assert summary.missing == [1, 2]
    assert summary.pushes
    summary = replay_files(files[1:2])
    assert summary.difference is None
    assert summary.missing == [0, 2]
    assert summary.tokens_left


def test_what_follows_from_a_file_that_ends_early_is_not_compared(files: list[Path], tmp_path: Path) -> None:
    copies = edited(files, tmp_path, lambda _pe, _number, entry: entry)
    os.truncate(copies[0], copies[0].stat().st_size // 2)
    summary = replay_files(copies)
    assert summary.difference is None
    assert summary.tokens
    assert summary.tokens_left


def test_a_record_without_prompts_has_none_and_replays_its_pages(small_model: Path, tmp_path: Path) -> None:
    _, files = record_storm(small_model, tmp_path, {"record.prompts": False}, 25)
    summary = replay_files(files)
    assert summary.difference is None
    assert not summary.prompts
    assert summary.tokens == 0
    assert summary.pushes
    assert summary.prefix_hits
    data = b"".join(path.read_bytes() for path in files)
    for begin in range(0, len(SHARED), 4):
        for dtype in (np.int64, np.int32, np.uint16):
            assert np.array(SHARED[begin : begin + 4], dtype).tobytes() not in data


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("config.threads", 10**9, "island.threads_per_worker is 1000000000; it must be less than or equal to 1024"),
        ("config.threads", 0, "island.threads_per_worker is 0; it must be greater than or equal to 1"),
        ("config.workers_on_host", 0, "workers_on_host 0; it must be at least 1"),
        ("config.decode_workers", 0, "island.num_decode is 0; it must be greater than or equal to 1"),
        ("config.max_sequences", 1 << 40, "scheduler.max_sequences is 1099511627776; it must be less than or equal to"),
        ("config.max_model_len", 0, "model.max_model_len is 0; it must be greater than or equal to 1"),
        ("config.rank", 1, "rank 1; it must be 0"),
        ("config.ranks", [1, 2], "ranks (1, 2); it must have none, or a number of 1 to 64 for each of 3 PEs"),
        ("config.ranks", [1, 65, 1], "ranks (1, 65, 1); it must have none, or a number of 1 to 64"),
        ("config.ranks", [3, 3, 3], "num_heads is 4; it must be a multiple of the 3 ranks"),
        ("config.page_size", 7, "cache.page_size is 7; it must be 8, 16, 32, 64 or 128"),
        ("config.speculation.tokens", 99, "speculation.tokens is 99; it must be less than or equal to 16"),
        ("num_pages", 10**12, "cache.num_pages is 1000000000000; it must be less than or equal to 16777216"),
        ("config.lease_seconds", "long", "lease_seconds is 'long'; it must be float"),
    ],
)
def test_a_forged_header_is_refused_with_what_is_accepted(
    files: list[Path], tmp_path: Path, field: str, value: object, error: str
) -> None:
    with pytest.raises(RecordError, match=re.escape(error)):
        replay_files([forged(files[1], tmp_path, field, value)])


def test_no_value_of_a_header_makes_a_replay_crash(files: list[Path], tmp_path: Path) -> None:
    """A value that is not refused is replayed."""
    header = json.loads(files[2].read_bytes().split(b"\n", 2)[1].rpartition(b" ")[0])
    config = header["config"]
    fields = [*header, *(f"config.{name}" for name in config)]
    fields += [f"config.speculation.{name}" for name in config["speculation"]]
    refused = 0
    for field in fields:
        for value in (-1, 0, 1, 1 << 31, 1 << 63, 10**400, 1.5, math.nan, math.inf, "x", "\ud800", None, True, [], {}):
            try:
                replay_files([forged(files[2], tmp_path, field, value)], until=0)
            except (RecordError, ModelError):
                refused += 1
    assert refused > 7 * len(fields)


def test_the_command_says_what_it_compared(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    status, output, _ = run(*map(str, files))
    assert (status, output.splitlines()[-1]) == (0, "equal")
    _, output, _ = run(*map(str, files), "--json", "--until", "50")
    assert json.loads(output)["actions"] == 50
    _, output, _ = run(*map(str, files), "--steps", "3..5")
    assert [line.split()[0] for line in output.splitlines()[:3]] == ["3", "4", "5"]
    (changed,) = edited(files[:1], tmp_path, lambda _, number, entry: None if number == 4 else entry)
    status, output, _ = run(str(changed))
    assert status == 1
    assert "first difference: " in output
    bad = tmp_path / "bad.tandemrec"
    bad.write_text("something else")
    huge = forged(files[0], tmp_path, "num_pages", 10**12)
    other = forged(files[2], tmp_path, "config.island", "another")
    refused = [[str(bad)], [str(files[0]), str(files[0])], [str(huge)], [str(other), str(files[1])]]
    for arguments in (*refused, [str(files[0]), "--steps", "x"]):
        status, _, errors = run(*arguments)
        assert status == 2
        assert errors.startswith("tandem: ")
