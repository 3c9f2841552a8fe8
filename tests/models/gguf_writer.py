"""Writes small .gguf files for the tests, byte by byte, independently of the reader."""

from __future__ import annotations

import struct

import numpy as np

_CODES = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content) -> bytes:
    """kind is one of _CODES, "str", or "[kind]" for an array."""
    if kind == "str":
        return struct.pack("<I", 8) + string(content)
    if kind.startswith("["):
        inner = kind[1:-1]
        head = struct.pack("<IIQ", 9, 8 if inner == "str" else _CODES[inner][0], len(content))
        body = b"".join(string(c) if inner == "str" else struct.pack("<" + _CODES[inner][1], c) for c in content)
        return head + body
    number, code = _CODES[kind]
    return struct.pack("<I", number) + struct.pack("<" + code, content)


def gguf(
    metadata: dict[str, tuple[str, object]], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """A whole file. tensors: name -> (ggml type, shape in PyTorch's order, data)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, content) in metadata.items():
        out += string(key) + value(kind, content)
    offset = 0
    for name, (type_id, shape, data) in tensors.items():
        out += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", type_id, offset)
        offset += -(-len(data) // 32) * 32
    out += b"\0" * (-len(out) % 32)
    for _, _, data in tensors.values():
        out += data + b"\0" * (-len(data) % 32)
    return out


def quantise(kind: str, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """(bytes of a type, the fp32 values they stand for), block by block in plain loops."""
    blocks, data, values = x.reshape(-1, 32).astype(np.float32), b"", []
    for block in blocks:
        if kind == "Q8_0":
            scale = np.float16(np.abs(block).max() / 127)
            q = np.clip(np.round(block / np.float32(scale)), -127, 127).astype(np.int8)
            data += scale.tobytes() + q.tobytes()
            values.append(q.astype(np.float32) * np.float32(scale))
            continue
        if kind == "Q4_0":
            scale, low = np.float16(np.abs(block).max() / 7), np.float16(0)
            q = np.clip(np.round(block / np.float32(scale)) + 8, 0, 15).astype(np.uint8)
            values.append((q.astype(np.float32) - 8) * np.float32(scale))
        else:
            low = np.float16(block.min())
            scale = np.float16((block.max() - block.min()) / 15)
            q = np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
            values.append(q.astype(np.float32) * np.float32(scale) + np.float32(low))
        data += scale.tobytes() + (low.tobytes() if kind == "Q4_1" else b"")
        data += bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    return data, np.concatenate(values).reshape(x.shape)
