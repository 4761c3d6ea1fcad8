"""The rights of a call: an operator may do everything, others what their key allows."""

from dataclasses import dataclass

from tandem.cluster.errors import Forbidden, InvalidRequest
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_cells import Sum
from tandem.cluster.keys.meter import Charge, Meter
from tandem.cluster.peers.claims import SCOPE

OPEN_TOKENS = 1024  # of a request that does not say how long it may be, or
OPEN_PART = 4  # this part of what its key has left in the minute, if that is more; but at most of the whole limit


class Access:
    """The rights of an operator, and of everybody where no token is asked for: no limits."""

    name = ""
    """of the key; empty without one"""

    def check_route(self, what: str) -> None:
        """Raises Forbidden if only operators may call the route. what: the route, as an error names it."""

    def scoped(self, request_id: str) -> str:
        """Returns the id by which the gateway knows the caller's request. Callers with different keys never share an
        id."""
        return request_id

    def allows(self, model: str) -> bool:
        """Returns whether requests may name this model or adapter."""
        return True

    def priorities(self, first: int, last: int) -> tuple[int, int]:
        """Returns the first and last priority of a request. first, last: the bounds in gateway.priorities."""
        return first, last

    def check_many(self, requests: int) -> None:
        """InvalidRequest for a body with more prompts, each of them a request, than ever pass together."""

    def check_whole(self, before: int, tokens: int) -> None:
        """InvalidRequest for a body that needs more tokens than ever pass together. before: those of its requests so
        far, tokens: those of the next one."""

    def look(self) -> None:
        """Raises RateLimited if no request can pass now. It costs less than reading a request."""

    def most_open(self, prompt: int, output: int) -> int:
        """Returns the most output tokens for a request that names no length. output: the most without a key."""
        return output

    def admit(self, prompt: int, output: int) -> Charge | None:
        """Counts a request: its prompt's tokens, and the most that its output may have. None where nothing counts.

        Raises RateLimited if it goes over a limit, InvalidRequest if it always would.
        """
        return None

    def refused(self, why: Sum) -> None:
        """Counts a refusal."""


OPERATOR = Access()


@dataclass(frozen=True)
class KeyAccess(Access):
    """The rights of a key, as the keys file said when the call came."""

    key: Key
    meter: Meter

    @property
    def name(self) -> str:  # type: ignore[override]  # an attribute of the class there
        return self.key.name

    def check_route(self, what: str) -> None:
        self.refused(Sum.REFUSED_ROUTE)
        raise Forbidden(f"{what} is for operators; the key {self.key.name!r} may use the routes of inference only")

    def scoped(self, request_id: str) -> str:
        return f"{request_id}{SCOPE}{self.key.name}"

    def allows(self, model: str) -> bool:
        return self.key.may_use(model)

    def priorities(self, first: int, last: int) -> tuple[int, int]:
        bounds = self.key.priority
        if bounds is None:
            return first, last
        return _within(bounds.lowest, first, last), _within(bounds.highest, first, last)

    def check_many(self, requests: int) -> None:
        limit = self.key.requests_per_minute
        if limit is not None and requests > limit:
            self.refused(Sum.REFUSED_SIZE)
            raise InvalidRequest(
                f"prompt has {requests} entries, each of them a request; the key {self.key.name!r} has {limit} "
                "requests a minute, and no body may need more"
            )

    def check_whole(self, before: int, tokens: int) -> None:
        limit = self.key.tokens_per_minute
        if limit is not None and before and before + tokens > limit:
            self.refused(Sum.REFUSED_SIZE)
            raise InvalidRequest(
                f"the body asks for {before + tokens} tokens or more, over all its entries; the key {self.key.name!r} "
                f"has {limit} tokens a minute, and no body may need more"
            )

    def look(self) -> None:
        self.meter.look(self.key)

    def most_open(self, prompt: int, output: int) -> int:
        limit = self.key.tokens_per_minute
        if limit is None:
            return output
        left = limit - self.meter.used_tokens()
        most = max(min(OPEN_TOKENS, limit // OPEN_PART), left // OPEN_PART)
        return max(1, min(output, most, limit - prompt))

    def admit(self, prompt: int, output: int) -> Charge | None:
        limit = self.key.tokens_per_minute
        if limit is not None and prompt + output > limit:
            self.refused(Sum.REFUSED_SIZE)
            raise InvalidRequest(_too_large(self.key, prompt, output))
        return self.meter.count(self.key, prompt + output)

    def refused(self, why: Sum) -> None:
        self.meter.sum(why)


def _too_large(key: Key, prompt: int, output: int) -> str:
    accepted = f"the key {key.name!r} has {key.tokens_per_minute} tokens a minute, and no request may need more"
    if prompt >= (key.tokens_per_minute or 0):
        return f"the prompt has {prompt} tokens; {accepted}"
    return f"sampling.max_tokens asks for {output} tokens, over all answers, after {prompt} of the prompt; {accepted}"


def _within(number: int, first: int, last: int) -> int:
    return max(first, min(number, last))
