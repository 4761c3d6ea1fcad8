"""vLLM's routes that load LoRA adapters and unload them."""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import Field

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.adapters.changes import AdapterChanges
from tandem.cluster.frontends.http.body import read_body_of
from tandem.cluster.frontends.http.caller import host_of
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.read_body import read_object
from tandem.cluster.requests.body_budget import BodyBudget

MAX_BYTES = 1 << 16  # of a body
TEXT = "text/plain; charset=utf-8"
FIELDS = {"name": "lora_name", "path": "lora_path"}
BodyT = TypeVar("BodyT", bound=BodyObject)


class LoadBody(BodyObject):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(description="text: what requests give as their model")
    lora_path: str = Field(description="text: the absolute path of a PEFT folder")
    load_inplace: bool = Field(default=False, description="true or false")


class UnloadBody(BodyObject):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(description="text: the name of an adapter")
    lora_int_id: int | None = Field(default=None, description="an integer, which changes nothing")


@dataclass(frozen=True)
class AdapterRoutes:
    """Both routes. The gateway's token admits their callers."""

    changes: AdapterChanges
    bodies: BodyBudget

    async def load(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        body = await self._read(LoadBody, scope, receive)
        try:
            await self.changes.add(body.lora_name, body.lora_path, load_inplace=body.load_inplace)
        except InvalidRequest as error:
            raise _in_own_words(error) from error
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        await reply.content(200, text.encode(), TEXT)

    async def unload(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        body = await self._read(UnloadBody, scope, receive)
        await self.changes.remove(body.lora_name)
        await reply.content(200, f"Success: LoRA adapter '{body.lora_name}' removed successfully.".encode(), TEXT)

    async def _read(self, kind: type[BodyT], scope: Scope, receive: Receive) -> BodyT:
        held = self.bodies.open(host_of(scope))
        try:
            body, _ = read_object(kind, await read_body_of(scope, receive, held, MAX_BYTES))
            return body
        finally:
            held.release()


def _in_own_words(error: InvalidRequest) -> HttpError:
    """Returns the error with the name that the field has in the body."""
    text = str(error)
    name, _, rest = text.partition(" ")
    field = FIELDS.get(name)
    return HttpError(400, text) if field is None else HttpError(400, f"{field} {rest}", param=field)
