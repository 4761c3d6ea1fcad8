"""Triton's interpreter, which searches its whole language each time that one function of a kernel calls another."""

import inspect
from functools import cache
from typing import Any


def hasten() -> None:
    """Makes it remember what it finds: the same names, several times as fast."""
    import triton.language as tl
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

    def is_patched(owner: Any) -> bool:
        return not is_builtin(getattr(owner, builtins_of(owner)[0]))

    @cache
    def languages_of(function: Any) -> list[Any]:
        return [one for one in function.__globals__.values() if inspect.ismodule(one) and one in (tl, tl.core)]

    patch = interpreter._patch_lang

    def patch_language(function: Any) -> Any:
        if all(is_patched(one) and is_patched(one.tensor) for one in languages_of(function)):
            return interpreter._LangPatchScope()  # of no changes
        return patch(function)

    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch_language
