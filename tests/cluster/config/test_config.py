import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value).splitlines()


def test_every_key_of_local_yaml_stands_for_its_default() -> None:
    assert load_config(DEPLOY / "local.yaml") == ClusterConfig()
    written = yaml.safe_load((DEPLOY / "local.yaml").read_text())
    assert written == ClusterConfig().model_dump()


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert (config.island.device == "cuda") == path.stem.startswith("gpu-")
    if shape := re.search(r"(\d+)p(\d+)d$", path.stem):
        assert (config.island.num_prefill, config.island.num_decode) == (int(shape[1]), int(shape[2]))


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: mine\ncache: {num_pages: 5, page_size: 8}\nmodel:\n")
    config = load_config(
        path, ["cache.num_pages=6", "cache.num_pages=7", "gateway.queue_seconds=2", "ray.num_cpus=null"]
    )
    assert config.name == "mine"
    assert (config.cache.num_pages, config.cache.page_size, config.gateway.queue_seconds) == (7, 8, 2.0)
    assert load_config(path, {"cache.num_pages": 9}).cache.num_pages == 9


def test_errors_say_whether_file_or_override_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cache: {page_size: 12}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["gateway.port=70000", "scheduler={max_sequence: 3}"])
    assert [line.split(" ")[:3] for line in str(caught.value).splitlines()] == [
        [f"{path}:", "cache.page_size", "is"],
        ["unknown", "key", "scheduler.max_sequence;"],
        ["gateway.port", "is", "70000;"],
    ]


def test_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_config(None, ["model.path=here"]).model.path == str(tmp_path / "here")
    assert load_config(None, ["model.path=~/there"]).model.path == "/home/somebody/there"


def test_a_config_is_frozen() -> None:
    config = ClusterConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.num_pages = 2


@pytest.mark.parametrize(
    ("key", "unknown", "near", "known"),
    [
        ("cache.num_page", "cache.num_page", "cache.num_pages", "page_size, num_pages, gpu_memory_utilization"),
        (
            "schedular.max_sequences",
            "schedular",
            "scheduler",
            "num_islands, island, gateway, scaling, metrics, logging, tracing, record, recovery, security, ray",
        ),
        ("island.num_prefils", "island.num_prefils", "island.num_prefill", "transport, num_prefill"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, unknown: str, near: str, known: str) -> None:
    (line,) = refused(f"{key}=1")
    assert line.startswith(f"unknown key {unknown}; did you mean {near}?")
    assert known in line


def test_an_unknown_key_like_nothing_gets_no_suggestion() -> None:
    (line,) = refused("cache.zzz=1")
    assert "did you mean" not in line
    assert "known here: page_size" in line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("cache.kv_cache_dtype=fp8", ["cache.kv_cache_dtype is 'fp8'", "'auto' or 'fp8_e4m3'", "element type"]),
        ("cache.k_scale=0.5", ["cache.k_scale is 0.5", "must be null unless cache.kv_cache_dtype is fp8_e4m3"]),
        ("cache.v_scale=.inf", ["cache.v_scale is inf", "finite number", "the same for V"]),
        ("cache.num_pages=0", ["cache.num_pages is 0", "greater than or equal to 1", "KV pages"]),
        ("cache.page_size=12", ["cache.page_size is 12", "8, 16, 32, 64 or 128"]),
        ("cache.num_pages=yes", ["cache.num_pages is True", "integer"]),
        ("cache.num_pages='3'", ["cache.num_pages is '3'", "integer"]),
        ("cache.prefix_sharing=1", ["cache.prefix_sharing is 1", "boolean"]),
        ("cache.state_interval=40", ["cache.state_interval is 40", "a multiple of cache.page_size, 16, or null"]),
        ("cache.state_share=2.0", ["cache.state_share is 2.0", "less than or equal to 1"]),
        ("model.dtype=int8", ["model.dtype is 'int8'", "'auto', 'float32', 'bfloat16' or 'float16'"]),
        ("model.max_model_len=0", ["model.max_model_len is 0", "greater than or equal to 1"]),
        ("island.num_decode=null", ["island.num_decode is null", "integer"]),
        ("island.transport=rdma", ["island.transport is 'rdma'", "shared_memory"]),
        (
            "island.transport=nvshmem",
            ["island.transport is 'nvshmem'", "must be shared_memory", "island.device is cpu"],
        ),
        (
            "island.device=cuda",
            ["island.transport is 'shared_memory'", "must be nixl or nvshmem", "island.device is cuda"],
        ),
        ("island.span_hosts=true", ["island.span_hosts is True", "false unless island.transport is tcp or nixl"]),
        ("island.decode_ranks=0", ["island.decode_ranks is 0", "greater than or equal to 1"]),
        ("island.prefill_ranks=65", ["island.prefill_ranks is 65", "less than or equal to 64"]),
        ("island.device=tpu", ["island.device is 'tpu'", "'cpu' or 'cuda'"]),
        ("gateway.nodes=each", ["gateway.nodes is 'each'", "'launcher' or 'all'", "hosts with a gateway"]),
        ("gateway.node_labels={zone: a}", ["gateway.node_labels is {'zone': 'a'}", "set gateway.nodes=all"]),
        ("gateway.port=65536", ["gateway.port is 65536", "less than or equal to 65535"]),
        ("gateway.queue_seconds=0", ["gateway.queue_seconds is 0", "greater than 0"]),
        ("gateway.queue_seconds=.nan", ["gateway.queue_seconds is nan"]),
        ("gateway.host=0.0.0.0", ["gateway.host is '0.0.0.0'", "loopback", "TLS"]),
        ("gateway.host=example.org", ["gateway.host is 'example.org'", "loopback", "security.token_file"]),
        (
            "security.tls_cert=a.pem",
            ["security is a section with tls_cert", "both tls_cert and tls_key"],
        ),
        (
            "security.client_ca=a.pem",
            ["security is a section with client_ca", "where client_ca is set"],
        ),
        ("name=a/b", ["name is 'a/b'", "letters, digits"]),
        ("cache.gpu_memory_utilization=1.5", ["cache.gpu_memory_utilization is 1.5", "less than or equal to 1"]),
        ("cache.gpu_memory_utilization=0", ["cache.gpu_memory_utilization is 0", "greater than 0"]),
        (
            "cache.gpu_memory_utilization=0.5",
            ["cache.gpu_memory_utilization is 0.5", "null where island.device is cpu"],
        ),
        ("scheduler.token_share=0.5", ["scheduler.token_share is 0.5", "greater than 0.5"]),
        ("scheduler.token_share=1", ["scheduler.token_share is 1", "less than 1"]),
        ("cache=5", ["cache is 5", "section with keys page_size"]),
    ],
)
def test_values_out_of_range_name_field_value_and_limit(override: str, parts: list[str]) -> None:
    (line,) = refused(override)
    for part in parts:
        assert part in line


