"""Answers of other APIs than OpenAI's chats: one answer, whose parts make items or blocks."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from tandem.cluster.frontends.openai.answer import AnyAnswer, event_blocks
from tandem.cluster.text.parsers.output_parser import OutputParser
from tandem.cluster.text.parsers.parts import Content, ParsedPart
from tandem.proto import inference_pb2

Event = dict[str, Any]
"""A server-sent event's data. Its name is its type."""


class TranslatedAnswer(AnyAnswer):
    """Collects one answer; events say what each message has added to it."""

    def __init__(self, parser: Callable[[], OutputParser | None]) -> None:
        """parser: as for ChatAnswer."""
        self._make_parser = parser
        self._parser = parser()
        self._begun = False
        self._last = inference_pb2.GenerateResponse()  # once it has come

    def keep(self, message: inference_pb2.GenerateResponse) -> None:
        self._add(message)

    def events(self, message: inference_pb2.GenerateResponse) -> Iterable[bytes]:
        begin = [] if self._begun else self._begin_events(message)
        return chain.from_iterable(map(self._named, begin + self._add(message)))

    def choice(self) -> dict[str, Any]:
        return {}

    def _add(self, message: inference_pb2.GenerateResponse) -> list[Event]:
        self._begun = True
        parser, ends = self._parser, bool(message.finish_reason)
        parts: list[ParsedPart] = [Content(message.text)] if message.text else []
        if parser is not None:
            cut = message.finish_reason == inference_pb2.FINISH_REASON_LENGTH
            parts = parser.push(message.text) + (parser.finish(cut=cut) if ends else [])
        self._hear(message)
        events = [event for part in parts for event in self._part_events(part)]
        if ends:
            self._last = message
            events += self._end_events()
        return events

    def _named(self, event: Event) -> Iterable[bytes]:
        return event_blocks(event, event["type"])

    @abstractmethod
    def _begin_events(self, message: inference_pb2.GenerateResponse) -> list[Event]:
        """Returns the events before the first message's parts."""

    def _hear(self, message: inference_pb2.GenerateResponse) -> None:
        """Hears a message before the events of its parts."""

    @abstractmethod
    def _part_events(self, part: ParsedPart) -> list[Event]: ...

    @abstractmethod
    def _end_events(self) -> list[Event]:
        """Returns the events after the last part."""
