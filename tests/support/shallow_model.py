"""The default model with four of its thirty layers: its tokenizer and template, at a third of the time a token.

It says its words without sense and never ends a reply by itself: for tests that are not about what is said.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from models.gguf import TENSOR_TYPES, GGUFFile
from tests.models.gguf_writer import gguf

LAYERS = (0, 1, 28, 29)
_CODES = {name: code for code, (name, _, _) in TENSOR_TYPES.items()}


def write_shallow(model: Path, folder: Path) -> Path:
    """The file's namesake in the folder, with no more than LAYERS of it."""
    whole = GGUFFile(model)
    names = {f"blk.{layer}.": f"blk.{i}." for i, layer in enumerate(LAYERS)}
    tensors = {}
    for name, info in whole.tensors.items():
        block = re.match(r"blk\.\d+\.", name)
        if block is None or block[0] in names:
            kept = name if block is None else names[block[0]] + name[block.end() :]
            tensors[kept] = (_CODES[info.type_name], info.shape, whole.raw(name).tobytes())
    metadata = whole.metadata | {f"{whole.metadata['general.architecture']}.block_count": len(LAYERS)}
    written = folder / model.name
    written.write_bytes(gguf({key: (_kind(value), value) for key, value in metadata.items()}, tensors))
    return written


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"[{_kind(value[0])}]"
    return {bool: "bool", int: "i32", float: "f32", str: "str"}[type(value)]
