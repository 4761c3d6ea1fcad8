"""Tests what `tandem bench serve` sends: the same for the same seed, with the statistics that were asked for."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cluster.errors import UsageError
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.mixes import MIXES
from tandem.cluster.tools.bench.sessions import LOWEST_TOKEN, Session
from tandem.cluster.tools.bench.workload import Workload

COUNT = 4000


def workload(**options: Any) -> Workload:
    given: dict[str, Any] = {"prompts": Lengths.uniform(4, 12), "outputs": Lengths.uniform(2, 6), "vocab_size": 500}
    return Workload(**(given | options))


def tokens(session: Session) -> list[list[int]]:
    return [[token for message in turn.messages for token in message.token_ids] for turn in session]


def sessions(given: Workload, count: int, load: int = 0) -> list[Session]:
    made = given.sessions(load)
    return [made.session(index) for index in range(count)]


@pytest.mark.parametrize("mix", ["A", "A2", "B", "C"])
def test_lengths_of_the_mixes(mix: str) -> None:
    lengths = MIXES[mix].prompts
    generator = np.random.default_rng(1)
    drawn = np.array([lengths.sample(generator) for _ in range(COUNT)])
    assert lengths.low <= drawn.min() <= drawn.max() <= lengths.high
    if lengths.sigma is None:
        assert drawn.mean() == pytest.approx((lengths.low + lengths.high) / 2, rel=0.03)
    else:
        assert np.median(drawn) == pytest.approx(lengths.median, rel=0.05)
        below = drawn[drawn < lengths.high]
        assert np.log(below).std() == pytest.approx(lengths.sigma, rel=0.05)
    outputs = [MIXES[mix].outputs.sample(generator) for _ in range(COUNT)]
    assert (min(outputs), max(outputs)) == (128, 384)


def test_either_draws_two_lengths_by_its_share() -> None:
    lengths, generator = MIXES["mixed"].prompts, np.random.default_rng(1)
    drawn = np.array([lengths.sample(generator) for _ in range(COUNT)])
    assert set(drawn) == {128, 12288}
    assert (drawn == 12288).mean() == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("text", ["either:128:12288:0.05", "fixed:7", "uniform:3:9", "lognormal:800:0.8:8192"])
def test_lengths_are_read_and_shown_alike(text: str) -> None:
    assert str(Lengths.parse("--prompt-tokens", text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "fixed:0",
        "uniform:9:3",
        "uniform:1",
        "lognormal:9:1:3",
        "fixed:x",
        "fixed:nan",
        "either:1:2",
        "either:1:2:1.5",
    ],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--prompt-tokens is .*uniform:LOW:HIGH"):
        Lengths.parse("--prompt-tokens", text)


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_arrivals_have_the_rate_and_the_bursts_asked_for(burstiness: float, spread: float) -> None:
    times = workload().sessions(0).arrivals((COUNT,), 50.0, burstiness)
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(COUNT / 50)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1, abs=1e-9)


def test_each_part_of_a_load_has_the_rate() -> None:
    times = workload().sessions(0).arrivals((30, 0, 50, 20), 10.0, 0.5)
    assert len(times) == 100
    assert times[[29, 79, 99]] == pytest.approx([3.0, 8.0, 10.0])


def test_a_seed_decides_everything_and_loads_share_nothing() -> None:
    first, again = sessions(workload(seed=7), 50), sessions(workload(seed=7), 50)
    assert first == again
    assert first != sessions(workload(seed=8), 50)
    prompts = {tuple(tokens(session)[0]) for load in range(3) for session in sessions(workload(seed=7), 50, load)}
    assert len(prompts) == 150
    assert all(LOWEST_TOKEN <= token < 500 for prompt in prompts for token in prompt)
    assert workload().sessions(0).arrivals((9,), 1.0, 1.0)[0] != workload().sessions(1).arrivals((9,), 1.0, 1.0)[0]


def test_prefixes_are_shared_by_turns_and_by_all_loads() -> None:
    given = workload(prefix=20, prefixes=3)
    made, later = sessions(given, 9), sessions(given, 3, load=1)
    heads = [tuple(tokens(session)[0][:20]) for session in made]
    assert len(set(heads)) == 3
    assert heads[:3] == heads[3:6] == [tuple(tokens(session)[0][:20]) for session in later]
    assert [session[0].reusable for session in made] == [0, 0, 0, *[20] * 6]
    assert [session[0].reusable for session in later] == [20] * 3


def test_chats_have_turns_and_pauses() -> None:
    given = workload(prefix=20, turns=5, pause=2.0)
    made = sessions(given, 500)
    assert {len(session) for session in made} == {5}
    assert [message.role for turn in made[0] for message in turn.messages] == ["system", *["user"] * 5]
    assert all(session[0].pause == 0 for session in made)
    assert np.mean([turn.pause for session in made for turn in session[1:]]) == pytest.approx(2.0, rel=0.1)
    assert given.sessions(0).arrivals((100,), 10.0, 1.0)[-1] == pytest.approx(100 / (10 / 5))


LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 3], "kind": "x"},
    {"timestamp": 1000, "input_length": 600, "output_length": 6, "hash_ids": [0, 4]},
    {"timestamp": 4000, "input_length": 300, "output_length": 8},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def test_a_trace_in_mooncakes_format(trace: Path) -> None:
    given = workload(trace=str(trace))
    made = given.sessions(0)
    prompts = [tokens(session)[0] for session in sessions(given, 4)]
    assert [len(prompt) for prompt in prompts] == [1100, 600, 1030, 300]
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0][:1024] == prompts[2][:1024]
    assert prompts[0][1024:1030] != prompts[2][1024:]
    assert prompts[0][512:600] != prompts[1][512:]
    assert prompts[3] != prompts[0][:300]
    assert [made.session(index)[0].output_tokens for index in range(4)] == [5, 6, 7, 8]
    assert [made.session(index)[0].reusable for index in range(4)] == [0, 512, 1024, 0]
    assert made.arrivals((4,), None, 1.0).tolist() == [0, 1, 3, 4]
    assert made.arrivals((1, 3), 3.0, 1.0).tolist() == [0, 0.25, 0.75, 1.0]
    assert given.num_sessions == 4


def test_requests_of_a_trace_that_the_server_cannot_take_are_left_out(trace: Path) -> None:
    given = workload(trace=str(trace), most_tokens=1040)
    assert (given.num_sessions, given.left_out, given.longest_output) == (3, 1, 8)
    with pytest.raises(UsageError, match="has 4 requests, none within 10 tokens"):
        workload(trace=str(trace), most_tokens=10).check()


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("{", "line 2: .*JSON"),
        ('{"timestamp": 1}', "line 2: input_length"),
        ('{"timestamp": -1, "input_length": 4, "output_length": 4}', "line 2: timestamp is -1"),
        ('{"timestamp": 1, "input_length": 512, "output_length": 4, "hash_ids": [1, 2]}', "2 blocks; input_length 512"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, finding: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=finding):
        workload(trace=str(path)).check()


def test_a_workload_beyond_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"may have 116 tokens \(4 turns.*the server takes 100"):
        workload(prefix=44, turns=4, most_tokens=100).check()
    workload(prefix=44, turns=4, most_tokens=116).check()
