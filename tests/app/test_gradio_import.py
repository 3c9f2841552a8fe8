"""Gradio as a server imports it: whole, but for the files that it writes beside the sources of components."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gradio
import pytest

from app import gradio_import


def load(spec: Any, **names: Any) -> Any:
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(names)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("without", [False, True])
def test_a_class_of_components_writes_an_interface_file_only_where_it_may(
    without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, gradio_import.WRITES_THEM, gradio.component_meta)  # put back at the end
    monkeypatch.setitem(sys.modules, "component", gradio)
    if without:
        gradio_import.without_interface_files()
    finders: list[Any] = sys.meta_path if without else [PathFinder]
    found = (finder.find_spec(gradio_import.WRITES_THEM, gradio.__path__) for finder in finders)
    meta = load(next(filter(None, found)))
    source = tmp_path / "component.py"
    source.write_text("class Shown(metaclass=ComponentMeta):\n    EVENTS = ['change']\n")
    component = load(importlib.util.spec_from_file_location("component", source), ComponentMeta=meta.ComponentMeta)
    assert [str(event) for event in component.Shown.EVENTS] == ["change"]
    assert source.with_suffix(".pyi").exists() == (not without)
