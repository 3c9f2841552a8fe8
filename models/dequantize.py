"""Dequantisation of GGUF tensors, vectorised. Block layouts as in ggml (ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.gguf import GGUFFile

BLOCK = 32  # elements of a block, for every quantised type read here


def read_tensor(file: GGUFFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor of the file in its own shape, as `dtype`, on the CPU.

    Values are computed in fp32 and rounded once. An F32, F16 or BF16 tensor that already has this dtype is a
    view over the file's mapping, to be copied into a parameter.
    """
    info = file.tensors[name]
    raw = torch.from_numpy(file.raw(name))
    if info.type_name in _PLAIN:
        return raw.view(_PLAIN[info.type_name]).view(info.shape).to(dtype)
    return _QUANTISED[info.type_name](raw, dtype).view(info.shape)


def _q8_0(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp16 scale, 32 int8: x = scale * q."""
    blocks = raw.view(-1, 34)
    scale = _halves(blocks[:, :2])
    return torch.mul(blocks[:, 2:].view(torch.int8), scale).to(dtype)


def _q4_0(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp16 scale, 16 bytes of two nibbles: x = scale * (q - 8)."""
    blocks = raw.view(-1, 18)
    scale = _halves(blocks[:, :2]).unsqueeze(-1)
    return torch.mul(_nibbles(blocks[:, 2:]).view(torch.int8) - 8, scale).to(dtype)


def _q4_1(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp16 scale, fp16 minimum, 16 bytes of two nibbles: x = scale * q + minimum."""
    blocks = raw.view(-1, 20)
    scale, minimum = _halves(blocks[:, :4]).unsqueeze(-1).split(1, dim=1)
    return torch.mul(_nibbles(blocks[:, 4:]), scale).add_(minimum).to(dtype)


def _halves(columns: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 2 k], a slice of wider rows -> the fp16 values they spell, as fp32 [N, k]."""
    return columns.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 16] -> uint8 [N, 2, 16]: the low nibbles are elements 0-15, the high ones 16-31."""
    out = torch.empty(packed.shape[0], 2, BLOCK // 2, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=out[:, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, 1])
    return out


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
