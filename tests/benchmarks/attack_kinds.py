"""The attacks that `tests/benchmarks/attacks.py` measures.

An attack is a function without arguments that makes what it will send, and returns what sends it: an async function of
a Target and a Counter of answers, which is called again and again until the time is up. `@attack` names it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

Send = Callable[["Target", Counter[str]], Awaitable[None]]
ATTACKS: dict[str, Callable[[], Send]] = {}

MIB = 1 << 20
MOST = 4 * MIB - 1024  # below gateway.max_message_mib, of a context of 128K tokens
CONNECTIONS = 16
GENERATE = "/tandem.v1.Inference/Generate"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CALL_SECONDS = 60.0
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Target:
    """Addresses of a gateway, HOST:PORT."""

    grpc: str
    http: str


def attack(make: Callable[[], Send]) -> Callable[[], Send]:
    """Registers it by its name."""
    ATTACKS[make.__name__] = make
    return make


def field(number: int, content: bytes) -> bytes:
    """A field of a message whose value has a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    said = bytearray()
    while value > 127:
        said.append(value & 127 | 128)
        value >>= 7
    return bytes([*said, value])


def over_grpc(data: bytes, connections: int = CONNECTIONS) -> Send:
    """Sends the message over so many connections at once."""

    async def one(target: Target, answers: Counter[str]) -> None:
        async with grpc.aio.insecure_channel(target.grpc, options=OPTIONS) as channel:
            call = channel.unary_stream(GENERATE)(data, timeout=CALL_SECONDS)
            try:
                async for _ in call:
                    pass
                answers["OK"] += 1
            except asyncio.CancelledError:
                answers["none in time"] += 1
                raise
            except grpc.aio.AioRpcError as error:
                answers[f"{error.code().name}: {(error.details() or '')[:120]}"] += 1

    async def send(target: Target, answers: Counter[str]) -> None:
        await asyncio.gather(*(one(target, answers) for _ in range(connections)))

    return send


def over_http(path: str, data: bytes, connections: int = CONNECTIONS, *, unfinished: int = 0) -> Send:
    """Posts the body over so many connections at once, but for the last `unfinished` bytes of it."""

    async def one(target: Target, answers: Counter[str]) -> None:
        host, _, port = target.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        try:
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode())
            writer.write(data[: len(data) - unfinished])
            answer = await reader.read()
            status, _, rest = answer.decode(errors="replace").partition("\r\n")
            answers[f"{status}: {rest.rpartition('message')[2][:120]}"] += 1
        except asyncio.CancelledError:
            answers["none in time"] += 1
            raise
        except OSError as error:
            answers[type(error).__name__] += 1
        finally:
            writer.close()

    async def send(target: Target, answers: Counter[str]) -> None:
        await asyncio.gather(*(one(target, answers) for _ in range(connections)))

    return send


