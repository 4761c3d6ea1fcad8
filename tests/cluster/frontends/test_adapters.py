"""LoRA adapters at a gateway's doors, whose workers say which folders they can load."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tandem.cluster.client.client import Client
from tandem.cluster.errors import AdapterRefused, DeadlineExceeded, InvalidRequest, UnknownModel
from tandem.cluster.frontends.adapters import changes
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import BODY, PROMPT, OpenGateway, open_gateway
from tests.support.client_requests import complete, tokens_of
from tests.support.http_client import CHATS, COMPLETIONS, answer, get, post, refused

RED, BLUE = b"r" * 16, b"b" * 16
TEXTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 1},
    CHATS: {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("red", "blue", "bad"):
        write_folder(tmp_path / "root" / name)
    return tmp_path / "root"


def write_folder(folder: Path, **fields: Any) -> Path:
    """Writes the files that the gateway itself looks at."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def gateway(model: Path, root: Path) -> Iterator[OpenGateway]:
    options = {"adapters.max_resident": 2, "adapters.allowed_root": str(root), "adapters.max_adapters": 2}
    with open_gateway(model, options, say=lambda _: 5) as opened:
        opened.worker.adapters |= {str(root / "red"): RED, str(root / "blue"): BLUE}
        yield opened


def load(gateway: OpenGateway, name: str, path: Path, **fields: Any) -> httpx.Response:
    return post(gateway.http, LOAD, {"lora_name": name, "lora_path": str(path), **fields})


@pytest.mark.parametrize("path", TEXTS)
def test_each_route_answers_as_the_adapter(gateway: OpenGateway, root: Path, path: str) -> None:
    response = load(gateway, "red", root / "red")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert answer(gateway.http, path, model="red", **TEXTS[path])["model"] == "red"
    assert gateway.worker.computed[-1][0] == RED
    name = gateway.gateway._names.model[0]
    assert answer(gateway.http, path, model=name, **TEXTS[path])["model"] == name
    assert gateway.worker.computed[-1][0] == b""


def test_the_access_log_has_the_adapters_name(model: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tandem")
    options = {"adapters.max_resident": 2, "adapters.allowed_root": str(root), "logging.access": True}
    with open_gateway(model, options, say=lambda _: 5) as gateway:
        gateway.worker.adapters[str(root / "red")] = RED
        load(gateway, "red", root / "red")
        for name in ("red", gateway.gateway._names.model[0]):
            answer(gateway.http, COMPLETIONS, **BODY, model=name)
        names = [record.__dict__["fields"]["model"] for record in caplog.records if record.message == "request"]
        assert names == ["red", gateway.gateway._names.model[0]]


def test_an_unknown_model_is_told_the_names(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    for path, body in TEXTS.items():
        response = post(gateway.http, path, {**body, "model": "green"})
        assert response.status_code == 404
        assert "'red' are served here" in response.text
    with (
        Client(gateway.grpc) as client,
        pytest.raises(UnknownModel, match=r"model is 'green'; .*'red' are served here"),
    ):
        list(client.generate(PROMPT, model="green"))


def test_grpc_and_the_client_pick_one(gateway: OpenGateway, root: Path) -> None:
    with Client(gateway.grpc) as client:
        added = client.add_adapter("red", str(root / "red"))
        assert (added.digest, added.rank, added.workers, added.holding) == (RED, 8, 2, 2)
        assert [one.name for one in client.adapters().adapters] == ["red"]
    assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=1, model="red")) == [5]
    assert gateway.worker.computed[-1][0] == RED


def test_models_are_listed_with_their_parent(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "org/red", root / "red")
    name = gateway.gateway._names.model[0]
    own, card = get(gateway.http, "/v1/models").json()["data"]
    assert (own["id"], own["parent"]) == (name, None)
    assert (card["id"], card["parent"], card["root"]) == ("org/red", name, str(root / "red"))
    assert get(gateway.http, "/v1/models/org/red").json() == card
    assert refused(get(gateway.http, "/v1/models/blue"), 404)["code"] == "model_not_found"


