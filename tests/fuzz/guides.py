"""Random schemas, regexes and grammars through a cluster: over HTTP as streams, and resumed over gRPC.

python -m tests.fuzz.guides --programs 1000      from a seed drawn now
python -m tests.fuzz.guides --seed 17 --programs 1

What ends by itself follows its guide, as jsonschema, re and a naive recognizer say. A request that is resumed behind
any token goes on with the same tokens.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from tandem.cluster.protocol import build_request
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2_grpc
from tests.support.http_client import COMPLETIONS, chunks
from tests.support.island import Island, running_island
from tests.support.oracle import random_prompt
from tests.support.random_guides import KINDS, random_guide

FIELDS = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}  # over HTTP
VOCAB, MAX_TOKENS, AT_ONCE = 512, 300, 16


class Wrong(AssertionError):
    """An output that does not follow its guide, or goes on otherwise when it is resumed."""


def check(island: Island, seed: int) -> bool:
    """Checks one guide, whose kind the seed decides. Returns whether its output came to its end. Raises Wrong."""
    kind = KINDS[seed % len(KINDS)]
    guide, chance = random_guide(kind, seed), random.Random(seed)
    prompt = random_prompt(chance.randint(1, 40), seed, VOCAB)
    sampling = {"max_tokens": MAX_TOKENS, "temperature": chance.choice([0, 0.7, 1.0, 1.5]), "seed": seed}
    asked = {"prompt": prompt, FIELDS[kind]: guide.content, "return_token_ids": True, **sampling}
    choices = [chunk["choices"][0] for chunk in chunks(island.http, COMPLETIONS, **asked)]
    text, ids = "".join(one["text"] for one in choices), [token for one in choices for token in one["token_ids"]]
    ended = choices[-1]["finish_reason"] == "stop"
    if ended and not guide.follows(text):
        raise Wrong(f"seed {seed}: {text!r} does not follow {guide.content}")
    cut = chance.randrange(len(ids))
    request = build_request(prompt, {"guided": {kind: guide.content}, **sampling}, f"guide-{seed}")
    request.resume.token_ids.extend(ids[:cut])
    with grpc.insecure_channel(island.address) as channel:
        messages = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        rest = [token for message in messages for token in message.token_ids]
    if rest != ids[cut:]:
        raise Wrong(f"seed {seed}: behind {cut} of {len(ids)} tokens it goes on otherwise under {guide.content}")
    return ended


@contextmanager
def running() -> Iterator[Island]:
    """Runs a cluster of a random model."""
    with tempfile.TemporaryDirectory(prefix="guides-") as folder:
        model = Path(folder) / "model"
        make_checkpoint(model, arch="qwen3", size="tiny", seed=1)
        with running_island(model, {"model.max_model_len": 512, "gateway.http_port": 0}) as island:
            yield island


def main() -> int:
    parser = argparse.ArgumentParser(description="Random schemas, regexes and grammars through a cluster.")
    drawn = random.SystemRandom().randrange(2**31)
    parser.add_argument("--seed", type=int, default=drawn, help="the first; default: drawn")
    parser.add_argument("--programs", type=int, default=1000, help="of all kinds in turn")
    options = parser.parse_args()
    seeds, began = range(options.seed, options.seed + options.programs), time.monotonic()
    print(f"seed {options.seed}, {options.programs} programs", flush=True)
    ended, wrong = 0, list[str]()
    with running() as island, ThreadPoolExecutor(AT_ONCE) as pool:
        for one in [pool.submit(check, island, seed) for seed in seeds]:
            try:
                ended += one.result()
            except Wrong as error:
                wrong.append(str(error))
                print(error, file=sys.stderr, flush=True)
    print(f"{ended} of {options.programs} ended, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
