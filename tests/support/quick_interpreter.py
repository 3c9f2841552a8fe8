"""A pytest plugin (`-p quick_interpreter`): Triton's interpreter without its search, at every call of a function by a
kernel, for what of triton.language is to be replaced, which takes a third of its time. It finds the same each time."""

from __future__ import annotations

import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter

_builtins: dict[Any, list[tuple[str, Any]]] = {}


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    """As interpreter._patch_builtin: of the package's builtins those that are not replaced yet."""
    if package not in _builtins:
        _builtins[package] = [(n, m) for n, m in inspect.getmembers(package) if language.core.is_builtin(m)]
    for name, member in _builtins[package]:
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, *scope)


interpreter._patch_builtin = _patch_builtin