def test_a_removed_adapter_is_refused(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    response = post(gateway.http, UNLOAD, {"lora_name": "red"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'red' removed successfully.")
    assert gateway.worker.held == set()
    refused(post(gateway.http, COMPLETIONS, {**BODY, "model": "red"}), 404)
    error = refused(post(gateway.http, UNLOAD, {"lora_name": "red"}), 404)
    assert error["message"] == "the adapter 'red' cannot be found; none is loaded"


def test_a_second_addition_is_refused_unless_it_is_the_same(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    assert load(gateway, "red", root / "red").status_code == 200
    error = refused(load(gateway, "red", root / "blue"), 409)
    assert error["message"].startswith("The lora adapter 'red' has already been loaded")
    assert error["message"].endswith("the option --load-inplace.")
    assert gateway.worker.held == {RED}
    assert load(gateway, "red", root / "blue", load_inplace=True).status_code == 200
    assert gateway.worker.held == {BLUE}
    answer(gateway.http, COMPLETIONS, **BODY, model="red")
    assert gateway.worker.computed[-1][0] == BLUE


def test_weights_with_two_names_stay_while_one_is_left(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    load(gateway, "rouge", root / "red")
    post(gateway.http, UNLOAD, {"lora_name": "red"})
    assert gateway.worker.held == {RED}
    assert answer(gateway.http, COMPLETIONS, **BODY, model="rouge")["model"] == "rouge"


def test_more_than_the_configuration_has(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "a", root / "red")
    load(gateway, "b", root / "red")
    error = refused(load(gateway, "c", root / "blue"), 409)
    assert "at most 2 may be (adapters.max_adapters)" in error["message"]
    assert gateway.worker.held == {RED}


def test_one_worker_that_fails_undoes_all(gateway: OpenGateway, root: Path) -> None:
    gateway.worker.fails["LoadAdapter"] = ["go on", "RESOURCE_EXHAUSTED"]
    error = refused(load(gateway, "red", root / "red"), 409)
    assert error["message"].startswith("the adapter was not added, and no worker keeps it: ")
    assert "worker (PE " in error["message"]
    assert gateway.worker.held == set()
    refused(post(gateway.http, COMPLETIONS, {**BODY, "model": "red"}), 404)


def test_a_bad_folder_names_the_field(gateway: OpenGateway, root: Path, tmp_path: Path) -> None:
    error = refused(load(gateway, "red", root / "bad"), 400)
    assert "it holds no such adapter" in error["message"]
    error = refused(load(gateway, "red", tmp_path), 400)
    assert error["param"] == "lora_path"
    assert error["message"].endswith("or a folder of adapters.folders (adapters.allowed_root)")
    (root / "link").symlink_to(tmp_path)
    assert refused(load(gateway, "red", root / "link"), 400)["param"] == "lora_path"
    assert refused(load(gateway, "red", root / ".." / "root" / ".." / "x"), 400)["param"] == "lora_path"
    assert refused(post(gateway.http, LOAD, {"lora_name": "red", "lora_path": "red"}), 400)["param"] == "lora_path"
    assert refused(load(gateway, " red", root / "red"), 400)["param"] == "lora_name"
    assert refused(load(gateway, gateway.gateway._names.model[0], root / "red"), 400)["param"] == "lora_name"
    assert refused(post(gateway.http, LOAD, {"lora_name": "red"}), 400)["param"] == "lora_path"
    assert refused(post(gateway.http, UNLOAD, {}), 400)["param"] == "lora_name"
    assert gateway.worker.held == set()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 17}, "r is 17; it must be at most 16 (adapters.max_rank)"),
        ({"rank_pattern": {"k_proj": 32}}, "r is 32; it must be at most 16"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_no_worker_hears_of_a_folder_that_cannot_be_served(
    gateway: OpenGateway, root: Path, fields: dict[str, Any], message: str
) -> None:
    folder = write_folder(root / "other", **fields)
    gateway.worker.adapters[str(folder)] = b"o" * 16
    assert message in refused(load(gateway, "other", folder), 400)["message"]
    (folder / "adapter_config.json").write_bytes(b"\xff{")
    assert "adapter_config.json" in refused(load(gateway, "other", folder), 400)["message"]
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    assert "adapter_config.json" in refused(load(gateway, "other", folder), 400)["message"]
    (folder / "adapter_config.json").rmdir()
    assert "adapter_config.json" in refused(load(gateway, "other", folder), 400)["message"]
    assert gateway.worker.held == set()


def test_workers_that_come_later_get_all(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    gateway.worker.held.clear()  # with its process
    state = gateway.worker.state("i", epoch=2, version=2)
    gateway.events.run(gateway.gateway.update_island(state), timeout=10)
    assert gateway.worker.held == {RED}
    answer(gateway.http, COMPLETIONS, **BODY, model="red")


def test_a_worker_that_lost_it_gets_no_request_until_it_is_back(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    gateway.worker.held.clear()
    answer(gateway.http, COMPLETIONS, **BODY, model="red")  # once the gateway has brought it again
    assert gateway.worker.held == {RED}


def test_a_prefill_worker_that_lost_it_costs_an_attempt(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")
    gateway.worker.fails["RemoteSend"] = ["NOT_FOUND"]
    updates = complete(gateway.grpc, PROMPT, max_tokens=1, model="red")
    assert tokens_of(updates) == [5]
    assert updates[-1].timings is not None
    assert updates[-1].timings.attempts == 2


def test_no_more_changes_wait_than_are_carried_out_in_time(
    gateway: OpenGateway, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MOST_WAITING", 1)
    gateway.worker.fails["LoadAdapter"] = ["hang", "hang"]
    with Client(gateway.grpc) as client, pytest.raises(DeadlineExceeded):
        client.add_adapter("red", str(root / "red"), timeout=0.5)  # goes on without its caller
    assert "retry-after" in post(gateway.http, UNLOAD, {"lora_name": "red"}).headers


def test_callers_without_the_token_change_nothing(model: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    options = {"adapters.max_resident": 2, "adapters.allowed_root": str(root)}
    with open_gateway(model, options | {"security.token_file": str(tmp_path / "token")}) as gateway:
        refused(load(gateway, "red", root / "red"), 401)
        refused(post(gateway.http, UNLOAD, {"lora_name": "red"}), 401)
        assert gateway.worker.held == set()


def test_without_the_setting_none_is_added(model: Path, root: Path) -> None:
    with open_gateway(model) as gateway:
        error = refused(load(gateway, "red", root / "red"), 400)
        assert error["message"].startswith("adapters.max_resident is 0")
        with Client(gateway.grpc) as client, pytest.raises(InvalidRequest, match=r"adapters.max_resident is 0"):
            client.add_adapter("red", str(root / "red"))


def test_a_resume_by_other_weights_is_refused(gateway: OpenGateway, root: Path) -> None:
    load(gateway, "red", root / "red")

    async def resume(digest: bytes, name: str) -> list[int]:
        request = inference_pb2.GenerateRequest(
            request_id=f"r-{name}",
            model=name,
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=3, temperature=0, seed=1),
            resume=inference_pb2.Resume(token_ids=[5], adapter=digest),
        )
        async with grpc.aio.insecure_channel(gateway.grpc) as channel:
            messages = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20)
            tokens: list[int] = []
            async for message in messages:
                assert message.adapter == digest
                tokens += message.token_ids
            return tokens

    assert asyncio.run(resume(RED, "red")) == [5, 5]
    load(gateway, "red", root / "blue", load_inplace=True)
    for digest, name in ((RED, "red"), (b"", "red"), (RED, "")):
        with pytest.raises(Exception, match="the tokens are of other weights"):
            asyncio.run(resume(digest, name))


def test_a_replay_after_the_removal_is_refused(model: Path, root: Path) -> None:
    options = {"adapters.max_resident": 2, "adapters.allowed_root": str(root)}
    with open_gateway(model, options, say=lambda _: 5) as gateway:
        gateway.worker.adapters[str(root / "red")] = RED
        load(gateway, "red", root / "red")
        with Client(gateway.grpc) as client:
            gateway.worker.step_seconds = 0.05
            updates = client.generate(PROMPT, max_tokens=100, ignore_eos=True, model="red")
            next(updates)
            client.remove_adapter("red")
            gateway.worker.fails["StartGenerate"] = ["go on"] * 5 + ["ABORTED"]
            with pytest.raises(AdapterRefused, match="was removed, or its name was loaded with other weights"):
                list(updates)
