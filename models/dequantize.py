"""Dequantisation of GGUF tensors, vectorised. Block layouts as in ggml (ggml-common.h).

In numpy, not PyTorch: on one core it takes half the time for these layouts, and it starts no team of threads
for each of a hundred small steps, which on a busy machine wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from models.gguf import GGUFFile


def read_tensor(file: GGUFFile, name: str) -> torch.Tensor:
    """One tensor of the file in its own shape, on the CPU: F32, F16 and BF16 as they are, a view over the file's
    mapping; quantised types as fp32."""
    info = file.tensors[name]
    raw = file.raw(name)
    if info.type_name in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[info.type_name]).view(info.shape)
    return torch.from_numpy(_QUANTISED[info.type_name](raw)).view(info.shape)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """fp16 scale, 32 int8: x = scale * q."""
    blocks = raw.reshape(-1, 34)
    return np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """fp16 scale, 16 bytes of two nibbles: x = scale * (q - 8)."""
    blocks = raw.reshape(-1, 18)
    low, high = _nibbles(blocks[:, 2:])
    return _scaled(low.view(np.int8) - 8, high.view(np.int8) - 8, _halves(blocks[:, :2]))


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """fp16 scale, fp16 minimum, 16 bytes of two nibbles: x = scale * q + minimum."""
    blocks = raw.reshape(-1, 20)
    low, high = _nibbles(blocks[:, 4:])
    scale, minimum = np.hsplit(_halves(blocks[:, :4]), 2)
    out = _scaled(low, high, scale)
    out += minimum[:, :, None]
    return out


def _halves(columns: np.ndarray) -> np.ndarray:
    """uint8 [N, 2 k], a slice of wider rows -> the fp16 values they spell, as fp32 [N, k]."""
    return columns.copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, 16] -> the low nibbles, elements 0-15 of a block, and the high ones, elements 16-31."""
    return packed & 15, packed >> 4


def _scaled(low: np.ndarray, high: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Two integer halves [N, 16] times scale [N, 1] -> fp32 [N, 2, 16]."""
    out = np.empty((low.shape[0], 2, low.shape[1]), dtype=np.float32)
    np.multiply(low, scale, out=out[:, 0])
    np.multiply(high, scale, out=out[:, 1])
    return out


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
