"""An engine whose actions somebody watches."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Protocol

from tandem.cache.paged_cache import PagedKVCache
from tandem.transfer.transport import Transport
from tandem.workers.engine.engine import ACTIONS, Engine
from tandem.workers.ranks.ranks import ALONE, Ranks
from tandem.workers.runner.model_runner import ModelRunner


class Watcher(Protocol):
    """Sees each action, and has it done."""

    def act(self, engine: Engine, name: str, arguments: tuple[Any, ...], action: Callable[..., Any]) -> Any:
        """Calls action(engine, *arguments) and returns its result. arguments: all parameters, in order."""
        ...


class Nested:
    """Two watchers of one engine. The outer one sees what the inner one makes of an action."""

    def __init__(self, outer: Watcher, inner: Watcher) -> None:
        self._outer, self._inner = outer, inner

    def act(self, engine: Engine, name: str, arguments: tuple[Any, ...], action: Callable[..., Any]) -> Any:
        """See Watcher."""
        return self._outer.act(engine, name, arguments, lambda one, *given: self._inner.act(one, name, given, action))


class WatchedEngine(Engine):
    """Questions and polls are as they were."""

    def __init__(
        self, cache: PagedKVCache, runner: ModelRunner, transport: Transport, watcher: Watcher, shared: Ranks = ALONE
    ) -> None:
        super().__init__(cache, runner, transport, shared)
        self._watcher = watcher


def _watched(name: str) -> Callable[..., Any]:
    action = getattr(Engine, name)
    parameters = list(signature(action).parameters.values())
    names = [one.name for one in parameters]
    defaults = {one.name: one.default for one in parameters if one.default is not Parameter.empty}

    @wraps(action)
    def act(self: WatchedEngine, *arguments: Any, **named: Any) -> Any:
        rest = names[1 + len(arguments) :]
        given = [named[one] if one in named else defaults[one] for one in rest]
        return self._watcher.act(self, name, (*arguments, *given), called)

    def called(engine: Engine, *arguments: Any) -> Any:
        return action(engine, **dict(zip(names[1:], arguments, strict=True)))

    return act


PARAMETERS = {name: tuple(signature(getattr(Engine, name)).parameters)[1:] for name in ACTIONS}
for _name in ACTIONS:
    setattr(WatchedEngine, _name, _watched(_name))
