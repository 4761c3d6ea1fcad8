"""Measures a verify step of a recurrent layer by how it goes back to the state after the tokens that held.

Prints JSON: milliseconds a layer of each way, and of a plain step of one token; the fastest of some, on one thread.

- each: the step computes token by token, and keeps a state behind each.
- replay: the step keeps the states before it and its inputs. Behind drafts that do not hold, the others are computed
  again.

`python -m tests.benchmarks.draft_states --heads 32 --rows 1 8`
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.torch.delta_rule import chunk_delta_rule, step_delta_rule, unit
from tests.benchmarks.results import print_result

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, log_decay, beta."""


def inputs_of(tokens: int, heads: int, dim: int) -> Inputs:
    """Makes random inputs of so many tokens."""
    q, k = (unit(torch.randn(tokens, heads, dim)) for _ in range(2))
    return q, k, torch.randn(tokens, heads, dim), -torch.rand(tokens, heads), torch.rand(tokens, heads)


def cut(x: Inputs, begin: int, end: int) -> Inputs:
    q, k, v, decay, beta = (y[begin:end] for y in x)
    return q, k, v, decay, beta


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(min(times), 3)


class Step:
    """A step of `rows` sequences, each with `drafted` tokens after its last. A layer has `heads` states [dim, dim]."""

    def __init__(self, rows: int, drafted: int, heads: int, dim: int) -> None:
        self.rows, self.tokens = rows, drafted + 1
        self.given = [inputs_of(self.tokens, heads, dim) for _ in range(rows)]
        self.by_token = [self._all(at) for at in range(self.tokens)]
        self.states = torch.randn(rows, heads, dim, dim)
        self.pages = torch.zeros(rows * self.tokens, heads, dim, dim)

    def _all(self, at: int) -> Inputs:
        """Returns the inputs of the tokens at that place of all sequences."""
        q, k, v, decay, beta = (torch.cat(x) for x in zip(*(cut(one, at, at + 1) for one in self.given), strict=True))
        return q, k, v, decay, beta

    def plain(self) -> None:
        _, states = step_delta_rule(*self.by_token[0], self.states)
        self.pages[: self.rows] = states

    def each(self) -> None:
        states = self.states
        for at, x in enumerate(self.by_token):
            _, states = step_delta_rule(*x, states)
            self.pages[at * self.rows : (at + 1) * self.rows] = states

    def go_back(self) -> None:
        """Goes back as `each` does: copies one of the states."""
        self.pages[: self.rows] = self.pages[self.rows : 2 * self.rows]

    def at_once(self) -> None:
        self.pages[self.rows : 2 * self.rows] = self.states
        for row, x in enumerate(self.given):
            _, self.pages[row] = chunk_delta_rule(*x, self.states[row])

    def replay(self, held: int) -> None:
        for row, x in enumerate(self.given):
            _, self.pages[row] = chunk_delta_rule(*cut(x, 0, held + 1), self.pages[self.rows + row])


@torch.inference_mode()
def measure(rows: int, drafted: int, heads: int, dim: int, repeats: int) -> dict[str, Any]:
    step = Step(rows, drafted, heads, dim)
    state_bytes = 4 * heads * dim * dim
    return {
        "rows": rows,
        "drafted": drafted,
        "plain_step": milliseconds(step.plain, repeats),
        "each": {
            "step": milliseconds(step.each, repeats),
            "go_back": milliseconds(step.go_back, repeats),
            "bytes": rows * drafted * state_bytes,
        },
        "replay": {
            "step": milliseconds(step.at_once, repeats),
            "go_back": {held: milliseconds(lambda held=held: step.replay(held), repeats) for held in range(drafted)},
            "bytes": rows * state_bytes,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafted", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=32, help="value heads; Qwen3-Next-80B has 32")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = options.heads, options.dim, options.repeats
    cases = [(rows, drafted) for rows in options.rows for drafted in options.drafted]
    print_result({f"{rows} rows, {drafted} drafts": measure(rows, drafted, *sizes) for rows, drafted in cases})


if __name__ == "__main__":
    main()
