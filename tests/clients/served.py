"""The server that the clients talk to: a cluster of the demo's model, behind a token."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tandem import launch
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.tools.demo import MODEL
from tests.clients.environments import HERE, ROOT
from tests.support.free_ports import free_ports

PROTO = ROOT / "proto" / "inference.proto"


@dataclass(frozen=True)
class Served:
    """variables: of the environment, as scripts read them."""

    http: str
    variables: dict[str, str]

    def has(self, route: str) -> bool:
        """Returns whether the server has the path for POST."""
        token = self.variables["TANDEM_API_KEY"]
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(self.http + route, json={}, headers=headers, timeout=60, trust_env=False).status_code != 404


def from_options(http: str, grpc: str, model: str, tokenizer: str) -> Served:
    """One that runs. model, if empty, is the first that it lists."""
    token = os.environ.get("TANDEM_API_KEY", "none")
    if not model:
        headers = {"authorization": f"Bearer {token}"}
        model = httpx.get(f"{http}/v1/models", headers=headers, timeout=60, trust_env=False).json()["data"][0]["id"]
    return Served(http, _variables(http, grpc, model, token, tokenizer))


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """A cluster of its own until the block ends. folder: gets the checkpoint, with a chat template that shows tools."""
    make_model(folder)
    grpc, http = free_ports(2)
    token = secrets.token_hex(16)
    keys = {"gateway.port": grpc, "gateway.http_port": http, "security.api_key": token}
    with launch(None, keys, model=folder, security=ClientSecurity(token=token)):
        url = f"http://127.0.0.1:{http}"
        yield Served(url, _variables(url, f"127.0.0.1:{grpc}", folder.name, token, str(folder)))


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in MODEL.iterdir():
        shutil.copy(file, folder)
    path = folder / "tokenizer_config.json"
    template = (HERE / "chat_template.jinja").read_text()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def _variables(http: str, grpc: str, model: str, token: str, tokenizer: str) -> dict[str, str]:
    return {
        "TANDEM_HTTP": http,
        "TANDEM_GRPC": grpc,
        "TANDEM_MODEL": model,
        "TANDEM_API_KEY": token,
        "TANDEM_TOKENIZER": tokenizer,
        "TANDEM_PROTO": str(PROTO),
    }
