"""Triton's interpreter, made faster.

By itself it searches its whole language each time that a kernel's function calls another, and describes each tensor's
shape anew.
"""

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
    _remember_shapes()


def _remember_shapes() -> None:
    """Shares one description among blocks of one shape, which nothing changes, and looks numpy's dtypes up by name."""
    import triton.language as tl
    from triton.runtime import interpreter

    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any]] = {}  # shape and size of a type, then of its tensors
    names: dict[tuple[tuple[int, ...], str], str] = {}
    dtypes: dict[str, Any] = {}
    describe, scalars, find = tl.block_type.__init__, (tl.constexpr(1), tl.tuple([])), interpreter._get_np_dtype

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        plain = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
        if plain not in shapes:
            describe(self, element_ty, shape)
            counts = tl.tuple([tl.constexpr(one) for one in plain])
            shapes[plain] = self.shape, self.numel, tl.constexpr(self.numel), counts
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensors = shapes[plain]
        name = plain, element_ty.name
        if name not in names:
            names[name] = f"<{self.shape}, {element_ty}>"
        self.name = names[name]

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalars

    def dtype_of(type: Any) -> Any:
        scalar = type.element_ty if isinstance(type, tl.block_type) else type
        name = "pointer" if isinstance(scalar, tl.pointer_type) else str(scalar.name)
        if name not in dtypes:
            dtypes[name] = find(scalar)
        return dtypes[name]

    language: Any = tl
    language.block_type.__init__ = block_init
    language.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = dtype_of
