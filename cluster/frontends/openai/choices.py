"""The choices of one call: the answers to its prompts, in the order of prompts and then of answers."""

from collections import defaultdict
from copy import copy
from typing import Any

from tandem.cluster.frontends.openai.answer import AnyAnswer
from tandem.cluster.requests.whole_message import WholeMessage
from tandem.proto import inference_pb2


class Choices:
    """Gives each message to the answer of its index: events of a stream, or all as a whole."""

    def __init__(self, answer: AnyAnswer, num_prompts: int, num_answers: int) -> None:
        """answer: one that has seen no message. num_answers: to each prompt."""
        self._fresh = answer
        self._num_prompts = num_prompts
        self._num_answers = num_answers
        self._answers: dict[int, AnyAnswer] = {}
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

    def events(self, prompt: int, message: inference_pb2.GenerateResponse) -> str:
        """One message of a stream, as server-sent events. prompt: its index."""
        head = self._heads.pop((prompt, message.index), None)
        if head is not None:
            head.MergeFrom(message)
            message = head
        self._place(prompt, message)
        answer = self._answers.get(message.index)
        if answer is None:
            answer = self._answers[message.index] = copy(self._fresh)
        return answer.events(message)

    def end(self) -> str:
        """What stands behind the last message of a stream."""
        answer = self._answers.get(0, self._fresh)
        return answer.end(self._name, self._usage)

    def keep(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """One message of an answer that is given as a whole. prompt: its index."""
        self._place(prompt, message)
        self._wholes[message.index].add(message)

    def whole(self) -> dict[str, Any]:
        """The answer of all messages of requests that have ended."""
        answers = [copy(self._fresh) for _ in self._wholes]
        messages = [self._wholes[index].message for index in sorted(self._wholes)]
        choices = [answer.choice(message) for answer, message in zip(answers, messages, strict=True)]
        return answers[0].whole(self._name, choices, self._usage)

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
            total.drafted_tokens += usage.drafted_tokens
            total.accepted_tokens += usage.accepted_tokens
