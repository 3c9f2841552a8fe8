"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), alone and with the residual's addition before it, in one pass."""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm in front of a kernel's own work: weight [N], eps, and what is added to x [..., N] first, of the same
    shape, or None."""

    weight: Tensor
    eps: float
    residual: Tensor | None


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> x / sqrt(mean(x^2) + eps) * weight, in x's dtype, computed in fp32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, x, weight, out, out, eps, adds=False)
    return out


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] contiguous -> (rmsnorm(x + residual), x + residual), new tensors in x's dtype.

    The norm is taken of the sum before that is rounded.
    """
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, adds=True)
    return out, total


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm, sum) of both forms; without a residual the sum is x."""
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total.to(x.dtype)


def program(size: int) -> tuple[int, int]:
    """(columns, warps) of a program that takes a whole row."""
    block = triton.next_power_of_2(size)
    return block, min(16, max(1, block // 256))


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, adds: bool) -> None:
    size = weight.shape[0]
    assert x.shape[-1] == size and x.is_contiguous() and residual.is_contiguous()
    rows = x.numel() // size
    if rows:
        block, warps = program(size)
        _rmsnorm[(rows,)](
            x, residual, weight, out, total, eps, SIZE=size, BLOCK=block, ADDS=adds, num_warps=warps,
            **overlap.launch_options(x.device, rows),
        )  # fmt: skip


@triton.jit
def normed(value, gain, eps, SIZE: tl.constexpr):
    """Of a row of SIZE columns, behind which value is 0; fp32."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * gain


@triton.jit
def _rmsnorm(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    overlap.wait_and_trigger(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    tl.store(out + at, normed(value, gain, eps, SIZE).to(out.dtype.element_ty), mask=inside)
