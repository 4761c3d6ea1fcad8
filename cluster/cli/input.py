"""The `tandem` command's input: a prompt, and the gateway's address."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.cluster.cli.runtime_dir import running_cluster, running_clusters
from tandem.cluster.errors import ClusterNotRunning, InvalidRequest, UsageError
from tandem.cluster.protocol import TOKEN_IDS_ONLY, Prompt

DEFAULT_ADDRESS = "127.0.0.1:50051"
WILDCARDS = ("0.0.0.0", "[::]")


def read_prompt(text: str | None, file: Path | None, token_ids: str | None, *, chat: bool) -> Prompt:
    """Returns the given prompt, or stdin's without one or for `-`. Raises UsageError."""
    if sum(source is not None for source in (text, file, token_ids)) > 1:
        raise UsageError("give the prompt once: as an argument, with --file or with --token-ids")
    if token_ids is not None:
        if chat:
            raise UsageError("--chat needs text; --token-ids has none")
        return _read_token_ids(token_ids)
    if file is not None:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--file {file}: {error}") from None
    elif text is None or text == "-":
        content = _read_stdin(asked=text == "-")
    else:
        content = text
    return [{"role": "user", "content": content}] if chat else content


@contextmanager
def in_own_words() -> Iterator[None]:
    """Makes a gateway's refusal name the options of `tandem generate` in place of the request's fields."""
    try:
        yield
    except InvalidRequest as error:
        said = str(error)
        if said.endswith(TOKEN_IDS_ONLY):
            raise InvalidRequest("the prompt is text; the checkpoint has no tokenizer.json: give --token-ids") from None
        field = re.match(r"sampling\.(\w+)", said)
        if field is None:
            raise
        option = field[1].replace("token_ids", "token_id")  # which is given once for each
        raise InvalidRequest(f"--{option.replace('_', '-')}{said[field.end() :]}") from None


def reachable(addresses: str) -> str:
    """Returns an address that can be reached: a certificate names no wildcard, and no token is sent to one."""
    pairs = [address.rpartition(":")[::2] for address in addresses.split(",")]
    return ",".join(f"{'localhost' if host in WILDCARDS else host}:{port}" for host, port in pairs)


def _read_token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--token-ids is {text!r:.80}; it must be integers and commas, like 1,2,3") from None


def _read_stdin(*, asked: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UsageError("no prompt: give it as an argument, with --file, --token-ids or on stdin")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: {error}") from None


def address_of(name: str) -> str:
    """Returns HOST:PORT of this machine's cluster of that name. Raises ClusterNotRunning."""
    state = running_cluster(name)
    if state is None:
        running = ", ".join(one.name for one in running_clusters()) or "none"
        raise ClusterNotRunning(f"name is {name!r}: no such cluster runs here; running: {running}")
    if state.grpc_address is None:
        seconds = time.time() - state.started
        raise ClusterNotRunning(f"cluster {name!r} (pid {state.pid}) is still starting, for {seconds:.0f} s now")
    return reachable(state.grpc_address)


def logs_at(address: str) -> str | None:
    """Returns the log folder of this machine's cluster at HOST:PORT; None for another machine's."""
    found = (state for state in running_clusters() if state.grpc_address and reachable(state.grpc_address) == address)
    return next((state.logs for state in found), None)


def running_address() -> str:
    """Returns the running cluster's address; `local`'s if several run."""
    addresses = {state.name: state.grpc_address for state in running_clusters() if state.grpc_address}
    if len(addresses) > 1 and "local" not in addresses:
        raise UsageError(f"give --address; several clusters run: {addresses}")
    return reachable(addresses.get("local") or next(iter(addresses.values()), DEFAULT_ADDRESS))
