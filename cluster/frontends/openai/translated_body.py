"""Bodies of other APIs that ask for what a chat asks for."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.read_body import checked
from tandem.proto import inference_pb2


class TranslatedBody(AskingBody):
    """A body that is read by its own API's names, and is served as a chat. Errors have its own names, too."""

    renamed: ClassVar[Mapping[str, str]]
    """This API's name for each field of the chat that has another one."""
    prompt_fields: ClassVar[tuple[str, ...]]
    """The fields that may be large: see without_prompt()."""
    open_ended = ChatBody.open_ended

    _chat: ChatBody = PrivateAttr()

    @abstractmethod
    def translated(self) -> dict[str, Any]:
        """Returns the fields of the chat, as a body has them. Raises HttpError."""

    @property
    def chat(self) -> ChatBody:
        """The chat, without its messages. Only after requests()."""
        return self._chat

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """See AskingBody. Raises HttpError, too."""
        fields = {name: value for name, value in self.translated().items() if value is not None}
        try:
            self._chat = checked(ChatBody, fields)
        except HttpError as error:
            raise self._in_own_words(error) from None
        requests = self._chat.requests()
        self._chat = self._chat.without_prompt()
        return requests

    def without_prompt(self) -> Self:
        """See AskingBody."""
        return self.model_copy(update=dict.fromkeys(self.prompt_fields))

    def blame(self, error: InvalidRequest) -> HttpError:
        """See AskingBody."""
        return self._in_own_words(self._chat.blame(error))

    def _in_own_words(self, error: HttpError) -> HttpError:
        name = (error.param or "").partition("[")[0].partition(".")[0]
        own = self.renamed.get(name)
        if own is None:
            return error
        return HttpError(error.status, str(error).replace(name, own, 1), param=own, code=error.code)
