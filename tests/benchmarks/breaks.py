"""Records what `tandem` says of deliberate mistakes, and how long it takes: makes docs/errors.md.

python -m tests.benchmarks.breaks [--only WORDS] [--write]

Each mistake runs as a command of its own, in a folder of its own. Seconds are CPU time of the command, which a busy
machine does not stretch much.
"""

import argparse
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tandem.cluster.cli import commands, foreground  # noqa: F401 - forks have it imported
from tests.benchmarks.measured import rounded
from tests.benchmarks.results import print_result

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
DEMO = ROOT / "cluster" / "tools" / "demo_model" / "checkpoint"
SECONDS = 120
HEAVY, HEAVY_BIT = ("torch", "ray"), 64  # the bit stands in the exit code of a fork
OTHERS = re.compile(r"tandem: (local|gpu-1p1d): |Usage: |Try ")
HEAD = """# Mistakes and errors

The messages for {count} deliberate mistakes. Each error is one line on stderr, or one line for each finding.
Exit code 2 means a mistake in a command, a configuration or a checkpoint; 1 means a failure. Seconds are the command's
CPU time on one machine. All errors come before torch and Ray are imported. DIR is a checkpoint's folder,
PORT a port that another process has.

`python -m tests.benchmarks.breaks --write` makes this page.

| mistake | command | exit code | CPU seconds | message |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Break:
    """A mistake. words: of the command, in which DIR is a copy of the demo's checkpoint and PORT a port that is taken.
    prepare: changes that copy."""

    title: str
    words: str
    prepare: Callable[[Path], object] = lambda folder: None
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a mistake. text: without paths of this machine."""

    code: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Forked:
    """Without seconds. heavy: whether one of HEAVY was imported before the error."""

    outcome: Outcome
    heavy: bool


