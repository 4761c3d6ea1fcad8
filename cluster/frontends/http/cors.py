"""Cross-origin resource sharing, as the Fetch standard has it: which web pages may call the gateway from a browser."""

import re
from collections.abc import Sequence

from tandem.cluster.frontends.http.caller import header
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Reply, Scope

ANY = "*"
METHODS = "GET, HEAD, POST"
LIMITS = [
    form.format(unit, what)
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
    for form in ("x-ratelimit-{1}-{0}", "anthropic-ratelimit-{0}-{1}")
]
# Headers of answers that a page may read.
SHOWN = ", ".join(("x-request-id", "x-tandem-ignored", "retry-after", "retry-after-ms", *LIMITS))
KEPT_SECONDS = 600  # for which a browser need not ask again
NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{0,1024}", re.ASCII)


class Cors:
    """Tells browsers what pages from these origins may do. They send tokens as headers, never as cookies."""

    def __init__(self, origins: Sequence[str]) -> None:
        """origins: SCHEME://HOST[:PORT] each, or "*" for all; none lets no page in."""
        self._origins = frozenset(origins)

    def headers(self, scope: Scope) -> dict[str, str]:
        """Returns the headers for the answer to any call."""
        if not self._origins:
            return {}
        vary = {} if ANY in self._origins else {"vary": "origin"}
        origin = self._allowed(scope)
        if origin is None:
            return vary
        return vary | {"access-control-allow-origin": origin, "access-control-expose-headers": SHOWN}

    def is_question(self, scope: Scope) -> bool:
        """Returns whether a browser asks ahead what a page may send (a preflight). It shows no token then."""
        asks = scope["method"] == "OPTIONS" and header(scope, "access-control-request-method")
        return bool(self._origins and asks and header(scope, "origin"))

    async def answer(self, scope: Scope, reply: Reply) -> None:
        """Answers is_question(). Raises HttpError for a page of another origin."""
        if self._allowed(scope) is None:
            raise HttpError(403, f"origin is {header(scope, 'origin')[0]!r:.80}; gateway.cors_origins has other ones")
        wanted = ", ".join(header(scope, "access-control-request-headers"))
        if not NAMES.fullmatch(wanted):
            raise HttpError(400, f"access-control-request-headers is {wanted!r:.80}; it must list names of headers")
        allowed = {"access-control-allow-methods": METHODS, "access-control-max-age": str(KEPT_SECONDS)}
        if wanted:
            allowed["access-control-allow-headers"] = wanted
        await reply.content(200, b"", "text/plain", allowed)

    def _allowed(self, scope: Scope) -> str | None:
        """Returns the origin that the answer allows: the caller's, or any. None if the caller's is not allowed."""
        if ANY in self._origins:
            return ANY
        (origin, *more) = header(scope, "origin") or [""]
        return origin if origin in self._origins and not more else None
