import inspect
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import typer.main

import tandem
from tandem.cluster.cli import commands as cli
from tandem.cluster.cli.runtime_dir import ClusterLock, running_cluster
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.protocol import TOKEN_IDS_ONLY
from tandem.proto.sampling import Sampling
from tests.cluster.fake_gateway import FakeGateway, serving

Capture = pytest.CaptureFixture[str]
# Of `tandem generate`, whose other options of sampling take a 1.
OTHER_VALUES: dict[str, tuple[tuple[str, ...], object]] = {
    "temperature": (("--temperature", "0"), 0.0),
    "stop": (("--stop", "a", "--stop", "b"), ["a", "b"]),
    "stop_token_ids": (("--stop-token-id", "3"), [3]),
    "ignore_eos": (("--ignore-eos",), True),
}


@pytest.fixture(autouse=True)
def _own_runtime_folder(runtime_folder: Path) -> None:
    """Keeps the user's clusters out of all tests."""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def failed(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Returns the exit code and the one line on stderr."""
    code = run(*arguments)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("tandem: ")
    return code, line


def test_version(capsys: Capture) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"tandem {tandem.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "ray", "grpc", "tokenizers", "transformers"}
    script = f"import sys, tandem.cluster.cli.commands; print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_help_is_whole_in_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No summary of a command is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in (["bench", "serve"], *([name] for name in cast(Any, typer.main.get_command(cli.app)).commands)):
        assert run(*command, "--help") == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, command
    assert run("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    commands = lines[lines.index("Commands:") + 1 :]
    assert len(commands) > 10
    assert [line for line in commands if not line.endswith(".") or line.endswith("...")] == []


def test_options_are_described_by_sentences() -> None:
    """Each begins with a verb and ends with a full stop."""
    group: Any = typer.main.get_command(cli.app)
    commands = {**group.commands, **group.commands["bench"].commands}
    given = {
        f"{name} {parameter.name}": parameter.help
        for name, command in commands.items()
        if command is not group.commands["bench"]
        for parameter in command.params
    }
    assert len(given) > 100
    assert {name: text for name, text in given.items() if not re.fullmatch(r"[A-Z][a-z]+s [^…]*\.", text or "")} == {}


def test_unknown_options_exit_with_2(capsys: Capture) -> None:
    assert run("generate", "x", "--max-token", "3") == 2
    assert "--max-token" in capsys.readouterr().err


class TestUp:
    def test_overrides_reach_the_launcher(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[ClusterConfig, str | None, bool]] = []

        def run_cluster(config: ClusterConfig, address: str | None, *, replace: bool) -> None:
            seen.append((config, address, replace))

        launcher = SimpleNamespace(run_cluster=run_cluster)
        before = dict(os.environ)
        monkeypatch.setitem(sys.modules, "tandem.cluster.cli.foreground", launcher)
        path = tmp_path / "c.yaml"
        path.write_text("name: mine\n")
        model = tmp_path / "it's a model"
        options = ("--model", str(model), "--grpc-port", "0", "--set", "cache.num_pages=7", "--set", "name=other")
        assert run("up", str(path), *options, "--verify-kv", "--address", "10.0.0.1:6379") == 0
        ((config, address, replaces),) = seen
        assert not replaces
        assert (config.name, config.cache.num_pages, config.gateway.port) == ("other", 7, 0)
        assert config.model.path == str(model)
        assert config.island.verify_kv
        assert address == "10.0.0.1:6379"
        assert dict(os.environ) == before

    def test_a_model_is_needed(self, tmp_path: Path, capsys: Capture) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("name: mine\n")
        code, line = failed(capsys, "up", str(path))
        assert code == 2
        assert "model.path" in line

    @pytest.mark.parametrize(
        ("typed", "meant"),
        [("page_size=16", "cache.page_size"), ("island.max_batch_tokens=1", "scheduler.max_batch_tokens")],
    )
    def test_keys_of_another_section_are_found(self, tmp_path: Path, capsys: Capture, typed: str, meant: str) -> None:
        path = tmp_path / "c.yaml"
        path.touch()
        _, line = failed(capsys, "up", str(path), "--set", typed)
        assert f"unknown key {typed.partition('=')[0]}; did you mean {meant}? known here: " in line

    def test_a_section_is_named_without_its_secrets(self, tmp_path: Path, capsys: Capture) -> None:
        path = tmp_path / "c.yaml"
        path.touch()
        words = ("--set", "security.api_key=sesame-0123456789", "--set", "security.tls_cert=/c.pem")
        _, line = failed(capsys, "up", str(path), *words)
        assert line.startswith("tandem: security is a section with api_key, tls_cert; it must have both tls_cert and")
        assert "sesame" not in line

    def test_bad_configs_exit_with_2(self, tmp_path: Path, capsys: Capture) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("cache: {num_page: 1}\n")
        code, line = failed(capsys, "up", str(path))
        assert code == 2
        assert "did you mean cache.num_pages?" in line
        assert failed(capsys, "up", str(tmp_path / "none.yaml"))[0] == 2
        assert failed(capsys, "up", str(path), "--set", "x")[0] == 2


class TestDown:
    def test_none_runs(self, capsys: Capture) -> None:
        code, line = failed(capsys, "down")
        assert code == 1
        assert "'local'" in line
        assert "running: none" in line

    def test_other_names_are_told(self, capsys: Capture) -> None:
        with ClusterLock("mine"):
            code, line = failed(capsys, "down", "other")
        assert code == 1
        assert "running: mine" in line

    def test_which_of_several_must_be_said(self, capsys: Capture) -> None:
        with ClusterLock("local"), ClusterLock("mine"):
            code, line = failed(capsys, "down")
        assert code == 2
        assert line == "tandem: give the name of one; running: local, mine"

    def test_stops_the_only_one(self, capsys: Capture) -> None:
        script = (
            "import signal, tandem.cluster.cli.runtime_dir as r\n"
            "lock = r.ClusterLock('mine')\n"
            "print('up', flush=True)\n"
            "signal.pause()"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        assert run("down") == 0
        assert capsys.readouterr().out == "stopped mine\n"
        assert process.wait(5) == -signal.SIGTERM
        process.stdout.close()
        assert running_cluster("mine") is None

    def test_one_that_does_not_end(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        killed: list[tuple[int, int]] = []
        monkeypatch.setattr(os, "kill", lambda *values: killed.append(values))
        with ClusterLock("mine"):
            code, line = failed(capsys, "down", "mine", "--timeout", "0.1")
        assert code == 1
        assert killed == [(os.getpid(), signal.SIGTERM)]
        assert f"pid {os.getpid()}" in line


class TestGenerate:
    def test_streams_text_from_the_running_cluster(self, capsys: Capture) -> None:
        gateway = FakeGateway()
        with serving(gateway) as address, ClusterLock("mine") as lock:
            lock.publish(address, {})
            assert (
                run("generate", "hello", "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b") == 0
            )
        assert capsys.readouterr().out == "one two\n"
        (request,) = gateway.requests
        assert request.text == "hello"
        assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["a", "b"])
        assert request.sampling.HasField("seed")  # so that it can be resumed with the same draws
        assert request.request_id

    def test_options_of_sampling_reach_the_gateway(self) -> None:
        """All options with a field's name are tried, each alone."""
        names = [name for name in inspect.signature(cli.generate).parameters if name in Sampling.__annotations__]
        assert {*OTHER_VALUES} < {*names}
        gateway = FakeGateway()
        with serving(gateway) as address:
            for name in names:
                option, value = OTHER_VALUES.get(name, ((f"--{name.replace('_', '-')}", "1"), 1))
                assert run("generate", "x", *option, "--address", address) == 0
                sent = {field.name: value for field, value in gateway.requests[-1].sampling.ListFields()}
                assert sent[name] == value
                assert sent.keys() <= {name, "seed"}  # so that it can be resumed

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_what_the_terminal_cannot_show(self, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
        """Such characters do not end the output; JSON has them whole."""
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        with serving(FakeGateway(words=("caf\u00e9", " \u4f60"))) as address:
            assert run("generate", "x", "--address", address, *options) == 0
        sys.stdout.flush()
        text = written.getvalue().decode("ascii")
        assert (json.loads(text)["text"] if options else text) == ("caf\u00e9 \u4f60" if options else "caf? ?\n")

    def test_prints_token_ids_without_a_tokenizer(self, capsys: Capture) -> None:
        gateway = FakeGateway(words=("", ""))
        with serving(gateway) as address:
            assert run("generate", "--token-ids", "1, 2,3", "--address", address) == 0
        assert capsys.readouterr().out == "0 1\n"
        assert struct.unpack("<3I", gateway.requests[0].token_bytes) == (1, 2, 3)

    def test_json(self, capsys: Capture) -> None:
        with serving(FakeGateway()) as address:
            assert run("generate", "x", "--json", "--address", address) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["text"], printed["token_ids"], printed["finish_reason"]) == ("one two", [0, 1], "stop")
        counts = {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 2}
        stored = {"host_cached_tokens": 0, "disk_cached_tokens": 0}
        assert printed["usage"] == {**counts, "drafted_tokens": 0, "accepted_tokens": 0, **stored}
        assert printed["timings"]["bytes_pushed"] == 7
        assert len(printed["token_seconds"]) == 2

    def test_several_answers_stand_one_behind_the_other(self, capsys: Capture) -> None:
        gateway = FakeGateway()
        with serving(gateway) as address:
            assert run("generate", "x", "--n", "3", "--address", address) == 0
            assert capsys.readouterr().out == "[0] one two\n[1] one1 two1\n[2] one2 two2\n"
            assert run("generate", "x", "--n", "2", "--json", "--address", address) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [request.sampling.n for request in gateway.requests] == [3, 2]
        assert [one["text"] for one in printed["answers"]] == ["one two", "one1 two1"]
        assert [one["token_ids"] for one in printed["answers"]] == [[0, 1], [0, 1]]
        assert printed["usage"]["output_tokens"] == 4
        gateway = FakeGateway(words=("", ""))
        with serving(gateway) as address:
            assert run("generate", "--token-ids", "1", "--n", "2", "--address", address) == 0
        assert capsys.readouterr().out == "[0] 0 1\n[1] 0 1\n"

    def test_prompts_from_file_and_stdin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gateway = FakeGateway()
        path = tmp_path / "prompt.txt"
        path.write_text("from a file")
        with serving(gateway) as address:
            assert run("generate", "--file", str(path), "--chat", "--address", address) == 0
            for arguments in ((), ("-",)):
                monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
                assert run("generate", *arguments, "--address", address) == 0
        chat, *piped = gateway.requests
        assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("user", "from a file")]
        assert [request.text for request in piped] == ["from stdin", "from stdin"]

    @pytest.mark.parametrize(
        ("stdin", "part"),
        [(None, "no prompt: give it"), (io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"), "stdin: 'utf-8' codec")],
        ids=["closed", "no text"],
    )
    def test_stdin_without_a_prompt(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOWrapper | None, part: str
    ) -> None:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, line = failed(capsys, "generate")
        assert code == 2
        assert part in line

    def test_stdout_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit, match="stdout is closed"):
            cli.main(["version"])

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("x", "--token-ids", "1"), "give the prompt once"),
            (("--token-ids", "1,a"), "--token-ids is '1,a'"),
            (("--token-ids", ""), "--token-ids is ''"),
            (("--token-ids", "1", "--chat"), "--chat needs text"),
            (("--file", "/nonexistent"), "--file /nonexistent"),
            (("--token-ids", "-1", "--address", "127.0.0.1:1"), "-1"),
            (("x", "--n", "-1", "--address", "127.0.0.1:1"), "tandem: --n is -1"),
            (("x", "--seed", "-1", "--address", "127.0.0.1:1"), "tandem: --seed is -1"),
        ],
    )
    def test_bad_usage(self, capsys: Capture, arguments: tuple[str, ...], part: str) -> None:
        code, line = failed(capsys, "generate", *arguments)
        assert code == 2
        assert part in line

    @pytest.mark.parametrize(
        ("status", "code"), [(grpc.StatusCode.INVALID_ARGUMENT, 2), (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)]
    )
    def test_what_the_gateway_refuses(self, capsys: Capture, status: grpc.StatusCode, code: int) -> None:
        with serving(FakeGateway(words=(), fails=(status, "top_p is 2"))) as address:
            assert failed(capsys, "generate", "x", "--address", address)[0] == code

    @pytest.mark.parametrize(
        ("said", "line"),
        [
            (f"text: {TOKEN_IDS_ONLY}", "the prompt is text; the checkpoint has no tokenizer.json: give --token-ids"),
            ("sampling.top_p is 2; it must be in (0, 1]", "--top-p is 2; it must be in (0, 1]"),
            ("sampling.stop_token_ids[0] is 9; the", "--stop-token-id[0] is 9; the"),
            ("token_ids[0] is 9; the vocabulary has", "token_ids[0] is 9; the vocabulary has"),
        ],
    )
    def test_refusals_name_the_options(self, capsys: Capture, said: str, line: str) -> None:
        with serving(FakeGateway(words=(), fails=(grpc.StatusCode.INVALID_ARGUMENT, said))) as address:
            assert failed(capsys, "generate", "x", "--address", address) == (2, f"tandem: {line}")

    def test_an_error_in_the_middle_stands_on_a_line_of_its_own(self, capsys: Capture) -> None:
        with serving(FakeGateway(fails=(grpc.StatusCode.DEADLINE_EXCEEDED, "too late"))) as address:
            assert run("generate", "x", "--address", address) == 1
        assert capsys.readouterr() == ("one two\n", f"tandem: {address}: too late\n")

    def test_nobody_there(self, capsys: Capture) -> None:
        with serving(FakeGateway()) as address:
            pass
        code, line = failed(capsys, "generate", "x", "--address", address)
        assert code == 1
        assert address in line


