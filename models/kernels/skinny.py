"""x W^T for three to 256 rows of x: a matrix product that is bound by the bytes of W.

A program takes up to 128 rows of x (padded to a tile that tensor cores take) and a few rows of W; up to 64 rows of x W
is read once. Where the rows of W are too few to fill the card, several programs share them and cut K between them, and
the one that finishes last adds the parts up, always in the same order. All of W can be asked for before the kernel
before has finished (see overlap.py), and that, with the norms and SwiGLU inside, is what more than 64 rows gain here
over a library's product:

    held   a program's share of W stands in its registers by then: a small one (_HELD_COLUMNS columns), so that all
           programs find room beside the kernel before. Where the rows of W are few, which have to be shared anyway.
    not    the share is asked into the L2 cache, and walked along K with several loads in flight.

What stands between two products of decoder layers is done on the way: SwiGLU's product of two halves of the outputs,
as in gemv.py, and an RMSNorm with the residual's addition before it. Tensor cores want x as it lies in memory, so the
norm is begun where x is made: add_skinny() leaves x * weight and sums of squares, and skinny(), given those, multiplies
its results with the factor of each row.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import gemv, overlap, rmsnorm
from models.kernels.rmsnorm import Norm

MAX_ROWS = 256

_LEAST_BLOCK_N = 32
_LEAST_BLOCK_M = 64  # where several programs share the rows of x

_HELD_COLUMNS = 512
_MOST_HELD_ROWS = 32  # of x; more take the registers that W would stand in
_MOST_HELD_SPLITS = 8

reference = gemv.reference


@dataclass(frozen=True, slots=True)
class Added:
    """x + residual [M, N] and the norm of it, begun: `gained` [M, N] is the sum times the norm's weight, and lacks the
    factor of each row, rsqrt(mean(sum^2) + eps); squares fp32 [G, M] are parts of the sums of squares, to be added up
    over G. eps is the norm's."""

    total: Tensor
    gained: Tensor
    squares: Tensor
    eps: float


