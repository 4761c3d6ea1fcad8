"""The choices of one call: the answers to its prompts, in the order of prompts and then of answers."""

from collections import defaultdict
from copy import copy
from typing import Any

from tandem.cluster.frontends.openai.answer import Answer
from tandem.cluster.requests.whole_message import WholeMessage
from tandem.proto import inference_pb2


class Choices:
    """Gives each message to the answer of its index: chunks of a stream, or all as a whole."""

    def __init__(self, answer: Answer, num_prompts: int, num_answers: int) -> None:
        """answer: one that has seen no message. num_answers: to each prompt."""
        self._fresh = answer
        self._num_prompts = num_prompts
        self._num_answers = num_answers
        self._answers: dict[int, Answer] = {}
        self._wholes: defaultdict[int, WholeMessage] = defaultdict(WholeMessage)
        self._heads: dict[tuple[int, int], inference_pb2.GenerateResponse] = {}
        self._prompts: dict[int, bytes] = {}  # token ids of each, where they are told
        self._begun: set[int] = set()
        self._usage = inference_pb2.Usage()
        self._name = ""

    def holds(self, prompt: int, message: inference_pb2.GenerateResponse) -> bool:
        """Keeps a message that says something of the prompt only: it becomes part of its choice's first chunk."""
        if not message.prompt_logprobs or message.token_ids or message.finish_reason:
            return False
        key = prompt, message.index
        self._heads.setdefault(key, inference_pb2.GenerateResponse()).MergeFrom(message)
        return True

    def chunk(self, prompt: int, message: inference_pb2.GenerateResponse) -> str:
        """One message of a stream, in JSON. prompt: its index."""
        head = self._heads.pop((prompt, message.index), None)
        if head is not None:
            head.MergeFrom(message)
            message = head
        self._place(prompt, message)
        answer = self._answers.get(message.index)
        if answer is None:
            answer = self._answers[message.index] = copy(self._fresh)
        return answer.chunk(message)

    def usage_chunk(self) -> str:
        """The chunk behind the last one where include_usage is set."""
        return self._fresh.usage_chunk(self._name, self._usage)

    def keep(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """One message of an answer that is given as a whole. prompt: its index."""
        self._place(prompt, message)
        self._wholes[message.index].add(message)

    def whole(self) -> dict[str, Any]:
        """The answer of all messages of requests that have ended."""
        choices = [copy(self._fresh).choice(self._wholes[index].message) for index in sorted(self._wholes)]
        return self._fresh.whole(self._name, choices, self._usage)

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
            total.output_tokens += usage.output_tokens