class TestStatus:
    def test_table(self, capsys: Capture) -> None:
        with serving(FakeGateway()) as address:
            assert run("status", "--address", address) == 0
        printed = capsys.readouterr().out
        assert "decode" in printed
        assert "63" in printed
        assert "lost" in printed
        assert "gateway restarts 2" in printed
        assert "4711" in printed
        assert "is started again" in printed.split("island")[0]
        assert "island j  epoch 7  shared_memory  restarts 6  is started again" in printed

    def test_json(self, capsys: Capture) -> None:
        with serving(FakeGateway()) as address:
            assert run("status", "--json", "--address", address) == 0
        workers = json.loads(capsys.readouterr().out)["islands"][0]["workers"]
        assert (workers[1]["num_pages"], workers[1]["running"], workers[0]["alive"]) == (64, 0, False)

    def test_logs_of_this_machine(self, capsys: Capture) -> None:
        with serving(FakeGateway()) as address, ClusterLock("mine") as lock:
            lock.publish(address, {}, "/somewhere/logs")
            for words in ((), ("mine",), ("--address", address)):
                assert run("status", *words) == 0
                assert capsys.readouterr().out.endswith("\nlogs in /somewhere/logs\n")
            assert run("status", "--json") == 0
            assert "logs" not in json.loads(capsys.readouterr().out)


