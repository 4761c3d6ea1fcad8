"""The whole output of one prompt."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.cluster.client.client_messages import GenerateUpdate, Timings, TokenLogprobs, Usage
from tandem.cluster.protocol import Prompt


@dataclass(frozen=True)
class Answer:
    """One of n answers. finish_reason: stop or length. logprobs: one for each token, if they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    timings: Timings
    stop_reason: str | int | None  # as in GenerateUpdate


@dataclass(frozen=True)
class Output:
    """The answers to one prompt, in the order of their index. text, token_ids and so on are the first one's."""

    prompt: Prompt
    answers: tuple[Answer, ...]
    usage: Usage  # of all answers
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # if they were asked for; None for the first token
    prompt_token_ids: tuple[int, ...] = ()  # where they were asked for

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.answers[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.answers[0].logprobs


def output_of(prompt: Prompt, updates: Iterable[GenerateUpdate]) -> Output:
    """updates: all of a request that has ended."""
    parts: dict[int, list[GenerateUpdate]] = {}
    prompt_logprobs: list[TokenLogprobs | None] = []
    usage: Usage | None = None
    token_ids: tuple[int, ...] = ()
    for one in updates:
        token_ids = token_ids or one.prompt_token_ids
        parts.setdefault(one.index, []).append(one)
        prompt_logprobs += one.prompt_logprobs
        usage = one.usage or usage
    assert usage is not None, "the last message has it"
    answers = tuple(_answer(parts[index]) for index in sorted(parts))
    return Output(prompt, answers, usage, tuple(prompt_logprobs), token_ids)


def _answer(parts: list[GenerateUpdate]) -> Answer:
    last = parts[-1]
    assert last.finish_reason is not None, "an answer's last message has it"
    assert last.timings is not None, "an answer's last message has them"
    return Answer(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        last.finish_reason,
        tuple(token for part in parts for token in part.logprobs),
        last.timings,
        last.stop_reason,
    )
