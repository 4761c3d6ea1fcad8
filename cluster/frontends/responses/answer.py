"""The answer of /v1/responses: items of output, and the events that build them."""

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Self

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.json_blocks import JsonList, encode
from tandem.cluster.frontends.http.reply import ErrorForm
from tandem.cluster.frontends.openai.answer import chat_logprobs
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.chat_answer import ChatAnswers
from tandem.cluster.frontends.openai.translated_answer import Event, TranslatedAnswer
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.cluster.text.parsers.output_parser import OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, ParsedPart, Reasoning
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2


class Output:
    """The items of one response, as their parts come."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex  # the items' ids have it
        self.items: list[dict[str, Any]] = []
        self._open = ""  # kind of the last item, unless it has ended
        self._texts: list[str] = []  # of the last item
        self._logprobs = JsonList()  # of its tokens, if it is a message
        self._waiting = JsonList()  # of tokens that no message has yet

    def hear(self, logprobs: list[dict[str, Any]]) -> None:
        """Keeps the log-probabilities of more tokens, whatever their parts are: the next text has them."""
        self._waiting.extend(logprobs)

    def _take_logprobs(self) -> JsonList:
        taken, self._waiting = self._waiting, JsonList()
        self._logprobs.join(taken)
        return taken

    def add(self, part: ParsedPart) -> list[Event]:
        """Returns the events of one more part."""
        match part:
            case Reasoning(text):
                begun = self._begin("reasoning", {"summary": [], "content": []})
                return [*begun, self._more("response.reasoning_text.delta", text, content_index=0)]
            case Content(text):
                begun = self._begin("message", {"role": "assistant", "content": []})
                if begun:
                    begun.append(
                        self._event("response.content_part.added", content_index=0, part=_output_text("", JsonList()))
                    )
                more = self._more("response.output_text.delta", text, content_index=0, logprobs=self._take_logprobs())
                return [*begun, more]
            case CallBegin(_, call_id, name):
                ended = self.end()
                return ended + self._begin("function_call", {"call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                return [self._more("response.function_call_arguments.delta", text)]

    def end(self) -> list[Event]:
        """Returns the events that end the last item."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item, text = self.items[-1], "".join(self._texts)
        self._texts = []
        item["status"] = "completed"
        done: list[Event] = []
        if kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            done = [self._event("response.reasoning_text.done", content_index=0, text=text)]
        elif kind == "message":
            self._take_logprobs()
            logprobs, self._logprobs = self._logprobs, JsonList()
            part = _output_text(text, logprobs)
            item["content"] = [part]
            done = [
                self._event("response.output_text.done", content_index=0, text=text, logprobs=logprobs),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        else:
            item["arguments"] = text
            done = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        return [*done, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        """Returns the events that end the last item and begin one of this kind; none while such an item is open."""
        if self._open == kind:
            return []
        events = self.end()
        self._open = kind
        short = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item_id = f"{short}_{self.name}_{len(self.items)}"
        self.items.append({"type": kind, "id": item_id, "status": "in_progress", **fields})
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**self.items[-1]}}
        return [*events, added]

    def _more(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._event(kind, delta=text, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


async def responses_answer(
    chats: ChatAnswers, model: str, body: AskingBody, requests: list[inference_pb2.GenerateRequest]
) -> "ResponsesAnswer":
    """Makes the answer to a body. model: the name to answer with. Raises HttpError as for a chat."""
    assert isinstance(body, ResponsesBody)
    parser = await chats.reading(body.chat, requests)
    return ResponsesAnswer(body, model, chats.tokenizer, parser)


class ResponsesAnswer(TranslatedAnswer):
    """The answer to POST /v1/responses."""

    def __init__(
        self, body: ResponsesBody, model: str, tokenizer: Tokenizer | None, parser: Callable[[], OutputParser | None]
    ) -> None:
        """parser: as for ChatAnswer."""
        super().__init__(parser)
        self._tokenizer = tokenizer
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._output = Output()
        self._number = 0  # of the next event

    def __copy__(self) -> Self:
        """Makes a second answer, which has seen no message."""
        return type(self)(self._body, self._model, self._tokenizer, self._make_parser)

    def end(self, request_id: str, usage: inference_pb2.Usage) -> Iterable[bytes]:
        response = self._ended(request_id, usage)
        return self._named({"type": f"response.{response['status']}", "response": response})

    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        return self._ended(request_id, usage)

    def _begin_events(self, message: inference_pb2.GenerateResponse) -> list[Event]:
        response = self._response(message.request_id, "in_progress", [])
        return [{"type": f"response.{word}", "response": response} for word in ("created", "in_progress")]

    def _hear(self, message: inference_pb2.GenerateResponse) -> None:
        self._output.hear(chat_logprobs(message.logprobs, self._tokenizer))

    def _part_events(self, part: ParsedPart) -> list[Event]:
        return self._output.add(part)

    def _end_events(self) -> list[Event]:
        return self._output.end()

    def _ended(self, request_id: str, usage: inference_pb2.Usage) -> dict[str, Any]:
        cut = self._last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        items = self._output.items
        response = self._response(request_id, "incomplete" if cut else "completed", items)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            if items:
                items[-1]["status"] = "incomplete"
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        return response

    def _response(self, request_id: str, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(exclude_none=True, by_alias=True)
        return {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": False,
            "temperature": given.get("temperature", 1.0),
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": given.get("top_p", 1.0),
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }

    def _named(self, event: Event) -> Iterable[bytes]:
        self._number += 1
        return super()._named({**event, "sequence_number": self._number - 1})


class ResponsesErrors(ErrorForm):
    """An error in a stream is an event with a name."""

    def event(self, error: HttpError) -> str:
        said = self.body(error)["error"]
        named = {name: said[name] for name in ("message", "param")}
        data = {"type": "error", "code": said["code"] or said["type"], **named, "sequence_number": 0}
        return f"event: error\ndata: {encode(data)}\n\n"


def _output_text(text: str, logprobs: JsonList) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