def counters(weight: Tensor) -> Tensor:
    """What the programs that share rows of this weight count their arrivals in: zeros, and zeros again after a launch.
    Launches that may run at once must not share it."""
    most = triton.cdiv(weight.shape[0], _LEAST_BLOCK_N) * (MAX_ROWS // _LEAST_BLOCK_M)
    return torch.zeros(most, dtype=torch.int32, device=weight.device)


def skinny(
    x: Tensor | Added,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """gemv.gemv's y without a norm, for x [M, K] of up to MAX_ROWS rows and K a multiple of 64, or for the norm of what
    is Added. arrived: of counters(weight)."""
    begun, given = (x, x.gained) if isinstance(x, Added) else (None, x)
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(given.shape[0], outputs, dtype=given.dtype, device=given.device)
    assert out.shape == (given.shape[0], outputs) and out.dtype == given.dtype and out.is_contiguous()
    _launch(given, weight, bias, arrived, out, gated=gated, begun=begun)
    return out


def add_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor, norm: Norm) -> Added:
    """skinny(x) + norm.residual [M, N], and the norm of it, begun.

    `gained` is as large as the sum before its norm: of half precisions bfloat16 alone has room for it.
    """
    assert norm.residual is not None
    rows, outputs = x.shape[0], weight.shape[0]
    block_n = _tile(rows, outputs, weight.shape[1]).block_n
    total = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    squares = torch.empty(triton.cdiv(outputs, block_n), rows, dtype=torch.float32, device=x.device)
    added = Added(total, torch.empty_like(total), squares, norm.eps)
    _launch(x, weight, bias, arrived, added.gained, adds=(norm, added))
    return added


def add_reference(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """(norm, sum): what add_skinny() begins, finished."""
    assert norm.residual is not None
    total = reference(x.float(), weight, bias)[0] + norm.residual.float()
    return rmsnorm.reference(total, None, norm.weight, norm.eps)[0].to(x.dtype), total.to(x.dtype)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    out: Tensor,
    *,
    gated: bool = False,
    begun: Added | None = None,
    adds: tuple[Norm, Added] | None = None,
) -> None:
    rows, columns = x.shape
    assert 0 < rows <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == columns
    tile = _tile(rows, weight.shape[0], columns)
    assert columns % tile.block_k == 0
    parts = out
    if tile.splits > 1:
        parts = torch.empty(tile.splits, rows, weight.shape[0], dtype=torch.float32, device=x.device)
    norm, added = adds or (None, None)
    _skinny[(triton.cdiv(weight.shape[0], tile.block_n), tile.splits, triton.cdiv(rows, tile.block_m))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        arrived,
        parts if begun is None else begun.squares,
        0.0 if begun is None else begun.eps,
        x if norm is None else norm.residual,
        weight if norm is None else norm.weight,
        out if added is None else added.total,
        parts if added is None else added.squares,
        rows,
        out.shape[1],
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        GATED=gated,
        GROUPS=0 if begun is None else begun.squares.shape[0],
        ADDS=added is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        HELD=tile.is_held,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap.launch_options(x.device, rows),
    )


@dataclass(frozen=True, slots=True)
class _Tile:
    """block_m, block_n: rows of x and of W a program; block_k: columns of W a load; splits: programs that share rows of
    both."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    is_held: bool = False
    warps: int = 4
    stages: int = 4


def _tile(rows: int, outputs: int, columns: int) -> _Tile:
    """Measured on an H200 with the products of Qwen3-0.6B, within whole steps."""
    few = outputs // 32 < 128  # to fill the card
    if rows > 64:
        return _tile_of_many(rows, outputs, columns, few)
    block_m = max(16, triton.next_power_of_2(rows))
    splits = columns // _HELD_COLUMNS
    if few and rows <= _MOST_HELD_ROWS and columns % _HELD_COLUMNS == 0 and splits <= _MOST_HELD_SPLITS:
        return _Tile(block_m, 32, 256 if rows <= 16 else 512, splits, True)
    block_k = 128 if columns % 128 == 0 else 64
    splits = 1
    while outputs // 32 * splits < 128 and columns % (2 * splits * block_k) == 0 and splits < 8:
        splits *= 2
    return _Tile(block_m, 64 if rows > 32 and outputs > 4096 else 32, block_k, splits, False)


def _tile_of_many(rows: int, outputs: int, columns: int, few: bool) -> _Tile:
    """Of more than 64 rows, where what is loaded for each product counts: x is, for every tile of W anew."""
    widest = next(block_k for block_k in (256, 128, 64) if columns % block_k == 0)
    block_k = min(widest, 128)
    if few:
        splits = 2 if rows <= 128 and columns > 2048 and columns % (2 * widest) == 0 else 1
        return _Tile(64, 32, widest, splits, stages=3)
    if outputs <= 4096:
        return _Tile(64, 64, block_k) if rows <= 128 else _Tile(128, 64, block_k, warps=8, stages=3)
    return _Tile(128, 64, block_k, warps=8, stages=3) if rows <= 128 else _Tile(128, 128, 64, warps=8)


@triton.jit(do_not_specialize=["rows"])
def _skinny(
    x,
    weight,
    bias,
    out,
    parts,
    arrived,
    squares,
    eps,
    residual,
    gain,
    total,
    out_squares,
    rows,
    outputs,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HELD: tl.constexpr,
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
    k = tl.arange(0, BLOCK_K)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    counter = arrived + tl.program_id(2) * tl.num_programs(0) + group
    present = (m < rows)[:, None]
    mine = present & exists[None, :]
    place = m[:, None] * outputs + n[None, :]
    held = ()
    if HELD:
        for i in tl.static_range(SHARE // BLOCK_K):
            held = held + (tl.load(source + start + i * BLOCK_K + k[None, :]),)
    else:
        line = start + tl.arange(0, triton.next_power_of_2(SHARE // LINE)) * LINE
        overlap.prefetch(source + tl.minimum(line, end - 1)[None, :], OVERLAP)
    if SPLITS > 1:
        overlap.prefetch(counter, OVERLAP)
    if ADDS:  # no kernel makes these just before
        added = tl.load(residual + place, mask=mine, other=0.0).to(tl.float32)
        gains = tl.load(gain + n, mask=exists, other=0.0).to(tl.float32)
    overlap.wait_and_trigger(OVERLAP)

    at = m[:, None] * COLUMNS + k[None, :]
    if GROUPS > 0:
        piece = tl.arange(0, triton.next_power_of_2(GROUPS))
        known = (piece < GROUPS)[:, None] & (m < rows)[None, :]
        square = tl.load(squares + piece[:, None] * rows + m[None, :], mask=known, other=0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if HELD:
        for i in tl.static_range(SHARE // BLOCK_K):
            h = tl.load(x + at + start + i * BLOCK_K, mask=present, other=0.0)
            sums = tl.dot(h, tl.trans(held[i]), sums, input_precision=PRECISION)
    else:
        for first in range(start, end, BLOCK_K):
            w = tl.load(source + first + k[None, :])
            h = tl.load(x + at + first, mask=present, other=0.0)
            sums = tl.dot(h, tl.trans(w), sums, input_precision=PRECISION)

    if SPLITS > 1:
        part = parts + m[:, None] * weight_rows + lane[None, :]
        tl.store(part + split * (rows * weight_rows), sums, mask=mine)
        tl.debug_barrier()  # all warps have stored before one of them counts
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLITS - 1:
            return
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for other in tl.static_range(SPLITS):
            # From the L2 cache: another multiprocessor wrote it.
            sums += tl.load(part + other * (rows * weight_rows), mask=mine, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    if GROUPS > 0:
        sums *= tl.rsqrt(tl.sum(square, 0) / COLUMNS + eps)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_N // 2, 2]))
        column = group * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        y = gate * tl.sigmoid(gate) * up
        inside = present & (column < outputs)[None, :]
        tl.store(out + m[:, None] * outputs + column[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        if ADDS:
            sums += added
            tl.store(total + place, sums.to(total.dtype.element_ty), mask=mine)
            in_group = tl.where(exists[None, :], sums * sums, 0.0)
            tl.store(out_squares + group * rows + m, tl.sum(in_group, 1), mask=m < rows)
            sums *= gains[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=mine)
