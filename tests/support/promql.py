"""As much of PromQL as the Grafana board speaks, over recorded scrapes: selectors, rate, sum, min, histogram_quantile,
arithmetic and comparisons with a number."""

import operator
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.cluster.cli.samples import Samples
from tandem.cluster.metrics.quantile import quantile

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>\"[^\"]*\")|(?P<sign>=~|[-+*/(){}=,>])"
    r"|(?P<range>\[[^\]]*\]))"
)
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Value = Vector | float
Node = Callable[["Recording", float], Value]
SIGNS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else float("nan"),
}  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """Scrapes in the order of their times. window: seconds that rate() looks back."""

    times: Sequence[float]
    scrapes: Sequence[Samples]
    window: float

    def between(self, at: float) -> list[tuple[float, Samples]]:
        first, last = bisect_left(self.times, at - self.window), bisect_right(self.times, at)
        return list(zip(self.times[first:last], self.scrapes[first:last], strict=True))


class Query:
    """One expression. names: of the metrics in it. ValueError where it is not understood."""

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._node = self._comparison()
        if self._peek():
            raise ValueError(f"{text!r} goes on behind its end with {self._tokens[self._next][1]!r}")

    def at(self, recording: Recording, time: float) -> Vector:
        value = self._node(recording, time)
        return value if isinstance(value, dict) else {(): value}

    def _peek(self) -> str:
        return self._tokens[self._next][1]

    def _take(self, wanted: str = "") -> str:
        token = self._peek()
        if not token or (wanted and token != wanted):
            raise ValueError(f"{self._text!r} has {token!r} where {wanted or 'more'!r} is needed")
        self._next += 1
        return token

    def _comparison(self) -> Node:
        left = self._sum()
        if self._peek() != ">":
            return left
        self._take()
        bound = float(self._take())
        return lambda recording, at: {key: one for key, one in _vector(left(recording, at)).items() if one > bound}

    def _sum(self) -> Node:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Node:
        return self._chain(("*", "/"), self._factor)

    def _chain(self, signs: Sequence[str], part: Callable[[], Node]) -> Node:
        node = part()
        while self._peek() in signs:
            node = _combined(SIGNS[self._take()], node, part())
        return node

    def _factor(self) -> Node:
        kind, token = self._tokens[self._next]
        if kind == "number":
            self._take()
            return lambda recording, at: float(token)
        if token == "(":
            return self._inner()
        if token in ("sum", "min"):
            return self._aggregation({"sum": sum, "min": min}[self._take()])
        if token == "rate":
            self._take()
            self._take("(")
            node = self._selector(ranged=True)
            self._take(")")
            return node
        if token == "histogram_quantile":
            self._take()
            self._take("(")
            fraction = float(self._take())
            self._take(",")
            of = self._comparison()
            self._take(")")
            return lambda recording, at: _quantiles(fraction, _vector(of(recording, at)))
        return self._selector(ranged=False)

    def _inner(self) -> Node:
        self._take("(")
        node = self._comparison()
        self._take(")")
        return node

    def _aggregation(self, together: Callable[[list[float]], float]) -> Node:
        by: list[str] = []
        if self._peek() == "by":
            self._take()
            self._take("(")
            by.append(self._take())
            while self._peek() == ",":
                self._take()
                by.append(self._take())
            self._take(")")
        node = self._inner()

        def aggregate(recording: Recording, at: float) -> Vector:
            groups: defaultdict[Labels, list[float]] = defaultdict(list)
            for labels, value in _vector(node(recording, at)).items():
                groups[tuple((name, value) for name, value in labels if name in by)].append(value)
            return {labels: together(values) for labels, values in groups.items()}

        return aggregate

    def _selector(self, *, ranged: bool) -> Node:
        name = self._take()
        self.names.add(name)
        wanted: list[tuple[str, str, str]] = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                label, sign, text = self._take(), self._take(), self._take()[1:-1]
                wanted.append((label, sign, text))
                if self._peek() == ",":
                    self._take()
            self._take("}")
        if not ranged:
            return lambda recording, at: _select(recording.between(at)[-1][1], name, wanted)
        if self._tokens[self._next][0] != "range":
            raise ValueError(f"{self._text!r}: rate() needs a range")
        self._take()
        return lambda recording, at: _rate(recording.between(at), name, wanted)


def _tokens(text: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(text.rstrip()):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text!r} is not understood from {text[place:]!r} on")
        found.append((match.lastgroup or "", match.group(match.lastgroup or 0)))
        place = match.end()
    return [*found, ("end", "")]


def _select(samples: Samples, name: str, wanted: Sequence[tuple[str, str, str]]) -> Vector:
    def fits(own: str, sign: str, text: str) -> bool:
        return re.fullmatch(text.replace("$model_name", ".*"), own) is not None if sign == "=~" else own == text

    return {
        tuple(sorted(labels.items())): value
        for labels, value in samples.series(name)
        if all(fits(labels.get(label, ""), sign, text) for label, sign, text in wanted)
    }


def _rate(span: Sequence[tuple[float, Samples]], name: str, wanted: Sequence[tuple[str, str, str]]) -> Vector:
    """A counter that goes down began anew from 0."""
    rates: Vector = {}
    steps = [_select(samples, name, wanted) for _, samples in span]
    for labels in steps[-1] if len(steps) > 1 else ():
        values = [step[labels] for step in steps if labels in step]
        grown = sum(after - before if after >= before else after for before, after in pairwise(values))
        rates[labels] = grown / (span[-1][0] - span[0][0])
    return rates


def _quantiles(fraction: float, vector: Vector) -> Vector:
    groups: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    for labels, value in vector.items():
        rest = tuple((name, text) for name, text in labels if name != "le")
        groups[rest][float(dict(labels)["le"])] = value
    sorted_groups = {labels: dict(sorted(counts.items())) for labels, counts in groups.items()}
    return {labels: quantile(counts, fraction) for labels, counts in sorted_groups.items() if max(counts.values()) > 0}


def _combined(apply: Callable[[float, float], float], left: Node, right: Node) -> Node:
    def combine(recording: Recording, at: float) -> Value:
        one, other = left(recording, at), right(recording, at)
        if isinstance(one, dict) and isinstance(other, dict):
            return {labels: apply(value, other[labels]) for labels, value in one.items() if labels in other}
        if isinstance(one, dict):
            return {labels: apply(value, _scalar(other)) for labels, value in one.items()}
        if isinstance(other, dict):
            return {labels: apply(one, value) for labels, value in other.items()}
        return apply(one, other)

    return combine


def _vector(value: Value) -> Vector:
    return value if isinstance(value, dict) else {(): value}


def _scalar(value: Value) -> float:
    assert not isinstance(value, dict), "the caller has looked"
    return value
