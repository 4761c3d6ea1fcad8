"""The HTTP server's calls, as an ASGI application."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from urllib.parse import urlsplit

from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import CallError, Unauthenticated
from tandem.cluster.frontends.http.caller import ClientGone, credentials_of, header
from tandem.cluster.frontends.http.cors import Cors
from tandem.cluster.frontends.http.errors import MODEL_NOT_FOUND, RATE_LIMITED, HttpError
from tandem.cluster.frontends.http.monitoring import Monitoring
from tandem.cluster.frontends.http.reply import ErrorForm, Receive, Reply, Scope, Send
from tandem.cluster.keys.gate import Gate
from tandem.cluster.keys.key_cells import Sum
from tandem.cluster.requests.call_limit import CallLimit
from tandem.cluster.requests.origin import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    Origin,
    check_given_id,
    current_origin,
    own_id,
)

Route = Callable[[Scope, Receive, Reply], Awaitable[None]]
Routes = dict[str, tuple[tuple[str, ...], Route]]
NAMED = "/{name}"
"""A path that ends with it stands for all names in this place, which may have slashes."""

log = logging.getLogger(__name__)


class HttpApp:
    """An ASGI application. Errors are JSON, too; a stream that has begun ends with an error as its last event."""

    def __init__(
        self,
        routes: Routes,
        monitoring: Monitoring,
        *,
        limit: CallLimit,
        gate: Gate,
        rejected: Callable[[int], None],
        forms: Mapping[str, ErrorForm] = MappingProxyType({}),
        origins: Sequence[str] = (),
        operators: Collection[str] = (),
    ) -> None:
        """routes: beside those of monitoring, with their methods. limit: bounds calls, monitors' apart. gate: admits
        callers. rejected: hears of each error's status. forms: of errors, for paths whose APIs have one of
        their own. origins: of web pages that may call, see Cors. operators: paths of routes that no key opens, beside
        those of monitoring."""
        self._forms = forms
        self._routes: Routes = {**monitoring.routes, **routes}
        self._monitoring = monitoring
        self._limit = limit
        self._gate = gate
        self._operators = {*operators, *monitoring.routes} - monitoring.open
        self._rejected = rejected
        self._named = [path.removesuffix("{name}") for path in routes if path.endswith(NAMED)]
        self._cors = Cors(origins)
        self._calls: set[asyncio.Task[object]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = asyncio.current_task()
        assert call is not None, "ASGI calls its application in a task"
        path = scope["path"]
        if path.endswith("/") and path not in self._routes:
            scope = {**scope, "path": path.removesuffix("/")}
        reply = Reply(send, self._forms.get(scope["path"]))
        reply.headers |= self._cors.headers(scope)
        try:
            if self._cors.is_question(scope):
                return await self._cors.answer(scope, reply)
            if scope["path"] not in self._monitoring.routes:
                self._name(scope, reply)
            route = self._route(scope)
            self._calls.add(call)
            await route(scope, receive, reply)
        except HttpError as error:
            await self._refuse(reply, error)
        except CallError as error:
            await self._refuse(reply, HttpError.of(error))
        except ClientGone:
            pass
        except asyncio.CancelledError:
            await self._refuse(reply, HttpError(503, "the gateway is stopping"))
        except Exception:
            log.exception("a call of %r failed", scope["path"])
            await self._refuse(reply, HttpError(500, "the gateway failed; its log says how"))
        finally:
            self._calls.discard(call)

    @staticmethod
    def _name(scope: Scope, reply: Reply) -> None:
        """Names the call's id in its answer, also in an error. Raises InvalidRequest for a wrong id."""
        reply.headers[REQUEST_ID_KEY] = made = own_id("")
        given = check_given_id(header(scope, REQUEST_ID_KEY))
        reply.headers[REQUEST_ID_KEY] = given or made
        parent = next(iter(header(scope, TRACEPARENT_KEY)), "")
        current_origin.set(Origin("http", own_id(given) if given else made, given, parent))

    def end_calls(self) -> None:
        """Answers calls under way with an error."""
        for call in self._calls:
            call.cancel()

    async def _refuse(self, reply: Reply, error: HttpError) -> None:
        if error.code != RATE_LIMITED:  # which its key counts: it says nothing of the cluster's load
            self._rejected(error.status)
        if error.code == MODEL_NOT_FOUND:
            current_origin.get().access.refused(Sum.REFUSED_MODEL)
        await reply.error(error)

    def _route(self, scope: Scope) -> Route:
        path, method = scope["path"], scope["method"]
        if path not in self._monitoring.open:
            self._check_caller(scope)
        known = path
        if path not in self._routes:
            known = next((f"{begin}{{name}}" for begin in self._named if path.startswith(begin) and path != begin), "")
        if not known:
            raise HttpError(404, f"{path!r:.80} is not served; {', '.join(self._routes)} are")
        methods, route = self._routes[known]
        if method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{path} takes {allowed}, not {method!r:.80}", headers={"allow": allowed})
        if path not in self._monitoring.routes:
            self._limit.admit()
        return route

    def _check_caller(self, scope: Scope) -> None:
        """Checks the caller. Without a token it serves only this machine, and no browser that a foreign name led
        here."""
        access = self._gate.access(credentials_of(scope))
        if access is None:
            raise Unauthenticated("a valid bearer token is needed")
        current_origin.set(replace(current_origin.get(), access=access))
        if scope["path"] in self._operators:
            access.check_route(scope["path"])
        foreign = [host for host in header(scope, "host") if not _is_local(host)]
        if self._gate.is_open and foreign:
            raise HttpError(
                421, f"host is {foreign[0]!r:.80}; without a token localhost, 127.0.0.1 and [::1] are served"
            )


def _is_local(host: str) -> bool:
    """host: as in a request's header, with a port or without."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
