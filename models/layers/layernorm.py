"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.linear import copy_whole, new_parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; half-precision input is normalised in fp32.

    Never writes to its inputs: a residual is added into a new tensor.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = new_parameter(self.shape, dtype, device, copy_whole)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both new tensors."""
        total = x + residual
        return F.rms_norm(total, self.shape, self.weight, self.eps), total
