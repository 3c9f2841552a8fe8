"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.layers.linear import Linear, copy_whole, new_parameter

if TYPE_CHECKING:  # its import needs triton
    from models.kernels.skinny import Added

    Hidden: TypeAlias = "Tensor | Added | Normed"  # what a norm is taken of, or was already


@dataclass(frozen=True, slots=True)
class Normed:
    """x + residual [T, size] and the norm of it [T, size]."""

    total: Tensor
    normed: Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; half-precision input is normalised in fp32.

    Never writes to its inputs: a residual is added into a new tensor.
    """

    eps_tensor: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = new_parameter((size,), dtype, device, copy_whole)
        self.register_buffer("eps_tensor", torch.tensor(eps, device=device), persistent=False)
        self._kernel = kernels.load("rmsnorm", device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape, in the weight's dtype."""
        if self._kernel is not None:
            return self._kernel.rmsnorm(x, self.weight, self.eps)
        if self.weight.dtype == torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        # The CPU has no fused kernel, and F.rms_norm makes two passes more for half types: at 512 rows this is
        # two to three times as fast. The norm is taken in fp32, and the scale promotes the rest to it.
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(self.eps_tensor, norm, norm, value=1 / self.size).rsqrt_()
        return (x * scale).mul_(self.weight).to(self.weight.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both new tensors.

        On a CPU the residual stream of half-precision weights is kept in fp32: it grows to thousands of times
        what a layer adds, and rounding it after every layer is most of what bf16 loses. Matrix products see
        the half type as before.
        """
        if self._kernel is not None:
            return self._kernel.add_rmsnorm(x, residual, self.weight, self.eps)
        total = torch.add(residual.float() if x.device.type == "cpu" else residual, x)
        return self.forward(total), total

    def after(self, linear: Linear, x: Tensor, residual: Tensor) -> Tensor | Added:
        """linear(x), for into(): where a kernel can, with the residual added to it and this norm begun."""
        if linear.few_rows is not None and linear.few_rows.takes_added(x.shape[0]):
            return linear.few_rows.add(x, self._kernel.Norm(self.weight, self.eps, residual))
        return linear(x)

    def into(self, linear: Linear, x: Hidden, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(linear(norm(x + residual)), x + residual), in one kernel where few rows have one; the second is x itself
        without a residual. An x of after(), and one that is Normed, has its residual already."""
        if isinstance(x, Normed):
            return linear(x.normed), x.total
        if not isinstance(x, Tensor):
            return self._finish(linear, x)
        if linear.few_rows is not None and linear.few_rows.takes(x.shape[0], normed=True):
            return linear.few_rows(x, self._kernel.Norm(self.weight, self.eps, residual))
        if residual is None:
            return linear(self.forward(x)), x
        normed, total = self.add_and_norm(x, residual)
        return linear(normed), total

    def _finish(self, linear: Linear, x: Added) -> tuple[Tensor, Tensor]:
        if linear.few_rows is not None and linear.few_rows.takes_added(x.total.shape[0]):
            return linear.few_rows(x)
        return linear(self.forward(x.total)), x.total