def test_more_ranks_than_gpus_add_up_are_refused() -> None:
    (line,) = refused("island.device=cuda", "island.transport=nvshmem", "island.prefill_ranks=9")
    assert "island.prefill_ranks is 9; it must be at most 8 where island.device is cuda" in line


def test_what_two_sections_say_is_not_laid_on_the_file_where_an_override_may_have_said_it(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("gateway: {host: example.org}")
    for overrides, place in (([], f"{path}: "), (["gateway.host=0.0.0.0"], "")):
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        assert str(caught.value).startswith(f"{place}gateway.host is ")


def test_the_pool_is_given_once() -> None:
    (line,) = refused(
        "island.device=cuda",
        "island.transport=nvshmem",
        "cache.num_pages=5",
        "cache.gpu_memory_utilization=0.5",
    )
    assert line.startswith(
        "cache.gpu_memory_utilization is 0.5; it must be null where cache.num_pages is given, here 5"
    )


def test_gateways_on_all_hosts_have_to_reach_the_workers() -> None:
    (line,) = refused("gateway.nodes=all", "island.network=loopback")
    assert "gateway.nodes is all; it must be launcher where island.network is loopback" in line


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["island.num_prefill=0"], ["island.num_prefill is 0; it must be at least 1 where scheduler.roles is split"]),
        (["scaling.min_islands=3", "scaling.max_islands=2"], ["scaling is", "min_islands, here 3"]),
        (["scaling.token_seconds=0.1"], ["must have max_islands or max_workers where token_seconds is set"]),
        (["num_islands=3", "scaling.max_islands=2"], ["num_islands is 3; it must be at most scaling.max_islands, 2"]),
        (
            ["scaling.min_islands=2", "scaling.max_islands=4", "scaling.queue_seconds=1", "scaling.token_seconds=1"],
            ["num_islands is 1; it must be at least scaling.min_islands, 2, where scaling.queue_seconds or scal"],
        ),
        (
            ["scaling.max_workers=3", "scaling.min_decode=3", "scaling.queue_seconds=1"],
            ["must have max_workers, here 3, of at least min_prefill and min_decode, here 1 and 3, together"],
        ),
        (["scaling.max_workers=3"], ["must have queue_seconds, first_token_seconds or token_seconds", "here 3"]),
        (["scaling.min_decode=2"], ["must have max_workers where min_decode is set, here 2"]),
        (
            ["scaling.max_workers=3", "scaling.min_prefill=2", "scaling.queue_seconds=1"],
            ["island.num_prefill is 1; it must be at least scaling.min_prefill, 2, where scaling.max_workers is set"],
        ),
        (
            ["scaling.max_workers=3", "island.num_decode=3", "scaling.queue_seconds=1"],
            ["island.num_prefill and island.num_decode are 4 together; they must be at most scaling.max_workers, 3"],
        ),
        (
            ["scaling.max_workers=3", "scheduler.roles=adaptive", "scaling.queue_seconds=1"],
            ["scaling.max_workers is 3; it must be null where scheduler.roles is adaptive"],
        ),
        (
            ["metrics.enabled=false", "scaling.max_workers=4", "scaling.queue_seconds=1"],
            ["metrics.enabled is false; it must be true where scaling.queue_seconds is set"],
        ),
        (
            ["metrics.enabled=false", "scaling.max_islands=4", "scaling.queue_seconds=1"],
            ["metrics.enabled is false; it must be true where scaling.queue_seconds is set"],
        ),
    ],
)
def test_a_scaling_policy_that_cannot_act_is_refused(overrides: list[str], parts: list[str]) -> None:
    (line,) = refused(*overrides)
    for part in parts:
        assert part in line


