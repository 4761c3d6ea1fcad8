"""Computed prompt tokens of chats with many turns, against the least that they need, on two workers of each kind.

100 chats of 10 turns share 5 system prompts. They come at random, 10 a second, and at most 16 run at a time. Each sends
its next turn once it has its answer. Each policy has a cluster of its own; their tokens must be equal. Prints JSON, for
each policy:

    computed    prompt tokens that prefill workers computed: prompt_tokens - cached_tokens, over all turns
    over_ideal  computed ÷ what one prefill worker without end of memory would compute: of each prompt all but the
                longest run of whole pages that an earlier prompt of any chat began with
    extra       computed - ideal, of each chat's first turn and of all others
    answers     tokens of earlier answers in `ideal`. A decode worker made their KV and keeps it, so a prefill worker
                computes it once more. Where decode workers compute prompts (scheduler.roles: adaptive), none need it
    pushed      bytes pushed ÷ those that decode workers would lack if each had what all have
    seconds     from the first request to the last token
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cluster.client import AsyncClient
from tandem.cluster.client.client_messages import Timings, Usage
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result

PAGE = 16
SYSTEMS, SYSTEM_TOKENS = 5, 200
CHATS_A_SECOND = 10.0
FIRST, LAST = 3, 500  # token ids
POLICIES = ("least_loaded", "prefix_aware")


class Prefixes:
    """Whole pages of sequences, without end."""

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def missing(self, tokens: Sequence[int]) -> int:
        """Tokens behind the longest known prefix; one at least, as on a worker."""
        pages = (len(tokens) - 1) // PAGE
        known = next((n for n in range(pages, 0, -1) if tuple(tokens[: n * PAGE]) in self._known), 0)
        return len(tokens) - known * PAGE

    def add(self, tokens: Sequence[int]) -> None:
        for pages in range(1, len(tokens) // PAGE + 1):
            self._known.add(tuple(tokens[: pages * PAGE]))


class Ideal:
    """Counts the least work that the turns need, in the order in which they were sent."""

    def __init__(self) -> None:
        self._prompts, self._sequences = Prefixes(), Prefixes()
        self.prompt = self.computed = self.answers = self.pushed = 0

    def ask(self, prompt: Sequence[int]) -> int:
        """A turn's prompt is sent. Tokens to compute."""
        computed, lacking = self._prompts.missing(prompt), self._sequences.missing(prompt)
        self.prompt += len(prompt)
        self.computed += computed
        self.answers += computed - lacking
        self.pushed += lacking
        self._prompts.add(prompt)
        self._sequences.add(prompt)
        return computed

    def answered(self, sequence: Sequence[int]) -> None:
        self._sequences.add(sequence[:-1])  # the last token is never fed back


class Chats:
    """All chats, and what they made the cluster do."""

    def __init__(self, chats: int, turns: int, seed: int) -> None:
        draw = random.Random(seed)
        systems = [[draw.randint(FIRST, LAST) for _ in range(SYSTEM_TOKENS + 7 * n)] for n in range(SYSTEMS)]
        self._questions = [
            [[draw.randint(FIRST, LAST) for _ in range(draw.randint(20, 80))] for _ in range(turns)]
            for _ in range(chats)
        ]
        self._prompts = [list(draw.choice(systems)) for _ in range(chats)]
        self._max_tokens = [[draw.randint(16, 48) for _ in range(turns)] for _ in range(chats)]
        self._pauses = [draw.expovariate(CHATS_A_SECOND) for _ in range(chats)]
        self.ideal = Ideal()
        self.computed = self.bytes_pushed = 0
        self.extra = {"first turns": 0, "later turns": 0}
        self.tokens: dict[tuple[int, int], list[int]] = {}

    async def run(self, address: str, at_a_time: int) -> None:
        room = asyncio.Semaphore(at_a_time)
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:

            async def one(number: int) -> None:
                await self._chat(client, number)
                room.release()

            for number, pause in enumerate(self._pauses):
                await asyncio.sleep(pause)
                await room.acquire()
                group.create_task(one(number))

    async def _chat(self, client: AsyncClient, number: int) -> None:
        prompt = self._prompts[number]
        for turn, question in enumerate(self._questions[number]):
            prompt = prompt + question
            least = self.ideal.ask(prompt)
            answer: list[int] = []
            usage: Usage | None = None
            timings: Timings | None = None
            stream = client.generate(prompt, max_tokens=self._max_tokens[number][turn], temperature=0, ignore_eos=True)
            async for update in stream:
                answer += update.token_ids
                usage, timings = update.usage, update.timings
            assert usage is not None
            assert timings is not None
            computed = usage.prompt_tokens - usage.cached_tokens
            self.computed += computed
            self.extra["later turns" if turn else "first turns"] += computed - least
            self.bytes_pushed += timings.bytes_pushed
            self.tokens[number, turn] = answer
            prompt = prompt + answer
            self.ideal.answered(prompt)


