"""Files of records: cut ones are read up to their end, and others are refused by what is wrong with them."""

import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tandem.cache.operations.holdings import PageCounts
from tandem.workers.config import RecordSettings, Role, SpeculationSettings, WorkerConfig
from tandem.workers.errors import RankLost
from tandem.workers.replay.codec import Decoder
from tandem.workers.replay.errors import BadRecord, RecordError
from tandem.workers.replay.record_file import FRAME, Header, RecordReader, RecordWriter
from tandem.workers.replay.recorder import END_BYTES, Recorder, begin_record
from tandem.workers.replay.value_types import RANK_LOST, schema, value_types

ENGINE: Any = SimpleNamespace(pages=PageCounts(9, 8, 1, 0))
ENTRIES = [b"one", b"two" * 10, b"three" * 100]


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    (tmp_path / "config.json").write_text("{}")
    return WorkerConfig(
        Role.DECODE,
        "here",
        epoch=3,
        pe=1,
        num_pes=2,
        model_path=str(tmp_path),
        max_model_len=64,
        token="top-secret",
        speculation=SpeculationSettings("ngram", 3, 32, 3),
        record=RecordSettings(str(tmp_path / "records")),
    )


@pytest.fixture
def written(config: WorkerConfig, tmp_path: Path) -> Path:
    writer = RecordWriter(tmp_path / "records", "w", Header.of(config, 40, 7, schema()), 1 << 20)
    for number, entry in enumerate(ENTRIES):
        writer.write(entry, number)
    writer.close()
    return writer.path


def test_header_and_entries_come_back(written: Path, config: WorkerConfig) -> None:
    reader = RecordReader(written)
    header = reader.header
    assert (header.config.island, header.config.epoch, header.config.pe) == ("here", 3, 1)
    assert header.config.speculation == config.speculation
    assert (header.num_pages, header.layout, header.prompts) == (40, 7, False)
    assert list(reader.entries()) == list(enumerate(ENTRIES))
    assert not reader.cut


def test_only_its_owner_may_read_it_and_it_has_no_secret(written: Path) -> None:
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert b"top-secret" not in written.read_bytes()


def test_a_second_record_of_a_name_gets_a_number(written: Path, config: WorkerConfig) -> None:
    again = RecordWriter(written.parent, "w", Header.of(config, 40, 7, schema()), 1 << 20)
    assert again.path.name == "w-2.tandemrec"
    again.close()


def test_a_cut_file_is_read_up_to_its_end(written: Path) -> None:
    whole, tail = written.read_bytes(), FRAME.size + len(ENTRIES[-1])
    for missing in (1, len(ENTRIES[-1]), len(ENTRIES[-1]) + 3, tail):
        written.write_bytes(whole[:-missing])
        reader = RecordReader(written)
        assert [entry for _, entry in reader.entries()] == ENTRIES[:2]
        assert reader.cut == (missing < tail)


def test_a_changed_entry_is_refused(written: Path) -> None:
    data = written.read_bytes()
    written.write_bytes(data.replace(b"twotwo", b"twoTwo"))
    with pytest.raises(BadRecord, match="is not as it was written"):
        list(RecordReader(written).entries())


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b"TANDEMREC 1\n", b"TANDEMREC 2\n", "of version 2; 1 is understood"),
        (b"TANDEMREC 1\n", b"PK\x03\x04 what\n", "a record begins with TANDEMREC"),
        (b'{"config"', b'["config"', "header cannot be read"),
        (b'"role": "decode"', b'"role": "cook"', "header cannot be read"),
        (b'"num_pages"', b'"many_pages"', "header cannot be read"),
        (b'"num_pages": 40', b'"num_pages": "40"', "header's num_pages is '40'; it must be int"),
        (b'"threads": null', b'"threads": 1.5', r"header's threads is 1\.5; it must be int or null"),
        (b'"epoch": 3', b'"epoch": -3', "header's epoch is -3; it must be at least 0"),
        (b'"began": ', b'"began": 9999999999', "header's began is 9999999999[0-9]+; it must be at least 0 and have at"),
        (b'"silent_seconds": 0.0', b'"silent_seconds": NaN', "header's silent_seconds is nan; it must be at least 0"),
        (b'"tokens": 3', b'"tokens": true', "header's tokens is True; it must be int"),
        (b'"run": "', b'"run": 1, "ran": "', "header cannot be read"),
        (b'"num_pes": 2', b'"num_pes": 1', "header has PE 1 of 1"),
        (b'"num_pes": 2', b'"num_pes": 1000000000', "at most 4096 PEs are allowed"),
    ],
)
def test_other_files_are_refused(written: Path, old: bytes, new: bytes, error: str) -> None:
    magic, header, rest = written.read_bytes().split(b"\n", 2)
    text = header.rpartition(b" ")[0]
    assert old in magic + b"\n" + text
    magic, text = (magic + b"\n").replace(old, new), text.replace(old, new, 1)
    written.write_bytes(b"%s%s %08x\n%s" % (magic, text, crc32(text), rest))
    with pytest.raises(BadRecord, match=error):
        RecordReader(written)


