"""LoRA adapters through the gateway's doors: tokens equal PEFT's, whatever else runs."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.errors import AdapterRefused, InvalidRequest, UnknownModel
from tests.support.adapters import merged, save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.http_client import COMPLETIONS, answer, get, post, refused
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.steady_steps import steady_here
from tests.support.waiting import until

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = ("a", "b", "c")
PROMPT, OUTPUT = random_prompt(37, 5), 8


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, three adapters of it, and their tokens by PEFT."""

    model: Path
    root: Path
    oracle: Any

    def folder(self, name: str) -> Path:
        return self.root / name

    def greedy(self, name: str | None, prompt: Sequence[int] = PROMPT, tokens: int = OUTPUT) -> list[int]:
        """Generates greedily. name None: the model itself."""
        with merged(self.oracle, None if name is None else self.folder(name)) as one:
            return greedy(one, prompt, tokens)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"adapters.max_resident": 2, "adapters.max_rank": 8, "adapters.allowed_root": str(self.root)} | more


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp("adapted")
    model = save_checkpoint("qwen3", root / "model")
    oracle = load_oracle(model)
    for seed, name in enumerate(NAMES, 1):
        save_adapter(oracle, root / "adapters" / name, ALL, rank=4, seed=seed)
    one = Adapted(model, root / "adapters", oracle)
    assert len({tuple(one.greedy(name)) for name in (*NAMES, None)}) == 4
    return one


def folders(adapted: Adapted, *names: str) -> dict[str, Any]:
    return {"adapters.folders": {name: str(adapted.folder(name)) for name in names}}


@pytest.fixture(scope="module")
def island(adapted: Adapted) -> Iterator[Island]:
    """All three are loaded from the start; two at a time are on a device."""
    with running_island(adapted.model, adapted.settings(**folders(adapted, *NAMES)) | {"gateway.http_port": 0}) as one:
        yield one


def over_http(island: Island, name: str | None, prompt: Sequence[int] = PROMPT) -> list[int]:
    model = island.gateway._names.model[0] if name is None else name
    body = {"prompt": list(prompt), "max_tokens": OUTPUT, "return_token_ids": True, **GREEDY}
    said = answer(island.http, COMPLETIONS, model=model, **body)
    assert said["model"] == model
    return said["choices"][0]["token_ids"]


def over_grpc(island: Island, name: str | None, prompt: Sequence[int] = PROMPT, **more: Any) -> list[GenerateUpdate]:
    picked = {} if name is None else {"model": name}
    return complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY, **picked, **more)


def test_three_adapters_and_the_model_at_once(island: Island, adapted: Adapted) -> None:
    asked = [*NAMES, None] * 3
    with ThreadPoolExecutor(len(asked)) as pool:
        by_http = list(pool.map(partial(over_http, island), asked))
        by_grpc = [tokens_of(one) for one in pool.map(partial(over_grpc, island), asked)]
    expected = [adapted.greedy(name) for name in asked]
    assert by_http == expected
    assert by_grpc == expected


def test_prefixes_are_shared_within_an_adapter_only(island: Island, adapted: Adapted) -> None:
    prompt = random_prompt(40, 77)
    hits = []
    for name in ("a", "b", None, "a", "b", None):
        updates = over_grpc(island, name, prompt)
        assert tokens_of(updates) == adapted.greedy(name, prompt)
        usage = updates[-1].usage
        assert usage is not None
        hits.append(usage.cached_tokens > 0)
    assert hits == [False, False, False, True, True, True]


def test_several_answers(island: Island, adapted: Adapted) -> None:
    updates = over_grpc(island, "b", n=3)
    for index in range(3):
        assert tokens_of([one for one in updates if one.index == index]) == adapted.greedy("b")