def test_a_scaling_policy_is_there_where_a_target_and_room_to_grow_are() -> None:
    def is_automatic(*overrides: str) -> bool:
        return load_config(None, overrides).scaling.is_automatic

    assert is_automatic("scaling.max_islands=2", "scaling.queue_seconds=1")
    assert not is_automatic("scaling.max_islands=2")
    assert not is_automatic("scaling.max_islands=1", "scaling.queue_seconds=1")
    assert not is_automatic("scaling.max_workers=3", "scaling.queue_seconds=1")
    assert load_config(None, ["scaling.max_workers=3", "scaling.queue_seconds=1"]).scaling.moves_roles
    assert not load_config(None, ["scaling.max_islands=3", "scaling.queue_seconds=1"]).scaling.moves_roles


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_hosts_are_accepted(host: str) -> None:
    assert load_config(None, {"gateway.host": host}).gateway.host == host


def test_any_host_is_accepted_with_a_token_and_tls() -> None:
    guards = {"security.token_file": "t", "security.tls_cert": "c", "security.tls_key": "k"}
    assert load_config(None, guards | {"gateway.host": "0.0.0.0"}).gateway.host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"gateway\.host is '0\.0\.0\.0'"):
        load_config(None, {"gateway.host": "0.0.0.0", "security.token_file": "t"})


@pytest.mark.parametrize("token", ["security.token_file", "security.api_key"])
@pytest.mark.parametrize("tls", [{"security.tls_cert": "c", "security.tls_key": "k"}, {"security.tls_at_proxy": True}])
def test_any_host_is_accepted_with_either_token_and_tls_here_or_at_a_proxy(token: str, tls: dict[str, Any]) -> None:
    hosts = {"gateway.host": "0.0.0.0", "metrics.host": "0.0.0.0", "metrics.port": 0}
    assert load_config(None, hosts | tls | {token: "t" * 16}).metrics.host == "0.0.0.0"


def test_tls_at_a_proxy_needs_a_token_and_no_certificate() -> None:
    (keyless,) = refused("security.tls_at_proxy=true", "gateway.host=0.0.0.0")
    assert "must have token_file or api_key where tls_at_proxy is true" in keyless
    keys = [f"security.{name}" for name in ("api_key=" + "k" * 16, "tls_cert=c", "tls_key=k", "tls_at_proxy=true")]
    assert "must have tls_at_proxy or tls_cert, not both" in refused(*keys)[0]


def test_all_findings_come_at_once() -> None:
    assert len(refused("cache.num_pages=0", "gateway.port=-1", "nonsense=1")) == 3


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("foo", "--set is 'foo'; it must be KEY=VALUE"),
        ("=3", "it must be KEY=VALUE"),
        ("name=[1", "its value must be YAML: line 1"),
        ("name.x=1", "name is {'x': 1}"),
    ],
)
def test_bad_overrides(override: str, part: str) -> None:
    (line,) = refused(override)
    assert part in line


