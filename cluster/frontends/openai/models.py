"""/v1/models: the served model under each of its names, and the LoRA adapters over it, as far as the caller may use
them."""

import time
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import Adapter
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.requests.origin import current_origin

MODELS = "/v1/models"


@dataclass(frozen=True)
class Models:
    """Both routes, with the fields of vLLM's cards."""

    names: ServedNames
    root: str  # where the checkpoint is
    max_model_len: int
    quantization: str  # see ServedModel
    created: int = field(default_factory=lambda: int(time.time()))

    async def list(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        allows = current_origin.get().access.allows
        cards = [self._card(name) for name in self.names.model if allows(name)]
        cards += [self._card(one.name, one) for one in self.names.adapters.by_name.values() if allows(one.name)]
        await reply.whole(200, {"object": "list", "data": cards})

    async def one(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """/v1/models/NAME, whose name may have slashes. UnknownModel."""
        name = scope["path"].removeprefix(f"{MODELS}/")
        await reply.whole(200, self._card(name, self.names.adapter(name, current_origin.get().access.allows)))

    def _card(self, name: str, adapter: Adapter | None = None) -> dict[str, Any]:
        """parent: of an adapter, the model that it belongs to."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "tandem",
            "root": self.root if adapter is None else adapter.path,
            "parent": None if adapter is None else self.names.model[0],
            "max_model_len": self.max_model_len,
            "quantization": self.quantization or None,
        }
