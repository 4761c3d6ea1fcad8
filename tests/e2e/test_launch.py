"""A cluster from Python: tests the program's view, and that nothing is left of the cluster."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tandem
from tandem.cluster.cli.runtime_dir import running_clusters
from tandem.cluster.errors import ConfigError, InvalidRequest
from tandem.cluster.protocol import Prompt
from tests.support.client_requests import GREEDY
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.shm import lasting_names

OVERRIDES = {"cache.num_pages": 128, "ray.num_cpus": 2, "gateway.processes": 1}
PROMPTS = [random_prompt(4 + 3 * number, number) for number in range(20)]


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[list[int]]:
    return greedy_all(load_oracle(small_model), PROMPTS, 8)


@pytest.fixture(scope="module")
def llm(small_model: Path) -> Iterator[tandem.LLM]:
    names, children = lasting_names(), set(psutil.Process().children(recursive=True))
    with tandem.launch(model=small_model, overrides=OVERRIDES) as llm:
        yield llm
    assert lasting_names() == names
    left = [process for process in set(psutil.Process().children(recursive=True)) - children if process.is_running()]
    assert not left
    llm.close()  # again


def test_outputs_come_in_the_order_of_their_prompts(llm: tandem.LLM, expected: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, max_tokens=8, **GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert [output.prompt for output in outputs] == PROMPTS
    assert {(output.finish_reason, output.usage.output_tokens) for output in outputs} == {("length", 8)}


@pytest.mark.parametrize("prompt", ["ab", [5, 6, 7], [{"role": "user", "content": "ab"}]])
def test_one_prompt_stands_for_a_list(llm: tandem.LLM, prompt: Prompt) -> None:
    (output,) = llm.generate(prompt, max_tokens=4, logprobs=1, **GREEDY)
    (same,) = llm.generate([prompt], max_tokens=4, logprobs=1, **GREEDY)
    assert output.answers[0].token_ids == same.answers[0].token_ids
    assert output.text == same.text
    assert len(output.logprobs) == len(output.token_ids) == 4


def test_several_answers(llm: tandem.LLM) -> None:
    (output,) = llm.generate("ab", n=3, max_tokens=5, seed=3, prompt_logprobs=0, ignore_eos=True)
    assert len(output.answers) == 3
    assert len(output.prompt_logprobs) == output.usage.prompt_tokens
    assert output.usage.output_tokens == 15


def test_streams(llm: tandem.LLM, expected: list[list[int]]) -> None:
    updates = list(llm.stream(PROMPTS[3], max_tokens=8, **GREEDY))
    assert [token for one in updates for token in one.token_ids] == expected[3]


def test_chat(llm: tandem.LLM) -> None:
    messages = [{"role": "user", "content": "ab"}]
    assert llm.chat(messages, max_tokens=4, **GREEDY).text == llm.generate(messages, max_tokens=4, **GREEDY)[0].text


def test_a_bad_prompt_fails_the_call_and_no_other(llm: tandem.LLM, expected: list[list[int]]) -> None:
    with pytest.raises(InvalidRequest, match="the vocabulary has 512 entries"):
        llm.generate([PROMPTS[0], [99_999_999]], max_tokens=4, **GREEDY)
    assert list(llm.generate(PROMPTS[0], max_tokens=8, **GREEDY)[0].token_ids) == expected[0]


def test_others_connect(llm: tandem.LLM, expected: list[list[int]]) -> None:
    async def ask() -> list[tandem.Output]:
        async with tandem.AsyncLLM(llm.client.address) as same:
            return await same.generate(PROMPTS[:4], max_tokens=8, **GREEDY)

    assert [list(output.token_ids) for output in asyncio.run(ask())] == expected[:4]
    with tandem.connect(llm.client.address) as same:
        assert list(same.generate(PROMPTS[0], max_tokens=8, **GREEDY)[0].token_ids) == expected[0]


def test_commands_find_it_by_its_name(llm: tandem.LLM) -> None:
    named = [cluster for cluster in running_clusters() if cluster.grpc_address == llm.client.address]
    assert [cluster.name.startswith(f"python-{os.getpid()}-") for cluster in named] == [True]


def test_what_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key modle"):
        tandem.launch(overrides={"modle.path": "x"})
    with pytest.raises(ConfigError, match=r"model\.path"), tandem.launch(model=tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"model\.path is null"), tandem.launch():
        pass


@pytest.mark.long
def test_an_async_program_and_one_that_fails(small_model: Path) -> None:
    """The program's error comes through, and its cluster has ended by then."""
    program = f"""
import asyncio, tandem
async def main():
    async with tandem.launch(model={str(small_model)!r}, overrides={OVERRIDES!r}) as llm:
        outputs = await llm.generate([[5, 6], "ab"], max_tokens=3, ignore_eos=True)
        print([len(output.token_ids) for output in outputs], flush=True)
        raise LookupError("of the program")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[3, 3]\n"
    assert done.stderr.endswith("LookupError: of the program\n")
    assert not any(str(small_model) in " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
