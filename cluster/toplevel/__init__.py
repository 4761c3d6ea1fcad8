"""Exports launch, connect, LLM, AsyncLLM, Output, Answer, Client, AsyncClient, Fork, __version__ as `tandem.…`.

Each of the first nine is imported when it is first used, so that `import tandem.cache` stays as light as it is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.cluster.client import AsyncClient as AsyncClient
    from tandem.cluster.client import Client as Client
    from tandem.cluster.client import Fork as Fork
    from tandem.cluster.llm import LLM as LLM
    from tandem.cluster.llm import Answer as Answer
    from tandem.cluster.llm import AsyncLLM as AsyncLLM
    from tandem.cluster.llm import Output as Output
    from tandem.cluster.llm import connect as connect
    from tandem.cluster.llm import launch as launch

__version__ = "0.2.0.dev0"

HOMES = {
    "tandem.cluster.client": ("AsyncClient", "Client", "Fork"),
    "tandem.cluster.llm": ("LLM", "Answer", "AsyncLLM", "Output", "connect", "launch"),
}


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in HOMES.values() for name in names)