def test_models_and_the_cluster_tell_of_them(island: Island, adapted: Adapted) -> None:
    own, *cards = get(island.http, "/v1/models").json()["data"]
    assert {card["id"]: (card["parent"], card["root"]) for card in cards} == {
        name: (own["id"], str(adapted.folder(name))) for name in NAMES
    }
    with island.client() as client:
        with pytest.raises(AdapterRefused, match="'b' has already been loaded"):  # which workers have taken for a name
            client.add_adapter("b", str(adapted.folder("a")))
        listed = {one.name: one for one in client.adapters().adapters}
        assert {name: (one.workers, one.holding) for name, one in listed.items()} == dict.fromkeys(NAMES, (2, 2))
        for worker in client.cluster_info().islands[0].workers:
            assert {one.name: one.digest for one in worker.adapters} == {name: listed[name].digest for name in NAMES}
        over_grpc(island, "a")
        samples = Samples(client.metrics().text)
    assert samples.total("tandem:answered_requests_total", by="adapter") > 0
    assert samples.total("tandem:adapter_sequences", adapter="a") == 0
    assert samples.total("tandem:worker_adapters", pe="0") == len(NAMES)
    assert samples.total("tandem:worker_adapter_bytes", pe="1") > 0


def test_others_pass_a_request_that_waits_for_a_slot(adapted: Adapted) -> None:
    """Streams of two adapters hold both slots, and the third adapter waits: the model's requests and theirs go on."""
    passing = [(name, adapted.greedy(name)) for name in (None, "a", None, "b")]
    settings = adapted.settings(**folders(adapted, *NAMES))
    with (
        steady_here(0.01),  # so that the streams last
        ThreadPoolExecutor(1) as pool,
        running_island(adapted.model, settings) as island,
        island.client() as client,
    ):
        streams = [client.generate(PROMPT, max_tokens=200, model=name, **GREEDY) for name in ("a", "b")]
        for stream in streams:
            next(stream)
        waiting = pool.submit(over_grpc, island, "c")
        until(lambda: client.cluster_info().queued == 1)
        for name, tokens in passing:
            assert tokens_of(over_grpc(island, name)) == tokens
        assert client.cluster_info().queued == 1
        for stream in streams:
            stream.close()
        assert tokens_of(waiting.result(30)) == adapted.greedy("c")


def test_idle_workers_report_what_they_hold(island: Island, adapted: Adapted) -> None:
    """So gateway processes that have not asked for it know it."""

    def reported(digest: bytes) -> list[bool]:
        links = island.gateway._islands.links().values()
        return [digest in {link.report.adapters[at : at + 16] for at in range(0, 64, 16)} for link in links]

    with island.client() as client:
        digest = client.remove_adapter("c").digest
        until(lambda: reported(digest) == [False] * 2)
        client.add_adapter("c", str(adapted.folder("c")))
        until(lambda: reported(digest) == [True] * 2)


@pytest.mark.long
def test_added_and_removed_beside_streams(adapted: Adapted) -> None:
    length = 60
    with running_island(adapted.model, adapted.settings()) as island, island.client() as client:
        before = client.generate(PROMPT, max_tokens=length, **GREEDY)
        begun = [*next(before).token_ids]
        client.add_adapter("a", str(adapted.folder("a")))
        with pytest.raises(AdapterRefused, match="has already been loaded"):
            client.add_adapter("a", str(adapted.folder("b")))
        running = client.generate(PROMPT, max_tokens=length, model="a", **GREEDY)
        adapter_begun = [*next(running).token_ids]
        client.remove_adapter("a")
        with pytest.raises(UnknownModel):
            over_grpc(island, "a")
        client.add_adapter("a", str(adapted.folder("b")))
        assert tokens_of(over_grpc(island, "a")) == adapted.greedy("b")
        assert adapter_begun + tokens_of(list(running)) == adapted.greedy("a", tokens=length)
        assert begun + tokens_of(list(before)) == adapted.greedy(None, tokens=length)
        client.add_adapter("a", str(adapted.folder("c")), load_inplace=True)
        assert tokens_of(over_grpc(island, "a")) == adapted.greedy("c")
        until(lambda: all(len(one.adapters) == 1 for one in client.cluster_info().islands[0].workers))


