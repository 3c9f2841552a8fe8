"""GGUF: the header, metadata and tensor directory of a .gguf file, read by mmap and without torch.

Layout (little-endian, versions 2 and 3): magic "GGUF", version, tensor count, metadata count, the metadata
pairs, the tensor directory, padding up to `general.alignment` (32 when unset), the tensor data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Every length in the file is checked against the bytes that are left before anything is read or allocated, so
that a damaged file ends in one GGUFError that names the offset. Dequantisation lives in models/dequantize.py.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# ggml type id -> (name, elements a block holds, bytes a block takes)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
# Types that exist in the format but are not read here; they are refused by these names.
OTHER_TENSOR_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """A .gguf file that cannot be read: damaged, cut short, or of a kind that is not supported."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory. `shape` is in PyTorch's order (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open .gguf file: `metadata` (plain Python values) and `tensors` by name, in the file's order.

    Strings that are not UTF-8 come with their bytes kept by surrogateescape. Raises GGUFError for a file that
    is not GGUF, is damaged or cut short, or holds a tensor type that is not supported; OSError when it cannot
    be opened. The mapping is released with the object and the arrays taken from it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise GGUFError(f"{self.path}: {self.size} bytes are too few for a GGUF header (24 bytes)")
            # Copy-on-write, not read-only: PyTorch wants writable memory even where it only reads.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        reader = _Reader(self._map, self.size, self.path)
        tensor_count, metadata_count = reader.header()
        self.metadata = reader.metadata(metadata_count)
        self.tensors = reader.directory(tensor_count, self._alignment())

    def raw(self, name: str) -> np.ndarray:
        """The bytes of one tensor as a uint8 array over the mapping, without a copy."""
        info = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A metadata value of the given kind; `default` when absent; GGUFError when it is of another kind."""
        value = self.metadata.get(key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(k.__name__ for k in kinds)
            raise GGUFError(f"{self.path}: metadata {key!r} is {_shown(value)}; expected {wanted}")
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """As get, but an absent key raises GGUFError."""
        if key not in self.metadata:
            raise GGUFError(f"{self.path}: metadata {key!r} is missing")
        return self.get(key, kind)

    def _alignment(self) -> int:
        alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment % 8 or alignment > 1 << 20:
            raise GGUFError(f"{self.path}: general.alignment {alignment} must be a multiple of 8 up to 1048576")
        return alignment


class _Reader:
    """A cursor over the mapped file that never reads or allocates past its end."""

    def __init__(self, data: mmap.mmap, size: int, path: Path) -> None:
        self.data = data
        self.size = size
        self.path = path
        self.at = 0

    def header(self) -> tuple[int, int]:
        """Checks magic and version; returns (tensor count, metadata count)."""
        magic = bytes(self.data[:4])
        if magic != MAGIC:
            raise GGUFError(f"{self.path}: not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        self.at = 4
        version = self.number("I", "the version")
        if version not in VERSIONS:
            raise GGUFError(f"{self.path}: GGUF version {version} at offset 4 is not supported; versions 2 and 3 are")
        # The smallest entries: name length 8 + dimensions 4 + type 4 + offset 8; key length 8 + type 4 + value 1.
        tensors = self.count("the tensor count", smallest=24)
        pairs = self.count("the metadata count", smallest=13)
        return tensors, pairs

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            start = self.at
            key = self.string("a metadata key")
            if key in values:
                raise GGUFError(f"{self.path}: metadata key {_shown(key)} appears twice, again at offset {start}")
            values[key] = self.value(self.number("I", f"the type of {_shown(key)}"), key)
        return values

    def directory(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Reads the tensor directory and checks that every tensor lies inside the file."""
        entries: list[tuple[str, tuple[int, ...], str, int, int]] = []
        names: set[str] = set()
        for _ in range(count):
            start = self.at
            name = self.string("a tensor name")
            if name in names:
                raise GGUFError(f"{self.path}: tensor {_shown(name)} appears twice, again at offset {start}")
            names.add(name)
            rank = self.number("I", f"the dimensions of {_shown(name)}")
            if not 1 <= rank <= MAX_DIMENSIONS:
                raise GGUFError(
                    f"{self.path}: tensor {_shown(name)} at offset {start} has {rank} dimensions; 1 to 4 are possible"
                )
            dims = [self.number("Q", f"the shape of {_shown(name)}") for _ in range(rank)]
            kind = self.number("I", f"the type of {_shown(name)}")
            offset = self.number("Q", f"the data offset of {_shown(name)}")
            type_name, nbytes = self.tensor_bytes(name, dims, kind)
            if offset % alignment:
                raise GGUFError(
                    f"{self.path}: tensor {_shown(name)} has data offset {offset}, not a multiple of {alignment}"
                )
            entries.append((name, tuple(reversed(dims)), type_name, offset, nbytes))
        base = (self.at + alignment - 1) // alignment * alignment
        tensors = {}
        for name, shape, type_name, offset, nbytes in entries:
            end = base + offset + nbytes
            if end > self.size:
                raise GGUFError(
                    f"{self.path}: tensor {_shown(name)} ends at byte {end} but the file has {self.size}: "
                    "it was cut short; fetch it again"
                )
            tensors[name] = TensorInfo(name, shape, type_name, base + offset, nbytes)
        return tensors

    def tensor_bytes(self, name: str, dims: list[int], kind: int) -> tuple[str, int]:
        if kind not in TENSOR_TYPES:
            other = OTHER_TENSOR_TYPES.get(kind, f"number {kind}")
            known = ", ".join(known_name for known_name, _, _ in TENSOR_TYPES.values())
            raise GGUFError(f"{self.path}: tensor {_shown(name)} has type {other}, which is not supported; {known} are")
        type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
        if dims[0] % block_elements:
            raise GGUFError(
                f"{self.path}: tensor {_shown(name)} has rows of {dims[0]} elements, not a multiple of the "
                f"{block_elements} that a {type_name} block holds"
            )
        elements = math.prod(dims)
        if elements == 0:
            raise GGUFError(f"{self.path}: tensor {_shown(name)} has shape {tuple(reversed(dims))}: it is empty")
        return type_name, elements // block_elements * block_bytes

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {_shown(key)}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            at = self.at - 4
            raise GGUFError(f"{self.path}: metadata {_shown(key)} has unknown value type {kind} at offset {at}")
        return self.number(_SCALARS[kind], f"the value of {_shown(key)}")

    def array(self, key: str) -> list[Any]:
        kind = self.number("I", f"the element type of {_shown(key)}")
        if kind == _STRING:
            return self.strings(key, self.count(f"the length of {_shown(key)}", smallest=8))
        if kind not in _SCALARS:
            raise GGUFError(
                f"{self.path}: metadata {_shown(key)} is an array of unsupported type {kind} at offset {self.at - 4}"
            )
        code = _SCALARS[kind]
        width = struct.calcsize("<" + code)
        count = self.count(f"the length of {_shown(key)}", smallest=width)
        values = np.frombuffer(self.data, dtype=np.dtype(code).newbyteorder("<"), count=count, offset=self.at)
        self.at += count * width
        return values.tolist()

    def strings(self, key: str, count: int) -> list[str]:
        """A string array. Written out because a vocabulary has hundreds of thousands of entries."""
        data, size, at = self.data, self.size, self.at
        out: list[str] = []
        for _ in range(count):
            start = at + 8
            end = start + int.from_bytes(data[at:start], "little")
            if end > size:
                self.at = at
                raise self.short(f"an entry of {_shown(key)}", end - at)
            out.append(data[start:end].decode("utf-8", "surrogateescape"))
            at = end
        self.at = at
        return out

    def string(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > self.size - self.at:
            raise self.short(what, length)
        text = self.data[self.at : self.at + length]
        self.at += length
        return text.decode("utf-8", "surrogateescape")

    def count(self, what: str, smallest: int) -> int:
        """A 64-bit count of entries of at least `smallest` bytes each; refused when they cannot fit."""
        count = self.number("Q", what)
        if count * smallest > self.size - self.at:
            raise GGUFError(
                f"{self.path}: {what} at offset {self.at - 8} is {count}, but only {self.size - self.at} bytes "
                "follow: the file is damaged or cut short"
            )
        return count

    def number(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        if width > self.size - self.at:
            raise self.short(what, width)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value

    def short(self, what: str, wanted: int) -> GGUFError:
        return GGUFError(
            f"{self.path}: {what} at offset {self.at} needs {wanted} bytes, but the file has {self.size}: "
            "it is damaged or cut short; fetch it again"
        )


def _shown(value: object) -> str:
    """repr for a message, kept short: a damaged file may name things at any length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
