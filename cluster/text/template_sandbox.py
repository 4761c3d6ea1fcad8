"""Jinja's sandbox with bounds on memory: on all that a template makes, and on the result of each operation."""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1 << 20  # elements that an operation may make, numbers that are passed, bits of a power
MAX_MADE = 1 << 26  # characters that one rendering may make in all
MAX_SEPARATOR = 4096  # characters
MAX_LISTS = 1 << 16  # within one
ELEMENT = 8  # characters of memory that one of a list takes
FORMATTERS = frozenset({"format", "format_map", "%"})
WIDTH = re.compile(r"\d{7}")


class Generator(CodeGenerator):
    """Lets `~` go through Sandbox.concat."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that computes nothing while a template compiles. SecurityError when a bound is exceeded."""

    code_generator_class = Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=self._finalize)
        self._made = threading.local()
        self.globals.pop("lipsum")
        for name, filter in list(self.filters.items()):
            self.add_filter(name, filter)

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, filter)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Bounds one rendering on this thread."""
        self._made.total = 0
        yield

    def concat(self, parts: Iterable[str]) -> str:
        kept = list[str]()
        for part in parts:
            self._count(part)
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            size = abs(int(left)).bit_length() * abs(right)
        elif operator == "*":
            size = max(_repeated(left, right), _repeated(right, left))
        else:
            size = 0
        if size > MAX_REPEATED:
            raise SecurityError(f"{operator} would make {size} elements; at most {MAX_REPEATED} are allowed")
        if operator == "%" and isinstance(left, str):
            _check(operator, left, [right])
        return self._count(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        _check(getattr(__obj, "__name__", ""), owner if isinstance(owner, str) else None, [*args, *kwargs.values()])
        return __self._count(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wraps format() of a string, which has a sandbox of its own."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check("format", value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def _bounded(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter)  # with jinja's attributes
        def bounded(*args: Any, **kwargs: Any) -> Any:
            first = 1 if hasattr(filter, "jinja_pass_arg") else 0
            text = args[first] if len(args) > first and isinstance(args[first], str) else None
            _check(name, text, [*args[first + 1 :], *kwargs.values()])
            for value in args[first:]:
                _check_nesting(value)
            return self._count(filter(*args, **kwargs))

        return bounded

    def _finalize(self, value: Any) -> Any:
        _check_nesting(value)
        return value

    def _count(self, value: Any) -> Any:
        """Counts what was made."""
        if isinstance(value, str | list | tuple | dict):
            size = len(value) if isinstance(value, str) else ELEMENT * len(value)
            self._made.total = getattr(self._made, "total", 0) + size
            if self._made.total > MAX_MADE:
                raise SecurityError(f"it makes more than {MAX_MADE} characters")
        return value


def _check(name: str, text: str | None, arguments: list[Any]) -> None:
    """text: the text that a method or filter works on. SecurityError if its result may be too large."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_REPEATED:
            raise SecurityError(f"{name} is given {abs(value):.3e}; at most {MAX_REPEATED} is allowed")
    texts = [value for value in arguments if isinstance(value, str)]
    size = 0
    if name in FORMATTERS and text is not None:
        if WIDTH.search(text):
            raise SecurityError(f"{name} has a width of more than six digits")
        size = (text.count("{") + text.count("%")) * sum(map(_length, arguments))
    elif name == "replace" and text is not None and len(texts) > 1:
        size = text.count(texts[0]) * len(texts[1])
    elif name in ("indent", "expandtabs", "wordwrap") and text is not None:
        size = len(text) * max(map(_length, arguments), default=1)
    elif name == "translate" or (name == "sum" and any(isinstance(value, list | tuple) for value in arguments)):
        raise SecurityError(f"{name} is not allowed")
    elif name == "join" and any(len(one) > MAX_SEPARATOR for one in [text or "", *texts]):
        raise SecurityError(f"join has a separator of more than {MAX_SEPARATOR} characters")
    if size > MAX_MADE:
        raise SecurityError(f"{name} would make up to {size} characters; at most {MAX_MADE} are allowed")


def _length(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _repeated(sequence: Any, count: Any) -> int:
    is_sequence = isinstance(sequence, str | list | tuple) and isinstance(count, int)
    return len(sequence) * count if is_sequence else 0


def _check_nesting(value: Any) -> None:
    """Checks nesting. A list may be in others many times: written out, a few of them fill any memory."""
    if not isinstance(value, list | tuple | dict):
        return
    waiting, lists, elements = [value], 0, 0
    while waiting:
        one = waiting.pop()
        lists, elements = lists + 1, elements + len(one)
        if lists > MAX_LISTS or elements > MAX_REPEATED:
            raise SecurityError(f"a list has more than {MAX_LISTS} lists or {MAX_REPEATED} elements in it")
        for inner in one.values() if isinstance(one, dict) else one:
            if isinstance(inner, list | tuple | dict):
                waiting.append(inner)
