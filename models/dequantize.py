"""Dequantisation of GGUF tensors, vectorised. Block layouts as in ggml (ggml-common.h).

In numpy, not PyTorch: on one core it takes half the time for these layouts, and it starts no team of threads
for each of a hundred small steps, which on a busy machine wait for one another.
"""

from __future__ import annotations

import numpy as np
import torch

from models.gguf import GGUFFile
from models.int4 import GROUP, Int4Matrix


def read_tensor(file: GGUFFile, name: str) -> torch.Tensor:
    """One tensor of the file in its own shape, on the CPU: F32, F16 and BF16 as they are, a view over the file's
    mapping; quantised types as fp32."""
    info = file.tensors[name]
    raw = file.raw(name)
    if info.type_name in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[info.type_name]).view(info.shape)
    if info.type_name in _INT4:
        rows = (-1, info.shape[-1])
        return _int4(raw, info.type_name, rows).dequantize().view(info.shape)
    return torch.from_numpy(_q8_0(raw)).view(info.shape)


def read_weight(file: GGUFFile, name: str) -> torch.Tensor | Int4Matrix:
    """As read_tensor, but a matrix of 4-bit weights keeps them."""
    info = file.tensors[name]
    if info.type_name in _INT4 and len(info.shape) == 2:
        return _int4(file.raw(name), info.type_name, info.shape)
    return read_tensor(file, name)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """fp16 scale, 32 int8: x = scale * q."""
    blocks = raw.reshape(-1, 34)
    return np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _int4(raw: np.ndarray, type_name: str, shape: tuple[int, ...]) -> Int4Matrix:
    """Blocks of an fp16 scale, for Q4_1 an fp16 minimum, and 16 bytes of two nibbles: the low ones are elements
    0-15, the high ones 16-31. Q4_0: x = scale * (q - 8). Q4_1: x = scale * q + minimum."""
    halves = _INT4[type_name]
    blocks = raw.reshape(-1, 2 * halves + 16)
    numbers = _halves(blocks[:, : 2 * halves])
    scale = numbers[:, 0].copy()
    offset = numbers[:, 1].copy() if halves == 2 else scale * np.float32(-8)
    q = np.empty((blocks.shape[0], 2, 16), dtype=np.uint8)
    np.bitwise_and(blocks[:, 2 * halves :], 15, out=q[:, 0])
    np.right_shift(blocks[:, 2 * halves :], 4, out=q[:, 1])
    groups = (-1, shape[-1] // GROUP)
    return Int4Matrix(
        torch.from_numpy(q).view(shape), torch.from_numpy(scale).view(groups), torch.from_numpy(offset).view(groups)
    )


def _halves(columns: np.ndarray) -> np.ndarray:
    """uint8 [N, 2 k], a slice of wider rows -> the fp16 values they spell, as fp32 [N, k]."""
    return columns.copy().view(np.float16).astype(np.float32)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INT4 = {"Q4_0": 1, "Q4_1": 2}  # fp16 numbers at the head of a block
