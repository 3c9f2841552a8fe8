"""x W^T for one or two rows of x, bound by the bytes of W, each of which is read once.

At these sizes a matrix product's tiles leave most of the card idle or its tensor cores multiplying zeros. Here a
program takes a few rows of W, keeps one running product per element of a strip of them, and sums along the strip at
the end: the loop is loads and fused multiply-adds only. The first strip is asked for before the kernel before has
finished (see overlap.py).

What stands before and after a product in a decoder layer is done on the way: the residual's addition and RMSNorm of x,
whose factor is a scalar of a row and so can wait for the end, and SwiGLU's product of two halves of the outputs.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap, rmsnorm
from models.kernels.rmsnorm import Norm

MAX_ROWS = 2


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, sum): y = h W^T + bias, and of gated weights silu(first half of y) * second half; sums are fp32.

    x       [M, K] contiguous, 1 <= M <= MAX_ROWS
    weight  [N, K] contiguous; bias [N]; y is [M, N], or [M, N / 2] where gated, in x's dtype
    norm    h is the norm of x + residual, and sum is x + residual, a new tensor; without, h and sum are x itself
    out     y's memory, contiguous; None: a new tensor
    """
    rows, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 0 < rows <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == columns
    residual = None if norm is None else norm.residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous()
    total = x if residual is None else torch.empty_like(x)
    block_n, strip, warps = _tile(rows, weight.shape[0], columns)
    _gemv[(triton.cdiv(outputs * (1 + gated), block_n),)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        weight,
        weight if bias is None else bias,
        out,
        total,
        0.0 if norm is None else norm.eps,
        outputs,
        M=rows,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        NORM=norm is not None,
        ADDS=residual is not None,
        GATED=gated,
        BLOCK_N=block_n,
        STRIP=strip,
        num_warps=warps,
        **overlap.launch_options(x.device, rows),
    )
    return out, total


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, norm: Norm | None = None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    total, h = x.float(), x.float()
    if norm is not None:
        total = total if norm.residual is None else total + norm.residual.float()
        h = rmsnorm.reference(total, None, norm.weight, norm.eps)[0]
    y = F.linear(h, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(x.dtype), total.to(x.dtype)


def _tile(rows: int, outputs: int, columns: int) -> tuple[int, int, int]:
    """(rows of W a program, columns of W a load, warps)."""
    # Measured on an H200 with the products of Qwen3-0.6B.
    if columns > 2048:
        block_n, strip, warps = 2, 2048, 4
    elif outputs > 65_536:
        block_n, strip, warps = 4, 512, 2
    elif outputs > 4096:
        block_n, strip, warps = 4, 256, 1
    elif outputs > 2048 and rows == 1:
        block_n, strip, warps = 8, 1024, 8
    else:
        block_n, strip, warps = 4, 1024, 4
    return block_n, min(strip, 1 << (columns - 1).bit_length()), warps


@triton.jit
def _gemv(
    x,
    residual,
    gain,
    weight,
    bias,
    out,
    total,
    eps,
    outputs,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    if GATED:  # a gate and its up lie side by side
        n = (first_row + lane) // 2 + (lane % 2) * outputs
        inside = (first_row + lane < 2 * outputs)[:, None]
    else:
        n = first_row + lane
        inside = (n < outputs)[:, None]
    k = tl.arange(0, STRIP)
    source = weight + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    w = tl.load(source, mask=inside & (k < COLUMNS)[None, :], other=0.0)
    overlap.wait_and_trigger(OVERLAP)

    # Of each row of x: a third dimension would send W through shared memory to change its layout.
    sums = ()
    squares = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BLOCK_N, STRIP], dtype=tl.float32),)
        squares = squares + (tl.zeros([STRIP], dtype=tl.float32),)
    for first in range(0, COLUMNS, STRIP):
        following = w
        if COLUMNS > STRIP:
            following = tl.load(source + first + STRIP, mask=inside & (k < COLUMNS - STRIP - first)[None, :], other=0.0)
        column = first + k
        within = column < COLUMNS
        next_sums = ()
        next_squares = ()
        for row in tl.static_range(M):
            h = tl.load(x + row * COLUMNS + column, mask=within, other=0.0).to(tl.float32)
            square = squares[row]
            if NORM:
                if ADDS:
                    h += tl.load(residual + row * COLUMNS + column, mask=within, other=0.0).to(tl.float32)
                    tl.store(
                        total + row * COLUMNS + column,
                        h.to(total.dtype.element_ty),
                        mask=within & (tl.program_id(0) == 0),
                    )
                square += h * h
                h *= tl.load(gain + column, mask=within, other=0.0).to(tl.float32)
            next_sums = next_sums + (sums[row] + w.to(tl.float32) * h[None, :],)
            next_squares = next_squares + (square,)
        sums = next_sums
        squares = next_squares
        w = following

    shift = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + n, mask=first_row + lane < outputs * (2 if GATED else 1), other=0.0).to(tl.float32)
    for row in tl.static_range(M):
        y = tl.sum(sums[row], 1)
        if NORM:
            y *= tl.rsqrt(tl.sum(squares[row], 0) / COLUMNS + eps)
        y += shift
        if GATED:
            gate, up = tl.split(tl.reshape(y, [BLOCK_N // 2, 2]))
            column = first_row // 2 + tl.arange(0, BLOCK_N // 2)
            y = gate * tl.sigmoid(gate) * up
        else:
            column = n
        tl.store(out + row * outputs + column, y.to(out.dtype.element_ty), mask=column < outputs)
