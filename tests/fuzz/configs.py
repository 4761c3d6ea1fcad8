"""Fuzzes the loader of configurations with bad YAML: it reads a file, or raises ConfigError with lines that name a
key."""

import random
from collections.abc import Iterator
from pathlib import Path

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError
from tests.fuzz.mutations import TEXT, mutated_bytes

DEPLOY = Path(__file__).parents[2] / "deploy"
BOMB = "[" + ", ".join(["&a0 [x]", *(f"&a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(30))]) + "]"
VALUES = (
    "", "~", "null", "true", "yes", "0", "-1", "1", "257", "1e400", "-.inf", ".nan", "0x10", "0o17", "1_000", "1.5",
    "2" * 5000, "''", "'a'", "[]", "[1, 2]", "{}", "{a: 1}", BOMB, "2020-01-01", "!!python/object:os.system x",
    "!!binary aGk=", "&a [*a]", "*b", "<<: 1", "|\n  x", "!!set {a}", "!!float x", "!!int x", "!!timestamp x",
    "'\\ud800'", '"\\ud800"', "\t", "@", "%", "`", "? [1]\n: 2", "shared_memory", "nvshmem", "cuda", "0.0.0.0", "::1",
    "local",
)  # fmt: skip


def keys() -> list[str]:
    """Lists every dotted key, sections included."""
    names = []
    for name, field in ClusterConfig.model_fields.items():
        section = getattr(field.annotation, "model_fields", {})
        names += [name, *(f"{name}.{inner}" for inner in section)]
    return names


# BOMB: thirty levels of nine aliases each: small as YAML, without end when written out.
def inputs(seed: int) -> Iterator[tuple[bytes, list[str]]]:
    """Yields a file's bytes and overrides, without end: mutations of deploy/'s files."""
    rng = random.Random(seed)
    good = [_without_comments(path.read_bytes()) for path in sorted(DEPLOY.glob("*.yaml"))]
    known = keys()
    while True:
        text, overrides = rng.choice(good), []
        kind = rng.randrange(4)
        if kind == 0:
            text = mutated_bytes(rng, text)
        elif kind == 1:
            overrides = [f"{_key(rng, known)}={_value(rng)}" for _ in range(rng.choice((1, 1, 2, 5)))]
        elif kind == 2:
            lines = text.decode().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = f"{lines[at].partition(':')[0]}: {_value(rng)}"
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
        else:
            begin = rng.choice((b"[", b"{a: ", b"- ", b"a: &x ", b"!!a ", b"? "))
            text = begin * rng.choice((1, 1, 3, 3, 400)) + text[: rng.randrange(len(text))]
        yield text, overrides


def _without_comments(text: bytes) -> bytes:
    lines = (line.partition(b" #")[0].rstrip() for line in text.splitlines())
    return b"\n".join(line for line in lines if line and not line.startswith(b"#"))


def _key(rng: random.Random, known: list[str]) -> str:
    key = rng.choice(known)
    return rng.choice((key, key, key, f"{key}.x", key.replace("_", ""), f".{key}", f"{key}..", rng.choice(TEXT)[:200]))


def _value(rng: random.Random) -> str:
    return rng.choice((*VALUES, rng.choice(TEXT)))


def check(text: bytes, overrides: list[str], path: Path) -> bool:
    """Returns whether the loader accepts it. AssertionError when it neither accepts nor properly refuses it."""
    path.write_bytes(text)
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert lines, "a refusal without a word"
        assert all(len(line) < 1500 for line in lines), f"a refusal of {max(map(len, lines))} characters"
        return False
    assert isinstance(config, ClusterConfig)
    assert load_config(None, config.model_dump()) == config
    return True


def fuzz(seed: int, count: int, path: Path) -> dict[str, int]:
    """Counts accepted and refused inputs. AssertionError, or whatever the loader raised, names the input's number."""
    outcome = {"taken": 0, "refused": 0}
    for number, (text, overrides) in zip(range(count), inputs(seed), strict=False):
        try:
            outcome["taken" if check(text, overrides, path) else "refused"] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, input {number}: {text[:2000]!r}, overrides {overrides!r:.2000}")
            raise
    return outcome
