"""4-bit weights as decode.c reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.int4 import GROUP, Int4Matrix

SPAN = 2 * GROUP  # columns whose nibbles lie together; as in decode.c
_OUTPUTS = 4  # likewise


@dataclass(frozen=True, slots=True)
class NativeInt4:
    """An Int4Matrix as decode.c reads it: q [N, K / 64, 16] of 16 bits, whose nibble j at place i is column 16 j + i of
    the span; scale float32 [N, K / 32, 2], each group's scale and offset."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def of(matrix: Int4Matrix) -> NativeInt4:
        rows, columns = matrix.shape
        q = matrix.q.view(rows, columns // SPAN, 4, 16)
        low, high = (q[:, :, i].to(torch.int16) | q[:, :, i + 1].to(torch.int16) << 4 for i in (0, 2))
        return NativeInt4((low | high << 8).contiguous(), torch.stack([matrix.scale, matrix.offset], 2))


def takes(rows: int, columns: int) -> bool:
    """Whether decode.c multiplies by a matrix of this shape."""
    return rows % _OUTPUTS == 0 and columns % SPAN == 0
