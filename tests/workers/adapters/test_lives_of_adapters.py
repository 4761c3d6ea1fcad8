"""Adapters that come and go while their requests run, and prefixes that never cross from one to another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tandem.proto import worker_pb2
from tandem.workers.config import AdapterSettings
from tests.support.adapter_workers import EPOCH, TOKENS, Workers, expected, serving
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle, random_prompt
from tests.support.prompt_specs import prompt_message

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT = random_prompt(37, 5)
MATCHED = 32  # of its tokens: whole pages, before the last token


class Made(NamedTuple):
    """A model, its adapters, and the tokens that follow PROMPT, as many as any test needs."""

    model: Path
    oracle: Any
    folders: list[Path]
    tokens: list[list[int]]  # of each adapter, and of the base


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("adapters")
    model = save_checkpoint("llama", root / "model")
    oracle = load_oracle(model)
    folders = [save_adapter(oracle, root / str(seed), ATTENTION, seed=seed) for seed in range(3)]
    tokens = [expected(oracle, one, PROMPT, 2 * TOKENS) for one in (*folders, None)]
    assert len({tuple(one[:TOKENS]) for one in tokens}) == 4
    return Made(model, oracle, folders, tokens)


@pytest.fixture
def workers(made: Made) -> Iterator[Workers]:
    with serving(made.model, AdapterSettings(2, 4), {"scheduler.max_batch_tokens": 64}) as workers:
        yield workers


def refused(call: Any, *arguments: Any, **named: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **named)
    return caught.value.code()


def test_prefixes_are_shared_within_an_adapter_alone(made: Made, workers: Workers) -> None:
    digests = [*(workers.load(one.name, one) for one in made.folders[:2]), b""]
    for turn, matched in enumerate((0, MATCHED)):
        for index, digest in enumerate(digests):
            request = f"r{turn}{index}"
            reservation = workers.prepare(request, PROMPT, digest)
            sent = workers.send(request, PROMPT, digest, reservation, TOKENS)
            rest = [token for one in workers.start(request, reservation) for token in one.token_ids]
            assert [sent.first_token, *rest] == made.tokens[index if digest else -1][:TOKENS]
            assert (reservation.matched_tokens, sent.cached_tokens) == (matched, matched)


def test_running_requests_outlive_their_adapter(made: Made, workers: Workers) -> None:
    digest = workers.load("a", made.folders[0])
    reservation = workers.prepare("r", PROMPT, digest, 2 * TOKENS)
    first = workers.send("r", PROMPT, digest, reservation, 2 * TOKENS).first_token
    workers.remove(digest)
    assert [(one.removed, one.sequences) for one in workers.info(workers.decode).adapters] == [(True, 1)]
    assert not workers.info(workers.prefill).adapters  # whose sequence has ended
    assert refused(workers.prepare, "other", PROMPT, digest) == grpc.StatusCode.NOT_FOUND
    rest = [token for one in workers.start("r", reservation, 2 * TOKENS) for token in one.token_ids]
    assert [first, *rest] == made.tokens[0]
    assert not workers.info(workers.decode).adapters
    other = workers.load("a", made.folders[1])
    assert other != digest
    assert refused(workers.prepare, "replay", [*PROMPT, first], digest) == grpc.StatusCode.NOT_FOUND
    assert workers.generate("r2", PROMPT, other) == made.tokens[1][:TOKENS]


def test_an_adapter_waits_for_a_slot(made: Made, workers: Workers) -> None:
    digests = [workers.load(one.name, one) for one in made.folders]
    held = [workers.prepare(f"r{index}", PROMPT, digest) for index, digest in enumerate(digests[:2])]
    assert refused(workers.prepare, "r2", PROMPT, digests[2]) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert workers.prepare("base", PROMPT, b"").pages == held[0].pages
    workers.decode.Abort(worker_pb2.AbortRequest(request_id="r0", epoch=EPOCH, writer_quiet=True), timeout=10)
    assert workers.generate("r3", PROMPT, digests[2]) == made.tokens[2][:TOKENS]
    info = workers.info(workers.decode)
    assert [one.resident for one in info.adapters] == [False, True, True]
    for request in ("r1", "base"):
        workers.decode.Abort(worker_pb2.AbortRequest(request_id=request, epoch=EPOCH, writer_quiet=True), timeout=10)


def test_a_request_goes_on_elsewhere_and_forks(made: Made, workers: Workers) -> None:
    """A placement that begins with output of an earlier one, and one that begins with a running request."""
    digest, wanted = workers.load("a", made.folders[0]), made.tokens[0]
    assert workers.generate("r", PROMPT, digest) == wanted[:TOKENS]
    further = [*PROMPT, *wanted[:TOKENS]]
    assert workers.generate("r#2", further, digest) == wanted[TOKENS:]
    reservation = workers.prepare("f", PROMPT, digest, 2 * TOKENS)
    first = workers.send("f", PROMPT, digest, reservation, 2 * TOKENS).first_token
    sibling = workers.prepare("g", PROMPT, digest, TOKENS, fork_of="f")
    assert sibling.matched_tokens >= MATCHED
    assert workers.send("g", PROMPT, digest, sibling, TOKENS).first_token == first
    for request, one, count in (("f", reservation, 2 * TOKENS), ("g", sibling, TOKENS)):
        rest = [token for message in workers.start(request, one, count) for token in message.token_ids]
        assert [first, *rest] == wanted[:count]


def test_a_worker_computes_the_prompts_that_it_decodes(made: Made, workers: Workers) -> None:
    digest = workers.load("a", made.folders[1])
    reservation = workers.prepare("r", PROMPT, digest, writer_pe=1)
    assert not reservation.HasField("position_map")
    found = [token for one in workers.start("r", reservation) for token in one.token_ids]
    assert found == made.tokens[1][:TOKENS]


def test_a_speculative_prompt_has_its_adapter(made: Made, workers: Workers) -> None:
    digest = workers.load("a", made.folders[2])
    message = prompt_message(PROMPT, adapter=digest)
    unheld = prompt_message(PROMPT, adapter=bytes(16))
    announced = [
        worker_pb2.AnnounceRequest(request_id=name, epoch=EPOCH, prompt=one)
        for name, one in (("x", unheld), ("r", message))
    ]
    firsts = workers.prefill.Announce(iter(announced), timeout=20)
    firsts.initial_metadata()
    while not workers.info(workers.prefill).counters.prompt_tokens:
        pass
    reservation = workers.prepare("r", PROMPT, digest)
    sent = workers.send("r", PROMPT, digest, reservation, TOKENS)
    rest = [token for one in workers.start("r", reservation) for token in one.token_ids]
    assert [sent.first_token, *rest] == made.tokens[2][:TOKENS]
    assert workers.info(workers.prefill).counters.prompt_tokens == len(PROMPT)
    firsts.cancel()


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(made: Made, workers: Workers, tmp_path: Path) -> None:
    def load(**fields: Any) -> worker_pb2.LoadedAdapter:
        return workers.decode.LoadAdapter(worker_pb2.LoadAdapterRequest(epoch=EPOCH, **fields), timeout=30)

    folder = str(made.folders[0])
    for fields in ({"name": "a", "path": str(tmp_path)}, {"name": "a", "path": folder, "digest": bytes(16)},
                   {"name": "", "path": folder}, {"name": "a", "path": folder, "digest": b"x"}):  # fmt: skip
        assert refused(load, **fields) == grpc.StatusCode.INVALID_ARGUMENT
    assert not workers.info(workers.decode).adapters
    loaded = load(name="a", path=folder)
    assert load(name="b", path=folder, digest=loaded.digest) == loaded
    assert [one.name for one in workers.info(workers.decode).adapters] == ["b"]
    remove = worker_pb2.RemoveAdapterRequest(epoch=EPOCH, digest=bytes(16))
    assert not workers.decode.RemoveAdapter(remove, timeout=10).known


def test_host_memory_is_bounded(made: Made) -> None:
    with serving(made.model, AdapterSettings(1, 4)) as workers:
        size = workers.prefill.LoadAdapter(
            worker_pb2.LoadAdapterRequest(epoch=EPOCH, name="a", path=str(made.folders[0])), timeout=30
        ).bytes
    with serving(made.model, AdapterSettings(1, 4, 2 * size)) as workers:
        digests = [workers.load(str(index), made.folders[index]) for index in (0, 1)]
        third = worker_pb2.LoadAdapterRequest(epoch=EPOCH, name="c", path=str(made.folders[2]))
        assert refused(workers.decode.LoadAdapter, third, timeout=30) == grpc.StatusCode.RESOURCE_EXHAUSTED
        again = {"name": "1", "path": str(made.folders[1]), "digest": digests[1]}  # a gateway that starts asks for all
        for stub in (workers.prefill, workers.decode):
            held = stub.LoadAdapter(worker_pb2.LoadAdapterRequest(epoch=EPOCH, **again), timeout=30)
            assert held.digest == digests[1]
        for turn in range(6):  # in turn: neither worker runs out of memory for them
            workers.remove(digests.pop(0))
            digests.append(workers.load(str(turn), made.folders[turn % 3 - 1]))
        assert workers.generate("r", PROMPT, digests[-1]) == made.tokens[1][:TOKENS]


def test_drafts_are_verified_with_the_adapter(made: Made) -> None:
    """The prompt repeats what follows it, so that drafts hold."""
    repeated = [*PROMPT, *made.tokens[0], *PROMPT]
    wanted = expected(made.oracle, made.folders[0], repeated, 16)
    with serving(made.model, AdapterSettings(2, 4), {"speculation.method": "ngram"}) as workers:
        digest = workers.load("a", made.folders[0])
        reservation = workers.prepare("r", repeated, digest, 16)
        first = workers.send("r", repeated, digest, reservation, 16).first_token
        messages = list(workers.start("r", reservation, 16))
    assert [first, *(token for one in messages for token in one.token_ids)] == wanted
    assert messages[-1].decoded.drafted_tokens


def test_the_watch_tells_of_adapters(made: Made, workers: Workers) -> None:
    """Also of an idle worker."""
    watch = workers.decode.Watch(worker_pb2.WatchRequest(epoch=EPOCH), timeout=20)
    assert not next(watch).adapters
    digest = workers.load("a", made.folders[0])
    loaded = next(watch)
    assert (loaded.adapters, loaded.resident_adapters) == (digest, b"")
    workers.generate("r", PROMPT, digest)
    while (report := next(watch)).resident_adapters != digest:
        pass
    workers.remove(digest)
    while (report := next(watch)).adapters:
        pass
    assert not report.resident_adapters
    watch.cancel()
