import inspect
import re
from pathlib import Path

import pytest

from tandem.cluster.cli import commands
from tandem.cluster.cli.commands import OWN_FLAGS
from tandem.cluster.cli.vllm_flags import FLAGS, PAGE, check_flags
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]


def test_flags_of_vllm_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(["up", "--model", "m", "--tensor-parallel-size", "2", "--max_model_len=9"])
    assert capsys.readouterr().err.splitlines() == [
        "tandem: --tensor-parallel-size is an option of vllm serve; here it is --set island.prefill_ranks=… and --set "
        "island.decode_ranks=…",
        "tandem: --max_model_len is an option of vllm serve; here it is --set model.max_model_len=…",
        f"tandem: {PAGE} has vLLM's other flags",
    ]


def test_a_command_and_a_model_as_vllm_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["serve", "m"], "serve is a command of vllm; here it is `tandem up CONFIG --model MODEL`"),
        (["up", str(tmp_path)], "Is a directory; it must be a YAML file: give a model by --model"),
        (["up", "Nobody/nothing-1b"], "No such file or directory; it must be a YAML file: give a model by --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            commands.main(words)
        assert said in capsys.readouterr().err


def test_our_own_options_pass() -> None:
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(commands.up).parameters}
    assert options & set(FLAGS) == set(OWN_FLAGS)
    check_flags(["c.yaml", *options, "--set", "model.path=--port"], OWN_FLAGS)
    with pytest.raises(UsageError, match="--port is an option of vllm serve; here it is --http-port"):
        check_flags(["--port", "8000"], OWN_FLAGS)


def test_all_are_on_the_page_and_all_keys_exist() -> None:
    page = (ROOT / PAGE.partition("#")[0]).read_text(encoding="utf-8")
    assert {flag for flag in FLAGS if flag.startswith("--") and f"`{flag}" not in page} == set()
    table = page.partition("\n## Flags\n")[2].partition("\n### ")[0]
    rows = (line.partition(" | ")[0] for line in table.splitlines() if line.startswith("| `"))
    listed = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    assert listed - set(FLAGS) == {"--model"}, "ours, too"
    defaults = ClusterConfig().model_dump()
    keys = set(re.findall(r"(\w+)\.(\w+)", " ".join(FLAGS.values())))
    assert {f"{section}.{key}" for section, key in keys if key not in defaults[section]} == set()
