"""A pytest plugin (`-p quick_interpreter`) for what is slow in Triton's interpreter.

At every call of a function by a kernel it searches for what of triton.language is to be replaced, which takes a third
of its time: it finds the same each time, and need not search again. For every operation it makes a table of numpy's
types anew. And of a test's combinations of parameters only so many are run as show each of their values; on a card all
are (tests/models/test_kernels.py).
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter

_builtins: dict[Any, list[tuple[str, Any]]] = {}
_numpy_types: dict[str, Any] = {}
_find_numpy_type = interpreter._get_np_dtype


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    """As interpreter._patch_builtin: of the package's builtins those that are not replaced yet."""
    if package not in _builtins:
        _builtins[package] = [(n, m) for n, m in inspect.getmembers(package) if language.core.is_builtin(m)]
    for name, member in _builtins[package]:
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, *scope)


def _get_np_dtype(of: Any) -> Any:
    """As interpreter._get_np_dtype: of a block, of its elements; of pointers they do not matter."""
    element = of.element_ty if isinstance(of, language.block_type) else of
    name = "pointer" if isinstance(element, language.pointer_type) else element.name
    if name not in _numpy_types:
        _numpy_types[name] = _find_numpy_type(element)
    return _numpy_types[name]


interpreter._patch_builtin = _patch_builtin
interpreter._get_np_dtype = _get_np_dtype


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps of each test the cases that show the most values which those kept before did not, and beside them those
    that were shown least, until all have been shown."""
    tests: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()
        tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values or {("", "")}
    kept: set[pytest.Item] = set()
    for cases in tests.values():
        shown = Counter(dict.fromkeys(set().union(*cases.values()), 0))
        while not all(shown.values()):
            new = {item: sum(not shown[value] for value in values) for item, values in cases.items()}
            best = max(cases, key=lambda item: (new[item], -sum(shown[value] for value in cases[item])))
            kept.add(best)
            shown.update(cases[best])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
