"""The part of PromQL that the Grafana board and the alerts use, over recorded scrapes: selectors; rate, increase,
delta; sum, min, max; absent; histogram_quantile; arithmetic, comparisons, `and`."""

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
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>\"[^\"]*\")|(?P<sign>=~|[=<>]=|[-+*/(){}=,<>])"
    r"|(?P<range>\[[^\]]*\]))"
)
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Value = Vector | float
Node = Callable[["Recording", float], Value]
SIGNS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else float("nan"),
}  # fmt: skip
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq,
}  # fmt: skip
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}


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
        self._node = self._both()
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

    def _both(self) -> Node:
        node = self._comparison()
        while self._peek() == "and":
            self._take()
            node = _both(node, self._comparison())
        return node

    def _comparison(self) -> Node:
        left = self._sum()
        if self._peek() not in COMPARISONS:
            return left
        return _compared(COMPARISONS[self._take()], left, self._sum())

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
        if token in AGGREGATIONS:
            return self._aggregation(AGGREGATIONS[self._take()])
        if token in CHANGES:
            change = CHANGES[self._take()]
            self._take("(")
            node = self._selector(change)
            self._take(")")
            return node
        if token == "absent":
            self._take()
            missing = self._inner()
            return lambda recording, at: {} if _vector(missing(recording, at)) else {(): 1.0}
        if token == "histogram_quantile":
            self._take()
            self._take("(")
            fraction = float(self._take())
            self._take(",")
            of = self._both()
            self._take(")")
            return lambda recording, at: _quantiles(fraction, _vector(of(recording, at)))
        return self._selector(None)

    def _inner(self) -> Node:
        self._take("(")
        node = self._both()
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

    def _selector(self, change: "Change | None") -> Node:
        """change: over a range, which follows."""
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
        if change is None:
            return lambda recording, at: _select(recording.between(at)[-1][1], name, wanted)
        if self._tokens[self._next][0] != "range":
            raise ValueError(f"{self._text!r}: rate() and its like need a range")
        self._take()
        return lambda recording, at: _changes(recording.between(at), name, wanted, change)


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


def _changes(
    span: Sequence[tuple[float, Samples]], name: str, wanted: Sequence[tuple[str, str, str]], change: "Change"
) -> Vector:
    changes: Vector = {}
    steps = [_select(samples, name, wanted) for _, samples in span]
    for labels in steps[-1] if len(steps) > 1 else ():
        values = [step[labels] for step in steps if labels in step]
        changes[labels] = change(values, span[-1][0] - span[0][0])
    return changes


def _increase(values: Sequence[float], seconds: float) -> float:
    """Returns the increase. A counter that goes down began anew from 0."""
    return sum(after - before if after >= before else after for before, after in pairwise(values))


Change = Callable[[Sequence[float], float], float]
"""A change computed from a series' values, and the seconds from the first to the last."""
CHANGES: dict[str, Change] = {
    "rate": lambda values, seconds: _increase(values, seconds) / seconds,
    "increase": _increase,
    "delta": lambda values, seconds: values[-1] - values[0],
}


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


def _compared(holds: Callable[[float, float], bool], left: Node, right: Node) -> Node:
    def compare(recording: Recording, at: float) -> Value:
        one, other = _vector(left(recording, at)), right(recording, at)
        if isinstance(other, dict):
            return {labels: value for labels, value in one.items() if labels in other and holds(value, other[labels])}
        return {labels: value for labels, value in one.items() if holds(value, other)}

    return compare


def _both(left: Node, right: Node) -> Node:
    def both(recording: Recording, at: float) -> Value:
        other = _vector(right(recording, at))
        return {labels: value for labels, value in _vector(left(recording, at)).items() if labels in other}

    return both


def _vector(value: Value) -> Vector:
    return value if isinstance(value, dict) else {(): value}


def _scalar(value: Value) -> float:
    assert not isinstance(value, dict), "the caller has looked"
    return value
