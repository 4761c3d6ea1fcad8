"""Triton's interpreter, which searches its whole language each time that one function of a kernel calls another."""

import inspect
from functools import cache
from typing import Any


def hasten() -> None:
    """Makes it remember what it finds: the same names, several times as fast."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtins(owner: Any, builder: Any, scope: Any) -> None:
        names = builtins_of(owner)
        if names and is_builtin(getattr(owner, names[0])):  # else all are patched, by the function that calls
            for name in names:
                interpreter._patch_attr(owner, name, getattr(owner, name), builder, scope)

    interpreter._patch_builtin = patch_builtins