class TestMakeModel:
    def test_writes_a_checkpoint(self, tmp_path: Path, capsys: Capture) -> None:
        assert run("make-model", str(tmp_path / "m"), "--arch", "qwen3", "--seed", "3") == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / 'm'}\n"
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert (tmp_path / "m" / "model.safetensors").exists()

    def test_overwrites_nothing(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "config.json").write_text("somebody's")
        code, line = failed(capsys, "make-model", str(tmp_path))
        assert code == 2
        assert "is not empty" in line
        assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody's"]

    @pytest.mark.parametrize("option", [("--arch", "gpt2"), ("--size", "huge"), ("--seed", "-1")])
    def test_bad_choices(self, tmp_path: Path, capsys: Capture, option: tuple[str, str]) -> None:
        assert run("make-model", str(tmp_path / "m"), *option) == 2
        assert option[0] in capsys.readouterr().err

    def test_a_layer_that_drafts(self, tmp_path: Path, capsys: Capture) -> None:
        assert run("make-model", str(tmp_path / "m"), "--arch", "qwen3_5", "--mtp") == 0
        capsys.readouterr()
        code, line = failed(capsys, "make-model", str(tmp_path / "other"), "--mtp")
        assert code == 2
        assert "--mtp is given with --arch llama; --arch must be one of deepseek_v3, glm4_moe" in line

    def test_choices_are_the_known_ones(self, capsys: Capture) -> None:
        from tandem.cluster.tools.architectures import ARCHITECTURES, SIZES

        assert run("make-model", "--help") == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in (*ARCHITECTURES, *SIZES))

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "file").write_text("")
        code, line = failed(capsys, "make-model", str(tmp_path / "file" / "m"))
        assert code == 1
        assert "cannot be written" in line
