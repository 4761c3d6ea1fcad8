"""Measures what drafts give on a CPU, through the gRPC server: the demo's trained model without drafts, with prompt
lookup, and with the drafter that was trained for it. Prints JSON.

A cluster of one prefill and one decode worker for each method; they take turns with the demo's prompts, greedy, in
float32. (In 16 bits forwards of several rows round otherwise.) Outputs are equal, or the run ends. Each number is the
median over rounds.

    lone_ms_per_token    each prompt by itself: time per output token after the first; to_none ÷ that without drafts
    together             all prompts at once: output tokens per second; to_none as above
    accepted             ÷ drafted tokens, of lone requests
    tokens_per_step      of a lone request: those of its output after the first ÷ its decode steps
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tandem.cluster.client import AsyncClient
from tandem.cluster.tools.demo import MODEL, OUTPUT_TOKENS, PROMPTS, SPECULATION
from tandem.cluster.tools.embedded import embedded_cluster
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result

NONE = "none"
METHODS = (NONE, *SPECULATION)


def settings_of(method: str) -> dict[str, Any]:
    """Keys of the configuration."""
    return {"model.dtype": "float32", **SPECULATION.get(method, {})}


@dataclass
class Answer:
    tokens: list[int]
    seconds: float  # from the first token to the last
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Round:
    """One of a method."""

    lone: list[Answer]
    together: list[Answer]
    together_seconds: float  # of all

    @property
    def outputs(self) -> list[list[int]]:
        return [answer.tokens for answer in (*self.lone, *self.together)]

    @property
    def seconds_per_token(self) -> float:
        return sum(one.seconds for one in self.lone) / sum(len(one.tokens) - 1 for one in self.lone)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(one.tokens) for one in self.together) / self.together_seconds


async def ask(client: AsyncClient, prompt: str) -> Answer:
    tokens: list[int] = []
    times: list[float] = []
    usage = None
    async for update in client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0):
        tokens += update.token_ids
        times.append(time.perf_counter())
        usage = update.usage
    assert usage is not None
    return Answer(tokens, times[-1] - times[0], usage.drafted_tokens, usage.accepted_tokens)


async def ask_all(address: str, prompts: Sequence[str]) -> Round:
    async with AsyncClient(address) as client:
        lone = [await ask(client, prompt) for prompt in prompts]
        began = time.perf_counter()
        together = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        return Round(lone, together, time.perf_counter() - began)


def measure(addresses: Mapping[str, str], rounds: int, prompts: Sequence[str] = PROMPTS) -> dict[str, dict[str, Any]]:
    """Returns the numbers by method; addresses are by method, too, and NONE is among them. SystemExit if outputs
    differ."""
    ran: dict[str, list[Round]] = {method: [] for method in addresses}
    for number in range(rounds + 1):
        for method, address in addresses.items():
            one = asyncio.run(ask_all(address, prompts))
            if number:  # the first one warms up
                ran[method].append(one)
    due = ran[NONE][0].outputs
    for method, all_of_it in ran.items():
        if any(one.outputs != due for one in all_of_it):
            raise SystemExit(f"the outputs of {method} are not those of {NONE}")
    return {method: _numbers(all_of_it, ran[NONE]) for method, all_of_it in ran.items()}


def _numbers(ran: Sequence[Round], plain: Sequence[Round]) -> dict[str, Any]:
    drafted, accepted = (sum(getattr(one, name) for one in ran[0].lone) for name in ("drafted", "accepted"))
    tokens = sum(len(one.tokens) - 1 for one in ran[0].lone)
    pairs = list(zip(ran, plain, strict=True))
    return {
        "lone_ms_per_token": Measured.median((one.seconds_per_token for one in ran), 1e3),
        "lone_to_none": Measured.median(one.seconds_per_token / other.seconds_per_token for one, other in pairs),
        "together_tokens_per_second": Measured.median(one.tokens_per_second for one in ran),
        "together_to_none": Measured.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs),
        "drafted": drafted,
        "accepted": rounded(accepted / drafted) if drafted else 0.0,
        "tokens_per_step": rounded(tokens / (tokens - accepted)),
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    add_list(parser, "--methods", default=METHODS, choices=METHODS, help="none is always among them")
    options = parser.parse_args()
    with ExitStack() as stack:
        addresses = {
            method: stack.enter_context(embedded_cluster(f"speculation-{method}", MODEL, settings_of(method)))
            for method in dict.fromkeys((NONE, *options.methods))
        }
        print_result(measure(addresses, options.rounds), options)


if __name__ == "__main__":
    main()
