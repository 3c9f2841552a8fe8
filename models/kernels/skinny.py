"""x W^T for three to 64 rows of x: a matrix product that is bound by the bytes of W, each of which is read once.

A program takes all rows of x (padded to a tile that tensor cores take) and a few rows of W, which it walks along K with
several loads in flight; they are asked for before the kernel before has finished (see overlap.py). Where the rows of W
are too few to fill the card, several programs share them and cut K between them, and the one that finishes last adds
the parts up, always in the same order. As in gemv.py, SwiGLU's product of two halves of the outputs is done on the way.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import gemv, overlap

MAX_ROWS = 64

reference = gemv.reference


def counters(weight: Tensor) -> Tensor:
    """What the programs that share rows of this weight count their arrivals in: zeros, and zeros again after a launch.
    Launches that may run at once must not share it."""
    return torch.zeros(triton.cdiv(weight.shape[0], 16), dtype=torch.int32, device=weight.device)


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """gemv.gemv's y without a norm, for x [M, K] of up to MAX_ROWS rows and K a multiple of 64. arrived: of
    counters(weight)."""
    rows, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 0 < rows <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == columns
    block_n, block_k, splits, warps, stages = _tile(weight.shape[0], columns)
    block_m = max(16, triton.next_power_of_2(rows))
    assert columns % block_k == 0
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous()
    parts = torch.empty(splits, rows, weight.shape[0], dtype=torch.float32, device=x.device) if splits > 1 else out
    _skinny[(triton.cdiv(weight.shape[0], block_n), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        arrived,
        rows,
        outputs,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        GATED=gated,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **overlap.launch_options(x.device),
    )
    return out


def _tile(outputs: int, columns: int) -> tuple[int, int, int, int, int]:
    """(rows of W a program, columns of W a load, programs that share rows of W, warps, loads in flight)."""
    block_k = 128 if columns % 128 == 0 else 64
    splits = 1
    while outputs // 32 * splits < 128 and columns % (2 * splits * block_k) == 0 and splits < 8:
        splits *= 2
    return 32, block_k, splits, 4, 4


@triton.jit(do_not_specialize=["rows"])
def _skinny(
    x,
    weight,
    bias,
    out,
    parts,
    arrived,
    rows,
    outputs,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    SHARE: tl.constexpr = (COLUMNS // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)  # elements of a cache line
    group = tl.program_id(0)
    split = tl.program_id(1)
    start = split * SHARE
    end = tl.minimum(start + SHARE, COLUMNS)
    lane = group * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:  # a gate and its up lie side by side
        n = lane // 2 + (lane % 2) * outputs
        weight_rows = 2 * outputs
    else:
        n = lane
        weight_rows = outputs
    exists = lane < weight_rows
    source = weight + tl.where(exists, n, 0).to(tl.int64)[:, None] * COLUMNS
    line = start + tl.arange(0, triton.next_power_of_2(SHARE // LINE)) * LINE
    overlap.prefetch(source + tl.minimum(line, end - 1)[None, :], OVERLAP)
    overlap.wait_and_trigger(OVERLAP)

    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    present = (m < rows)[:, None]
    at = m[:, None] * COLUMNS + k[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        w = tl.load(source + first + k[None, :])
        h = tl.load(x + at + first, mask=present, other=0.0)
        sums = tl.dot(h, tl.trans(w), sums, input_precision=PRECISION)

    if SPLITS > 1:
        part = parts + m[:, None] * weight_rows + lane[None, :]
        mine = present & exists[None, :]
        tl.store(part + split * (rows * weight_rows), sums, mask=mine)
        tl.debug_barrier()  # all warps have stored before one of them counts
        if tl.atomic_add(arrived + group, 1, sem="acq_rel") != SPLITS - 1:
            return
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for other in tl.static_range(SPLITS):
            # From the L2 cache: another multiprocessor wrote it.
            sums += tl.load(part + other * (rows * weight_rows), mask=mine, other=0.0, cache_modifier=".cg")
        tl.store(arrived + group, 0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_N // 2, 2]))
        column = group * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        y = gate * tl.sigmoid(gate) * up
    else:
        column = n
        y = sums
    inside = present & (column < outputs)[None, :]
    tl.store(out + m[:, None] * outputs + column[None, :], y.to(out.dtype.element_ty), mask=inside)
