"""Generates docs/configuration.md from the schema in cluster/config/sections.py.

`python docs/generate.py` writes it; with `--check` it writes nothing and exits with 1 when the file is stale.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.config.cluster_config import ClusterConfig

PAGE = Path(__file__).resolve().with_name("configuration.md")
INTRO = """\
# Configuration

One YAML file describes a cluster. `tandem up FILE` reads it. This page is generated from the schema in
`cluster/config/sections.py` by `make docs`; `make check` fails when it is stale.

- Every key is optional. `deploy/local.yaml` lists all of them with their defaults.
- `--set cache.num_pages=4096` overrides one key. The value is YAML. The option may be repeated.
- `--model`, `--grpc-port`, `--http-port`, `--verify-kv` and `--api-key` override `model.path`, `gateway.port`,
  `gateway.http_port`, `island.verify_kv` and `security.api_key`.
- An environment variable sets a key, too: `TANDEM_CACHE__NUM_PAGES=4096`. Two underscores replace the dot. The value
  is YAML.
- Options override variables, variables override the file, and the file overrides the defaults.
- Unknown keys are refused, and the error names the nearest known key.
- No value is converted, except an integer where a fraction is allowed: `"16"` is not 16.
- Relative paths start at the folder in which `tandem up` runs. `~` is your home.

## Rules between keys

| key | rule |
|---|---|
| `cache.gpu_memory_utilization` | must be null if `cache.num_pages` is given, and if `island.device` is cpu |
| `cache.k_scale`, `cache.v_scale` | must be null unless `cache.kv_cache_dtype` is fp8_e4m3 |
| `cache.host_bytes` | must be null if `cache.prefix_sharing` is false, or no snapshot of states is kept |
| `cache.verify_host` | must be false if `cache.host_bytes` is 0, and if it is null on CPUs |
| `cache.disk_path` | must be null if `cache.host_bytes` is null, or `record.folder` is given |
| keys of `adapters` | must have their defaults if `adapters.max_resident` is 0 |
| `adapters.max_resident` | must not be 1 unless `scheduler.roles` is split |
| `cache.disk_bytes` | must be given with `cache.disk_path`, and null without it |
| `island.transport` | must be nvshmem or nixl if `island.device` is cuda, and must not be nvshmem if it is cpu |
| `gateway.host` | must be a loopback address unless `security` has a token and TLS |
| `gateway.nodes` | must be launcher if `island.network` is loopback |
| `gateway.node_resources`, `gateway.node_labels` | must be empty if `gateway.nodes` is launcher |
| `gateway.routing_policy` | must be prefix_aware unless `scheduler.roles` is split |
| `scheduler.token_seconds`, `scheduler.token_share` | must be null and 0.9 if `scheduler.roles` is split |
| `speculation.tokens`, `speculation.max_step_tokens` | must be 3 and 32 if `speculation.method` is none |
| `speculation.max_ngram` | must be 3 unless `speculation.method` is ngram |
| `gateway.cors_origins` | must be empty if `gateway.http_port` is null |
| `record.max_mib`, `record.prompts` | must be 256 and false if `record.folder` is null |
| `tracing.sample_ratio` | must be 1.0 if `tracing.endpoint` is null |
| `metrics.host` | must be 127.0.0.1 if `metrics.port` is null |
| `metrics.host` | follows the rule of `gateway.host`, unless `metrics.public` is true |
| `gateway.http_port` | must differ from `gateway.port` |
| `security.api_key`, `security.token_file` | at most one of them |
| `security.tls_cert`, `security.tls_key` | come together; `security.client_ca` needs both |
| `security.keys_file` | needs `security.token_file` or `security.api_key` |
| `security.tls_at_proxy` | needs a token, and no `security.tls_cert` |
| targets of `scaling` | need `metrics.enabled`, and `scaling.max_islands` or `scaling.max_workers` |
| `num_islands` | at most `scaling.max_islands`; at least `scaling.min_islands` if a target is set |
| `scaling.max_workers` | needs a target and split `scheduler.roles`; at least the workers of `island` |
| `scaling.min_prefill`, `scaling.min_decode` | at most the island's; above 1 they need `scaling.max_workers` |
| `model.max_model_len` | at most the checkpoint's limit |

`tandem up` checks these rules, the checkpoint, the token file and the certificates before it starts a process.
[Operations](operations.md#start) lists its checks of the host.

These environment variables do not set keys:

| variable | meaning |
|---|---|
| `TANDEM_API_KEY` | the bearer token: `--api-key` of `tandem up`; `generate`, `status` and `scale` send it |
| `TANDEM_TOKEN_FILE`, `TANDEM_TLS_CA`, `TANDEM_TLS_CERT`, `TANDEM_TLS_KEY` | the same for token file and certificates |
| `TANDEM_KERNEL_CACHE` | folder of compiled kernels, see [GPU hosts](gpu-hosts.md#compiling-ahead) |
| `HF_HUB_CACHE`, `HF_HOME` | where hub ids are looked up |
"""

Schema = Mapping[str, Any]


def generate() -> str:
    """The whole page. Raises LookupError for a number without a unit."""
    schema = ClusterConfig.model_json_schema()
    fields: Schema = schema["properties"]
    plain = {key: field for key, field in fields.items() if "$ref" not in field}
    parts = [INTRO, "## The cluster\n", _table("", plain)]
    for section, field in fields.items():
        if section not in plain:
            keys: Schema = schema["$defs"][field["$ref"].rpartition("/")[2]]["properties"]
            parts += [f"## `{section}`: {field['description']}\n", _table(f"{section}.", keys)]
    return "\n".join(parts)


def _table(prefix: str, fields: Schema) -> str:
    rows = ["| key | default | allowed | unit | meaning |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(_cells(prefix + key, field))} |" for key, field in fields.items()]
    return "\n".join([*rows, ""])


def _cells(key: str, field: Schema) -> Iterator[str]:
    kinds = [kind for kind in field.get("anyOf", [field]) if kind["type"] != "null"]
    (kind,) = kinds
    nullable = ["null"] if "anyOf" in field else []
    yield f"`{key}`"
    yield _value(field["default"])
    yield ", ".join([_accepted(kind), *nullable])
    if kind["type"] in ("integer", "number") and "unit" not in kind:
        raise LookupError(f"{key} is a number without a unit; its type in cluster/config/sections.py must give one")
    yield kind.get("unit", "")
    yield " ".join(field["description"].split())


def _value(value: object) -> str:
    """As YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _accepted(kind: Schema) -> str:
    if "accepted" in kind:
        return kind["accepted"]
    if "enum" in kind:
        return ", ".join(map(str, kind["enum"]))
    if kind["type"] == "boolean":
        return "true, false"
    if kind["type"] == "string":
        return "text"
    if kind["type"] == "object":
        return "names and numbers" if kind["additionalProperties"]["type"] == "number" else "names and texts"
    least = f"> {kind['exclusiveMinimum']:,}" if "exclusiveMinimum" in kind else f"≥ {kind['minimum']:,}"
    return least + (f" and ≤ {kind['maximum']:,}" if "maximum" in kind else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is stale")
    check = parser.parse_args().check
    text = generate()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"docs/{PAGE.name} is stale: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