def test_a_header_that_was_changed_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes().replace(b'"num_pages": 40', b'"num_pages": 41', 1))
    with pytest.raises(BadRecord, match="its header is damaged"):
        RecordReader(written)


def test_workers_of_one_start_have_one_run(written: Path) -> None:
    config = RecordReader(written).header.config
    runs = [Header.of(replace(config, token=token), 40, 7, schema()).run for token in ("a", "a", "b")]
    assert runs[0] == runs[1] != runs[2]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordError, match="pipe: cannot be read: it is no file"):
        RecordReader(tmp_path / "pipe")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nothing\.tandemrec: cannot be read"):
        RecordReader(tmp_path / "nothing.tandemrec")


def test_a_folder_that_cannot_be_made_is_named(config: WorkerConfig, tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    with pytest.raises(RecordError, match=r"record\.folder .*records: no record can be made there"):
        begin_record(config, 40, 7, 512)


def test_a_full_record_ends_and_says_so(config: WorkerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = Header.of(config, 40, 7, schema())
    most = len(header.line()) + 2000
    recorder = Recorder(RecordWriter(tmp_path / "records", "w", header, most), header.began, None)
    with caplog.at_level("INFO"):
        for number in range(100):
            assert recorder.act(ENGINE, "free", (number,), lambda _, one: one) == number
        recorder.act(ENGINE, "publish", (1, np.zeros(9000, np.int64), b""), lambda *_: None)
    recorder.close()
    (path,) = (tmp_path / "records").iterdir()
    assert most - END_BYTES - 100 < path.stat().st_size <= most  # an entry that does not fit, and the last one
    assert [record.message for record in caplog.records if "is full" in record.message]
    entries = list(RecordReader(path).entries())
    assert b"it is full" in entries[-1][1]
    assert sum(b"it is full" in entry for _, entry in entries) == 1


def test_what_cannot_be_written_ends_the_record_and_not_the_worker(
    config: WorkerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = begin_record(config, 40, 7, 512)
    assert recorder is not None
    assert recorder.act(ENGINE, "free", (object(),), lambda *_: 5) == 5
    assert recorder.act(ENGINE, "free", (1,), lambda *_: 6) == 6
    assert "ends: free: ActionEntry.arguments is a object; it must be" in caplog.text


def test_a_record_ends_within_the_action_in_which_a_rank_is_lost(config: WorkerConfig) -> None:
    """In a replay no rank is lost there."""
    recorder = begin_record(config, 40, 7, 512)
    assert recorder is not None

    def fails(*_: object) -> None:
        raise RankLost("it was killed")

    with pytest.raises(RankLost):
        recorder.act(ENGINE, "free", (1,), fails)
    (path,) = Path(config.record.folder).iterdir()  # type: ignore[union-attr]
    decoder = Decoder(value_types())
    entries = [decoder.decode(entry) for _, entry in RecordReader(path).entries()]
    assert [type(entry).__name__ for entry in entries] == ["ActionEntry", "EndEntry"]
    assert entries[1].reason == RANK_LOST


def test_a_rank_that_follows_writes_no_record(config: WorkerConfig) -> None:
    assert begin_record(replace(config, rank=1, ranks=(2, 2)), 40, 7, 512) is None


def test_an_error_of_an_action_is_noted_and_raised(config: WorkerConfig) -> None:
    recorder = begin_record(config, 40, 7, 512)
    assert recorder is not None

    def fails(*_: object) -> None:
        raise KeyError("pages")

    with pytest.raises(KeyError):
        recorder.act(ENGINE, "free", (1,), fails)
    recorder.close()
    (path,) = Path(config.record.folder).iterdir()  # type: ignore[union-attr]
    decoder = Decoder(value_types())
    entries = [decoder.decode(entry) for _, entry in RecordReader(path).entries()]
    assert [type(entry).__name__ for entry in entries] == ["ActionEntry", "ResultEntry", "EndEntry"]
    assert entries[1].raised == "KeyError"
