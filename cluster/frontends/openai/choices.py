"""The choices of one call: the answers to its prompts, in the order of prompts and then of answers."""

from collections.abc import Iterable
from copy import copy
from typing import Any

from tandem.cluster.frontends.openai.answer import AnyAnswer
from tandem.proto import inference_pb2


class Choices:
    """Gives each message to the answer of its index: events of a stream, or all as a whole."""

    def __init__(self, answer: AnyAnswer, num_prompts: int, num_answers: int) -> None:
        """answer: one that has seen no message. num_answers: to each prompt."""
        self._fresh = answer
        self._num_prompts = num_prompts
        self._num_answers = num_answers
        self._answers: dict[int, AnyAnswer] = {}
        self._prompts: dict[int, bytes] = {}  # token ids of each, where they are told
        self._begun: set[int] = set()
        self._usage = inference_pb2.Usage()
        self._name = ""

    def events(self, prompt: int, message: inference_pb2.GenerateResponse) -> Iterable[bytes]:
        """One message of a stream, as server-sent events in blocks, which are taken before the next message comes.
        prompt: its index."""
        of_prompt = message.prompt_logprobs and not message.token_ids and not message.finish_reason
        answer = self._answer(prompt, message)
        if of_prompt:
            answer.keep(message)  # it becomes part of its choice's first chunk
            return ()
        return answer.events(message)

    def end(self) -> Iterable[bytes]:
        """Returns the blocks that follow the last message of a stream."""
        answer = self._answers.get(0, self._fresh)
        return answer.end(self._name, self._usage)

    def keep(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """One message of an answer that is given as a whole. prompt: its index."""
        self._answer(prompt, message).keep(message)

    def whole(self) -> dict[str, Any]:
        """Returns the answer from all messages of requests that have ended."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        return answers[0].whole(self._name, [answer.choice() for answer in answers], self._usage)

    def _answer(self, prompt: int, message: inference_pb2.GenerateResponse) -> AnyAnswer:
        """Returns the answer that a message belongs to."""
        self._place(prompt, message)
        answer = self._answers.get(message.index)
        if answer is None:
            answer = self._answers[message.index] = copy(self._fresh)
        return answer

    def _place(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """Each prompt is a request of its own. The call has the name of the first one that says something."""
        if not self._name:
            self._name = message.request_id
        if message.prompt_token_bytes:
            self._prompts[prompt] = message.prompt_token_bytes
        if self._num_prompts > 1:
            message.request_id = self._name
            message.index += prompt * self._num_answers
        if message.index not in self._begun and prompt in self._prompts:  # it came with the prompt's first answer only
            message.prompt_token_bytes = self._prompts[prompt]
        self._begun.add(message.index)
        if message.finish_reason and message.HasField("usage"):
            usage, total = message.usage, self._usage
            total.prompt_tokens += usage.prompt_tokens
            total.cached_tokens += usage.cached_tokens
            total.host_cached_tokens += usage.host_cached_tokens
            total.disk_cached_tokens += usage.disk_cached_tokens
            total.output_tokens += usage.output_tokens
            total.drafted_tokens += usage.drafted_tokens
            total.accepted_tokens += usage.accepted_tokens
