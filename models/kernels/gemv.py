"""x W^T for one to four rows of x, bound by the bytes of W, each of which is read once.

At these sizes a matrix product's tiles leave most of the card idle or its tensor cores multiplying zeros. Here a
program takes a few rows of W, keeps one running product per element of a strip of them, and sums along the strip at
the end: the loop is loads and fused multiply-adds only.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 4
_STRIP = 1024  # columns of W a load


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] contiguous, 1 <= M <= MAX_ROWS; weight [N, K] contiguous; bias [N] -> [M, N] in x's dtype, summed in
    fp32."""
    rows, columns = x.shape
    outputs = weight.shape[0]
    assert 0 < rows <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == columns
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_n = 4 if rows <= 2 else 2
    _gemv[(triton.cdiv(outputs, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        outputs,
        M=rows,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        STRIP=min(_STRIP, triton.next_power_of_2(columns)),
        num_warps=4,
    )
    return out


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    out,
    outputs,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, STRIP)
    source = weight + n.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    inside = (n < outputs)[:, None]
    # Written out for each row of x: a third dimension would send W through shared memory to change its layout.
    sum0 = tl.zeros([BLOCK_N, STRIP], dtype=tl.float32)
    sum1 = tl.zeros([BLOCK_N, STRIP], dtype=tl.float32)
    sum2 = tl.zeros([BLOCK_N, STRIP], dtype=tl.float32)
    sum3 = tl.zeros([BLOCK_N, STRIP], dtype=tl.float32)
    for first in range(0, COLUMNS, STRIP):
        within = k < COLUMNS - first
        w = tl.load(source + first, mask=inside & within[None, :], other=0.0).to(tl.float32)
        sum0 += w * tl.load(x + first + k, mask=within, other=0.0).to(tl.float32)[None, :]
        if M > 1:
            sum1 += w * tl.load(x + COLUMNS + first + k, mask=within, other=0.0).to(tl.float32)[None, :]
        if M > 2:
            sum2 += w * tl.load(x + 2 * COLUMNS + first + k, mask=within, other=0.0).to(tl.float32)[None, :]
        if M > 3:
            sum3 += w * tl.load(x + 3 * COLUMNS + first + k, mask=within, other=0.0).to(tl.float32)[None, :]
    shift = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + n, (tl.sum(sum0, 1) + shift).to(dtype), mask=n < outputs)
    if M > 1:
        tl.store(out + outputs + n, (tl.sum(sum1, 1) + shift).to(dtype), mask=n < outputs)
    if M > 2:
        tl.store(out + 2 * outputs + n, (tl.sum(sum2, 1) + shift).to(dtype), mask=n < outputs)
    if M > 3:
        tl.store(out + 3 * outputs + n, (tl.sum(sum3, 1) + shift).to(dtype), mask=n < outputs)
