"""Weights that a checkpoint keeps in 4 bits: groups of 32 along a row, each with a scale and an offset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.stored import StoredTensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """w[n, k] = q[n, k] * scale[n, k // 32] + offset[n, k // 32].

    q uint8 [N, K] holds 0-15; scale and offset are float32 [N, K / 32].
    """

    q: Tensor
    scale: Tensor
    offset: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def narrow(self, dim: int, start: int, length: int) -> Int4Matrix | Tensor:
        """As Tensor.narrow; columns that cut a group come back as float32."""
        if dim == 0:
            return self.take_rows(slice(start, start + length))
        if start % GROUP or length % GROUP:
            return self.dequantize().narrow(dim, start, length)
        groups = slice(start // GROUP, (start + length) // GROUP)
        return Int4Matrix(self.q[:, start : start + length], self.scale[:, groups], self.offset[:, groups])

    def take_rows(self, rows: slice | Tensor) -> Int4Matrix:
        """The rows of a slice, or of an int64 index [n] in its order."""
        return Int4Matrix(self.q[rows], self.scale[rows], self.offset[rows])

    def dequantize(self) -> Tensor:
        """float32 [N, K]. In numpy: see dequantize.py."""
        rows, columns = self.shape
        q = self.q.numpy().reshape(rows, columns // GROUP, GROUP)
        out = np.multiply(q, self.scale.numpy()[:, :, None], dtype=np.float32)
        out += self.offset.numpy()[:, :, None]
        return torch.from_numpy(out).view(rows, columns)

    @staticmethod
    def stack(matrices: list[Int4Matrix]) -> Int4Matrix:
        """The rows of one after those of the other."""
        return Int4Matrix(*(torch.cat([getattr(m, name) for m in matrices]) for name in ("q", "scale", "offset")))


def dense(weight: Tensor | Int4Matrix | StoredTensor) -> Tensor:
    """The weight as a tensor."""
    if isinstance(weight, StoredTensor):
        return weight.read()
    return weight.dequantize() if isinstance(weight, Int4Matrix) else weight