@pytest.mark.long
def test_a_bad_folder_leaves_nothing_behind(adapted: Adapted) -> None:
    other = save_adapter(adapted.oracle, adapted.root / "large", ALL, rank=16)
    broken = save_adapter(adapted.oracle, adapted.root / "broken", ALL, rank=4)
    (broken / "adapter_model.safetensors").write_bytes(b"12345678")
    with running_island(adapted.model, adapted.settings() | {"gateway.http_port": 0}) as island:
        for folder, message in ((other, "adapters.max_rank"), (broken, "adapter_model.safetensors")):
            with island.client() as client, pytest.raises(InvalidRequest, match=message):
                client.add_adapter("x", str(folder))
            body = {"lora_name": "x", "lora_path": str(folder)}
            assert message in refused(post(island.http, "/v1/load_lora_adapter", body), 400)["message"]
        with island.client() as client:
            assert not client.adapters().adapters
            assert not any(one.adapters for one in client.cluster_info().islands[0].workers)
        assert tokens_of(over_grpc(island, None)) == adapted.greedy(None)


@pytest.mark.long
def test_moves_keep_the_adapter(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    move_back_and_forth(2, monkeypatch)
    length = 40
    settings = adapted.settings(**folders(adapted, *NAMES)) | {"scheduler.roles": "adaptive"}
    with running_island(adapted.model, settings) as island, ThreadPoolExecutor(4) as pool:
        asked = [*NAMES, None]
        picked: list[dict[str, Any]] = [{} if name is None else {"model": name} for name in asked]
        streams = [pool.submit(complete, island.address, PROMPT, max_tokens=length, **GREEDY, **one) for one in picked]
        for name, stream in zip(asked, streams, strict=True):
            assert tokens_of(stream.result()) == adapted.greedy(name, tokens=length)


@pytest.mark.long
def test_two_hundred_in_turn_leave_no_memory_behind(adapted: Adapted, tmp_path: Path) -> None:
    settings = adapted.settings() | {"adapters.host_bytes": 1 << 20, "adapters.allowed_root": str(tmp_path)}
    with running_island(adapted.model, settings) as island, island.client() as client:
        held: list[int] = []
        for number in range(200):
            folder = save_adapter(adapted.oracle, tmp_path / f"{number}", ALL, rank=4, seed=number)
            client.add_adapter("turn", str(folder), load_inplace=True)
            tokens = tokens_of(over_grpc(island, "turn"))
            if number % 20 == 0:
                with merged(adapted.oracle, folder) as one:
                    assert tokens == greedy(one, PROMPT, OUTPUT)
            held += [sum(one.bytes for one in worker.adapters) for worker in client.cluster_info().islands[0].workers]
        assert max(held) <= 1 << 20
        until(lambda: all(len(one.adapters) == 1 for one in client.cluster_info().islands[0].workers))


@pytest.mark.long
@pytest.mark.parametrize("case", ["llama", "gemma3", "mixtral"])
def test_of_other_families(case: str, tmp_path: Path) -> None:
    model = save_checkpoint(case, tmp_path / "model")
    oracle = load_oracle(model)
    targets = ALL[:4] if case == "mixtral" else ALL
    one = Adapted(model, tmp_path / "adapters", oracle)
    save_adapter(oracle, one.folder("a"), targets, rank=4, seed=9)
    settings = one.settings(**folders(one, "a")) | {"island.num_prefill": 2, "island.num_decode": 2}
    with running_island(model, settings) as island:
        for _ in range(3):
            assert tokens_of(over_grpc(island, "a")) == one.greedy("a")
            assert tokens_of(over_grpc(island, None)) == one.greedy(None)