def test_an_override_through_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"name\.x cannot be set: name is 'mine', not a section"):
        load_config(path, ["name.x=1"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\ncache: {num_pages: 3\n", "line 3, column 1"),
        ("- a\n- b\n", "must be a mapping with keys name"),
        ("cache:\n  num_pages: 0\n", "cache.num_pages is 0"),
        ("name: !!python/object:os.system {}\n", "line 1"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert part in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(path)


@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.none())))
)
def test_any_mapping_loads_or_raises_config_error(values: dict[str, object]) -> None:
    with suppress(ConfigError):
        load_config(None, values)


class TestEnvironment:
    def test_variables_come_between_the_file_and_overrides(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("name: mine\ncache: {num_pages: 5, page_size: 8}\n")
        environ = {"TANDEM_CACHE__NUM_PAGES": "6", "TANDEM_GATEWAY__PORT": "7001", "TANDEM_NAME": "2024"}
        environ |= {"TANDEM_TOKEN_FILE": "/of/a/client", "TANDEM_KERNEL_CACHE": "/kernels", "PATH": "/bin"}
        config = load_config(path, ["gateway.port=7002"], environ)
        assert (config.name, config.cache.num_pages, config.cache.page_size) == ("2024", 6, 8)
        assert config.gateway.port == 7002
        assert load_config(path).cache.num_pages == 5  # the environment counts where it is given

    def test_errors_name_the_variable(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("cache: {page_size: 12}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(path, (), {"TANDEM_GATEWAY__PROT": "1", "TANDEM_GATEWAY__PORT": "70000"})
        lines = str(caught.value).splitlines()
        assert lines[0].startswith(f"{path}: cache.page_size is 12; ")
        assert lines[1].startswith("TANDEM_GATEWAY__PORT: gateway.port is 70000; ")
        assert lines[2].startswith("TANDEM_GATEWAY__PROT: unknown key gateway.prot; did you mean gateway.port? ")
        with pytest.raises(ConfigError, match=r"^TANDEM_GATEWAY__PORT is .*; it must be YAML: line 1"):
            load_config(None, (), {"TANDEM_GATEWAY__PORT": "["})


class TestApiKey:
    def test_a_key_is_text_and_shown_nowhere(self) -> None:
        key = "1234567890123456"
        config = load_config(None, (), {"TANDEM_SECURITY__API_KEY": key})
        assert config.security.server.token() == key
        assert key not in repr(config) + repr(config.security.server)
        with pytest.raises(ConfigError) as caught:
            load_config(None, {"security.api_key": int(key)})
        assert key not in str(caught.value)
        assert "security.api_key is hidden; " in str(caught.value)

    def test_one_key_and_a_long_one(self) -> None:
        both = {"security.api_key": "0123456789abcdef", "security.token_file": "/token"}
        with pytest.raises(ConfigError, match="must have token_file or api_key, not both"):
            load_config(None, both)
        with pytest.raises(ConfigError, match=r"^security\.api_key holds 5 characters; ") as caught:
            load_config(None, {"security.api_key": "short"}).security.server.check()
        assert "short" not in str(caught.value)


class TestModelNames:
    def test_a_name_or_a_list(self) -> None:
        for value in ("a", ["a"], ["a", "b"]):
            names = load_config(None, {"model.served_model_name": value}).model.names
            assert names == ([value] if isinstance(value, str) else value)
        for wrong in ([], [""], "", 3, [3], {"a": "b"}):
            with pytest.raises(ConfigError, match=r"^model\.served_model_name is .*must be a name, or a list of names"):
                load_config(None, {"model.served_model_name": wrong})

    def test_a_hub_id_is_found_in_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        repository = tmp_path / "hub" / "models--Nobody--tiny-1b"
        snapshot = repository / "snapshots" / ("0123456789" * 4)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(snapshot.name)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.chdir(tmp_path)
        model = load_config(None, {"model.path": "Nobody/tiny-1b"}).model
        assert (model.path, model.names, model.root) == (str(snapshot), ["Nobody/tiny-1b"], "Nobody/tiny-1b")
        absent = load_config(None, {"model.path": "Nobody/other"}).model
        assert (absent.path, absent.names) == (str(tmp_path / "Nobody" / "other"), ["other"])
        (tmp_path / "Nobody" / "tiny-1b").mkdir(parents=True)
        folder = load_config(None, {"model.path": "Nobody/tiny-1b"}).model
        assert (folder.path, folder.names) == (str(tmp_path / "Nobody" / "tiny-1b"), ["tiny-1b"])
        assert folder.root == folder.path


@pytest.mark.parametrize("key", ["model.path", "speculation.draft", "logging.folder", "security.token_file"])
@pytest.mark.parametrize("path", ["x" * 5000, "a/" + "é" * 128, "a\0b", "a/" * 2048])
def test_a_path_that_no_file_has_is_refused_by_its_key(key: str, path: str) -> None:
    method = {"speculation.method": "draft_model"} if key == "speculation.draft" else {}
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**method, key: path})
    said = str(caught.value)
    assert said.startswith(f"{key} is ")
    assert "it must be a path of at most 4095 bytes, at most 255 in each name, without NUL" in said
    assert len(said) < 700


@pytest.mark.parametrize(
    ("key", "value", "accepted", "beside"),
    [
        ("gateway.routing_policy", "least_loaded", "'prefix_aware' where scheduler.roles is 'adaptive'", "adaptive"),
        ("gateway.routing_policy", "least_loaded", "'prefix_aware' where scheduler.roles is 'colocated'", "colocated"),
        ("scheduler.token_seconds", 0.02, "null where scheduler.roles is 'split'", "split"),
        ("speculation.tokens", 5, "3 where speculation.method is 'none'", "split"),
        ("speculation.max_step_tokens", 64, "32 where speculation.method is 'none'", "split"),
        ("speculation.max_ngram", 5, "3 where speculation.method is 'none'", "split"),
        ("cache.verify_host", True, "False where cache.host_bytes is null", "split"),
        ("cache.disk_bytes", 4096, "null where cache.disk_path is null", "split"),
        ("gateway.cors_origins", ["*"], "[] where gateway.http_port is null", "split"),
        ("metrics.host", "::1", "'127.0.0.1' where metrics.port is null", "split"),
        ("record.max_mib", 5, "256 where record.folder is null", "split"),
        ("record.prompts", True, "False where record.folder is null", "split"),
        ("tracing.sample_ratio", 0.5, "1.0 where tracing.endpoint is null", "split"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(key: str, value: object, accepted: str, beside: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"scheduler.roles": beside, key: value})
    assert str(caught.value).startswith(f"{key} is ")
    assert f"; it must be {accepted}" in str(caught.value)


def test_host_memory_for_prefixes_that_nobody_shares_is_refused() -> None:
    assert refused("cache.prefix_sharing=false", "cache.host_bytes=4096") == [
        "cache.host_bytes is 4096; it must be null where cache.prefix_sharing is False: no prefix is cached then"
    ]


def test_host_memory_that_gpus_have_by_default_can_be_verified() -> None:
    gpus = {"island.device": "cuda", "island.transport": "nvshmem", "cache.verify_host": True}
    assert load_config(None, gpus).cache.verify_host
    with pytest.raises(ConfigError, match=r"^cache\.verify_host is True; .* cache\.host_bytes is 0"):
        load_config(None, gpus | {"cache.host_bytes": 0})


def test_a_disk_needs_bytes_and_no_records() -> None:
    disk = ("cache.host_bytes=4096", "cache.disk_path=/tmp")
    (said,) = refused(*disk)
    assert said.startswith("cache.disk_bytes is null; it must be a number of bytes where cache.disk_path is a folder")
    (said,) = refused("cache.disk_path=/tmp", "cache.disk_bytes=4096")
    assert said == (
        "cache.disk_path is '/tmp'; it must be null where cache.host_bytes is null: pages reach the disk through host "
        "memory; set cache.host_bytes"
    )
    (said,) = refused(*disk, "cache.disk_bytes=4096", "record.folder=/tmp/records")
    assert said.startswith("cache.disk_path is '/tmp'; it must be null where record.folder is '/tmp/records': a replay")


def test_a_key_with_its_default_is_accepted_where_nothing_reads_it() -> None:
    load_config(
        None, {"scheduler.roles": "adaptive", "gateway.routing_policy": "prefix_aware", "speculation.tokens": 3}
    )
    load_config(
        None, {"gateway.routing_policy": "least_loaded", "speculation.method": "ngram", "speculation.max_ngram": 5}
    )


@pytest.mark.parametrize("roles", ["adaptive", "colocated"])
def test_workers_that_do_both_need_two_slots_for_adapters(roles: str) -> None:
    (said,) = refused("adapters.max_resident=1", f"scheduler.roles={roles}")
    assert said.startswith(f"adapters.max_resident is 1; it must be 0, or at least 2, where scheduler.roles is {roles}")
    assert load_config(None, ["adapters.max_resident=1"]).adapters.is_on
    assert load_config(None, ["adapters.max_resident=2", f"scheduler.roles={roles}"]).adapters.is_on