FALCON = {"alibi": True, "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True}
QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
UP = "up deploy/local.yaml --grpc-port 0"
UP_DIR = f"{UP} --model DIR"


def config(**fields: object) -> Callable[[Path], object]:
    """Sets fields of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def without(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def sharded(folder: Path) -> None:
    """Removes one of two files of a sharded checkpoint."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5516032\n"
    (folder / "model.safetensors").write_text(text)


def gguf(folder: Path) -> None:
    without("config.json", "model.safetensors")(folder)
    (folder / "model.gguf").touch()


def yaml(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "cluster.yaml").write_text(text)


BREAKS = (
    Break("no model", UP),
    Break("no such folder", f"{UP} --model DIR/nothing"),
    Break("a hub id that is not downloaded", f"{UP} --model Nobody/nothing-1b"),
    Break("a file in place of a folder", f"{UP} --model DIR/config.json"),
    Break("a GGUF checkpoint", UP_DIR, gguf),
    Break("no weights", UP_DIR, without("model.safetensors")),
    Break("config.json is no JSON", UP_DIR, lambda folder: (folder / "config.json").write_text("{")),
    Break("an architecture that is like none", UP_DIR, config(architectures=["FalconForCausalLM"], **FALCON)),
    Break("an architecture that is like another", UP_DIR, config(architectures=["Qwen2MoeForCausalLM"], **QWEN2_MOE)),
    Break("bitsandbytes", UP_DIR, config(quantization_config={"quant_method": "bitsandbytes"})),
    Break("AWQ in 8 bits", UP_DIR, config(quantization_config={"quant_method": "awq", "bits": 8})),
    Break("a request longer than the model takes", f"{UP_DIR} --set model.max_model_len=4096"),
    Break("weights of another width", UP_DIR, config(hidden_size=384)),
    Break("weights of another number of layers", UP_DIR, config(num_hidden_layers=7)),
    Break("a file of weights that is cut short", UP_DIR, cut),
    Break("a file of weights that is not there", UP_DIR, sharded),
    Break("weights left on a Git LFS server", UP_DIR, pointer),
    Break("feed-forwards of another width", UP_DIR, config(intermediate_size=1024)),
    Break("an unknown type of RoPE", UP_DIR, config(rope_scaling={"rope_type": "ntk"})),
    Break("an activation that is not served", UP_DIR, config(hidden_act="relu6")),
    Break("a field that is missing", UP_DIR, config(hidden_size=None)),
    Break("ranks that do not divide the heads", f"{UP_DIR} --set island.decode_ranks=4"),
    Break("heads that do not divide", UP_DIR, config(num_key_value_heads=4)),
    Break("more pages than are allowed", f"{UP_DIR} --set cache.num_pages=100000000"),
    Break("no such YAML", "up DIR/cluster.yaml --model DIR"),
    Break("wrong YAML", "up DIR/cluster.yaml --model DIR", yaml("cache: [1")),
    Break("a key without its section", f"{UP_DIR} --set page_size=16"),
    Break("a key of another section", f"{UP_DIR} --set island.max_sequences=8"),
    Break("a typing error in a key", f"{UP_DIR} --set cache.num_page=8"),
    Break("a text for a number", f"{UP_DIR} --set cache.page_size=big"),
    Break("a number out of range", f"{UP_DIR} --set island.num_decode=0"),
    Break("a number for a section", f"{UP_DIR} --set cache=3"),
    Break("no value", f"{UP_DIR} --set cache.page_size"),
    Break("a setting without effect", f"{UP_DIR} --set speculation.tokens=5"),
    Break("a variable that is no YAML", UP_DIR, environ={"TANDEM_CACHE__PAGE_SIZE": "[1"}),
    Break("flags of vLLM", "up DIR --tensor-parallel-size 2 --max-model-len 4096"),
    Break("an unknown option", f"{UP_DIR} --modell x"),
    Break("a network without a token", f"{UP_DIR} --set gateway.host=0.0.0.0"),
    Break("a token file that is not there", f"{UP_DIR} --set security.token_file=DIR/token"),
    Break("a certificate without its key", f"{UP_DIR} --set security.tls_cert=DIR/cert.pem"),
    Break("two servers on one port", f"{UP_DIR} --grpc-port 50051 --http-port 50051"),
    Break("more workers than Ray counts CPUs for", f"{UP_DIR} --set ray.num_cpus=2 --set island.num_prefill=50"),
    Break("GPUs that are not there", "up deploy/gpu-1p1d.yaml --model DIR"),
    Break("no Ray at the address", f"{UP_DIR} --address 127.0.0.1:1"),
    Break("a port that is taken", f"{UP_DIR} --grpc-port PORT"),
    Break("a draft without a model", f"{UP_DIR} --set speculation.method=draft_model"),
    Break("drafts by layers that are not there", f"{UP_DIR} --set speculation.method=mtp"),
    Break("an unknown format of KV", f"{UP_DIR} --set cache.kv_cache_dtype=int4"),
    Break("an adapter where none is served", f'{UP_DIR} --set adapters.folders={{"x":DIR}}'),
    Break("an adapter that is a model", f'{UP_DIR} --set adapters.max_resident=2 --set adapters.folders={{"x":DIR}}'),
    Break("flags of vLLM for adapters", "up DIR --enable-lora --lora-modules x=DIR"),
    Break("a prompt for no cluster", "generate hello --address 127.0.0.1:1"),
    Break("a prompt given twice", "generate hello --token-ids 1,2"),
    Break("token ids that are none", "generate --token-ids 1,a"),
    Break("the status of no cluster", "status nothing"),
    Break("an end of no cluster", "down nothing"),
    Break("a new shape without numbers", "scale"),
    Break("a model over another", "make-model DIR"),
    Break("an unknown command", "serve DIR"),
)


@contextmanager
def prepared(one: Break) -> Iterator[tuple[list[str], dict[str, str], dict[str, str]]]:
    """The command's words, its environment with a runtime folder of its own, and what stands in `words` for the
    checkpoint's folder and for a port that is taken."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        model = Path(folder) / "model"
        shutil.copytree(DEMO, model)
        one.prepare(model)
        port = taken.getsockname()[1]
        words = [word.replace("DIR", str(model)).replace("PORT", str(port)) for word in one.words.split()]
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "HF_"))}
        yield (
            words,
            {**outer, **one.environ, "XDG_RUNTIME_DIR": folder, "COLUMNS": "200"},
            {str(model): "DIR", str(port): "PORT"},
        )


def run(one: Break) -> Outcome:
    """Runs the command."""
    with prepared(one) as (words, environ, placed):
        command = [sys.executable, "-m", "tandem.cluster.cli", *words]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Outcome(done.returncode, seconds, _without_paths(done.stderr, placed))


def run_forked(one: Break) -> Forked:
    """Runs the command in a fork of this process, which has imported the command line but neither torch nor Ray."""
    with prepared(one) as (words, environ, placed), tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            code, heavy = 70, 0  # EX_SOFTWARE: main() has not ended as it does
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ.clear()
                os.environ.update(environ)
                commands.main(words)
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stderr.flush()
                heavy = HEAVY_BIT * any(name in sys.modules for name in HEAVY)
                os._exit(code | heavy)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = _without_paths(said.read(), placed)
    return Forked(Outcome(code & ~HEAVY_BIT, 0.0, text), bool(code & HEAVY_BIT))


def _without_paths(text: str, placed: Mapping[str, str]) -> str:
    for found, typed in {**placed, f"{ROOT}/": "", str(Path.home()): "~"}.items():
        text = text.replace(found, typed)
    return "\n".join(_errors(text))


def _errors(text: str) -> list[str]:
    """Without what the start says of itself, and without usage."""
    lines = [line for line in text.splitlines() if line and not OTHERS.match(line)]
    return [line.removeprefix("tandem: ") for line in lines]


def row(one: Break, outcome: Outcome) -> str:
    cells = one.title, f"tandem {one.words}", str(outcome.code), f"{outcome.seconds:.1f}", outcome.text
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |\n"


def _cell(text: str) -> str:
    for sign, name in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("`", "'"), ("\n", "<br>")):
        text = text.replace(sign, name)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="breaks", description="what tandem says of deliberate mistakes")
    parser.add_argument("--only", default="", help="runs the mistakes whose titles have these words")
    parser.add_argument("--write", action="store_true", help="writes docs/errors.md")
    parser.add_argument("--forked", action="store_true", help="prints rows without seconds, by forks of one process")
    given = parser.parse_args(arguments)
    if given.forked:
        forks = {one.title: run_forked(one) for one in BREAKS if given.only in one.title}
        print_result({title: asdict(one) for title, one in forks.items()})
        return 0
    rows, seconds = list[str](), list[float]()
    for one in (one for one in BREAKS if given.only in one.title):
        outcome = run(one)
        rows.append(row(one, outcome))
        seconds.append(outcome.seconds)
        print(rows[-1], end="", file=sys.stderr, flush=True)
    print_result({"mistakes": len(rows), "most_cpu_seconds": rounded(max(seconds, default=0.0))})
    if given.write:
        PAGE.write_text(HEAD.format(count=len(rows)) + "".join(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