def measure(folder: str, policy: str, options: Any) -> tuple[dict[str, Any], dict[tuple[int, int], list[int]]]:
    overrides = [
        "name=bench-multi-turn",
        "gateway.port=0",
        f"model.path={folder}",
        f"gateway.routing_policy={policy}",
        f"cache.page_size={PAGE}",
        f"cache.num_pages={options.pages}",
        "island.num_prefill=2",
        "island.num_decode=2",
        *options.set,
    ]
    chats = Chats(options.chats, options.turns, seed=1)
    cluster = Cluster(load_config(None, overrides))
    try:
        address = cluster.start()
        began = time.perf_counter()
        asyncio.run(chats.run(address, options.at_a_time))
        seconds = time.perf_counter() - began
        with_client = asyncio.run(_bytes_of_token(address))
    finally:
        cluster.stop()
    ideal = chats.ideal
    result = {
        "prompt": ideal.prompt,
        "computed": chats.computed,
        "ideal": ideal.computed,
        "extra": chats.extra,
        "answers": ideal.answers,
        "over_ideal": round(chats.computed / ideal.computed, 4),
        "pushed": round(chats.bytes_pushed / (ideal.pushed * with_client), 4),
        "seconds": round(seconds, 2),
    }
    return result, chats.tokens


async def _bytes_of_token(address: str) -> int:
    async with AsyncClient(address) as client:
        return (await client.model_info()).kv_bytes_per_token


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-a-time", type=int, default=16, help="chats that are under way")
    parser.add_argument("--pages", type=int, default=16_384, help="of each worker; the default suffices for all chats")
    parser.add_argument("--set", action="append", default=[], help="dotted.key=value of the cluster's config")
    add_list(parser, "--policies", default=POLICIES, choices=POLICIES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arch="llama", size="tiny", seed=0)
        found = {policy: measure(folder, policy, options) for policy in options.policies}
    results = {policy: result for policy, (result, _) in found.items()}
    tokens = [tokens for _, tokens in found.values()]
    if any(one != tokens[0] for one in tokens):
        raise SystemExit("the policies gave unlike tokens")
    targets = []
    if "prefix_aware" in results:
        targets.append(
            at_most("computed prompt tokens ÷ ideal, prefix_aware", results["prefix_aware"]["over_ideal"], 1.03)
        )
    if len(results) == 2:
        less = results["least_loaded"]["computed"] / results["prefix_aware"]["computed"]
        targets.append(at_least("computed prompt tokens, least_loaded ÷ prefix_aware", less, 1.0))
    changed = [
        f"{name} {getattr(options, name)}"
        for name in ("chats", "turns", "at_a_time", "pages")
        if getattr(options, name) != parser.get_default(name)
    ] + options.set
    print_result(results | ({"case": " ".join(changed)} if changed else {"targets": targets}), options)


if __name__ == "__main__":
    main()