@attack
def empty_chat_messages() -> Send:
    """2 million of them in one message."""
    return over_grpc(field(4, b"\x0a\x00" * (MOST // 2)))


@attack
def most_chat_messages() -> Send:
    """Sends as many messages as are allowed."""
    return over_grpc(field(4, field(1, field(1, b"user")) * 16_384))


@attack
def refused_for_their_size() -> Send:
    """16 MiB of token ids."""
    return over_grpc(field(7, bytes(16 * MIB)))


@attack
def unknown_fields() -> Send:
    return over_grpc(b"\x98\x06\x01" * (MOST // 3))


@attack
def token_ids() -> Send:
    """4 million in one message."""
    return over_grpc(field(3, field(1, b"\x01" * MOST)))


@attack
def unpacked_token_ids() -> Send:
    """2 million, each as a field."""
    return over_grpc(field(3, b"\x08\x01" * (MOST // 2)))


@attack
def resumed_token_ids() -> Send:
    return over_grpc(field(1, b"x") + field(7, b"\1\0\0\0") + field(6, field(1, b"\x01" * (MOST - 64))))


@attack
def stop_strings() -> Send:
    """2 million in one message."""
    return over_grpc(field(7, b"\1\0\0\0") + field(5, field(8, b"") * (MOST // 2)))


@attack
def long_text() -> Send:
    """4 MiB of words, which the tokenizer takes a second for."""
    return over_grpc(field(2, b"hello world " * (MOST // 12)))


@attack
def spaces() -> Send:
    """4 million, of which a Llama-3 pre-tokenizer panics."""
    return over_grpc(field(2, b" " * (MOST - 16)))


@attack
def many_spaces() -> Send:
    """500,000, over which the pre-tokenizer backtracks."""
    return over_grpc(field(2, b" " * 500_000))


@attack
def json_token_ids() -> Send:
    """2 million in 4 MiB."""
    return over_http(COMPLETIONS, b'{"prompt":[' + b"1," * (MOST // 2 - 16) + b"1]}")


@attack
def json_chat_messages() -> Send:
    return over_http(CHATS, b'{"messages":[' + b"{}," * (MOST // 3 - 16) + b"{}]}")


@attack
def json_fields() -> Send:
    """300,000 in one object."""
    fields = ",".join(f'"f{number}":1' for number in range(300_000))
    return over_http(COMPLETIONS, f"{{{fields}}}".encode())


@attack
def json_stop_strings() -> Send:
    return over_http(COMPLETIONS, b'{"prompt":[1],"stop":[' + b'"",' * (MOST // 3 - 16) + b'""]}')


@attack
def json_long_name() -> Send:
    """One unknown field whose name has 4 MiB."""
    return over_http(COMPLETIONS, b'{"' + b"prompt" * (MOST // 6 - 16) + b'":1}')


@attack
def json_bodies_of_60_kib() -> Send:
    """Just below what is read in a process of its own."""
    return over_http(COMPLETIONS, b'{"prompt":[' + b"1," * (30 << 10) + b"-1]}", 64)


@attack
def unfinished_bodies() -> Send:
    """100 of 4 MiB, each without its last byte."""
    return over_http(COMPLETIONS, b'{"prompt":"' + b"x" * (MOST - 16) + b'"}', 100, unfinished=1)


@attack
def call_bursts() -> Send:
    """3,000 good requests at once, of one client."""
    request = field(3, field(1, b"\x05\x06\x07")) + field(5, b"\x08\x01")
    metadata = (("client-id", "attacker"),)

    async def send(target: Target, answers: Counter[str]) -> None:
        async with grpc.aio.insecure_channel(target.grpc, options=OPTIONS) as channel:
            method = channel.unary_unary(GENERATE)
            calls = [method(request, timeout=CALL_SECONDS, metadata=metadata) for _ in range(3000)]
            answers.update([(await call.code()).name for call in calls])

    return send


@attack
def half_open_connections() -> Send:
    """100 to each frontend, which begin a request and say no more."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04" + bytes(5)

    async def send(target: Target, answers: Counter[str]) -> None:
        kinds = ((target.grpc, preface), (target.http, b"POST /v1/completions HTTP/1.1\r\nhost: loc"))
        held = await asyncio.gather(*(_said(*kind) for kind in kinds * 100))
        answers["held"] += sum(writer is not None for writer in held)
        await asyncio.sleep(1.0)
        for writer in held:
            if writer is not None:
                writer.close()

    return send


@attack
def bad_http() -> Send:
    """Requests with two ends, broken chunks, no HTTP at all, and clients that close their side or vanish."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    requests = [
        head + b"content-length: 4\r\n" + chunked + b"1\r\n{\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
        head + chunked + b"ffffffffffffffffffff\r\n{",
        b"\x16\x03\x01\x02\0\x01\0" + bytes(200),
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
        head + b"content-length: 28\r\n\r\n" + b'{"prompt":[5],"max_tokens":9',
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000,
    ]

    async def send(target: Target, answers: Counter[str]) -> None:
        held = await asyncio.gather(*(_said(target.http, request) for request in requests * 4))
        for number, writer in enumerate(held):
            if writer is not None:
                answers["sent"] += 1
                with suppress(OSError):
                    writer.write_eof() if number % 2 else writer.close()
        await asyncio.sleep(0.2)
        for writer in held:
            if writer is not None:
                writer.close()

    return send


async def _said(address: str, content: bytes) -> asyncio.StreamWriter | None:
    """A connection on which this was said; None where nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(content)
    except OSError:
        return None
    return writer


def use_slow_tokenizer(folder: Path) -> None:
    """Gives the checkpoint a byte-level tokenizer with the pre-tokenizer of Llama 3, and a token of 128 spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_tokens(["x" * 128])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}), encoding="utf-8")
