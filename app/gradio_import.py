"""The import of Gradio without its second half.

For each class of components, whenever it is imported, Gradio takes the class's source apart to write an interface file
for editors beside it. That is half the time of its import, and a server has no editor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

WRITES_THEM = "gradio.component_meta"


class _Finder:
    """Finds the one module, and leaves all others to those behind it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WRITES_THEM:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            module.create_or_modify_pyi = lambda *_: None  # type: ignore[attr-defined]

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def without_interface_files() -> None:
    """Before Gradio is imported: that import, and classes made later, write none."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
