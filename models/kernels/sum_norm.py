"""The sum over ranks of what a product left on each, the residual's addition and the RMSNorm behind it: one kernel.

With two cards a layer's products are short, and what stands between them counts. An exchange by a kernel of its own
starts when the product has ended, waits until all ranks have come that far and again until all have read, and the
kernel behind it starts when that has ended. Here programs start early (see overlap.py), have the residual and the
norm's weight by then, and wait once.

A program takes a row, or one row after the other where there are more than programs that surely run at once: one that
waits must not keep that from starting which it waits for, in whatever order a card starts them. It tells every other
rank's program of that row that this rank's summand is there, by the number of exchanges it has had so far, waits to be
told as much, and adds up all ranks' summands in their order: what is replicated stays equal in every bit. Nobody is
told that a summand has been read. So before a product writes to the same place again, there must have been another
exchange in which every rank heard of every other: of two places each is used in turn.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap, rmsnorm
from models.kernels.rmsnorm import Norm


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's view of memory that all ranks share: addresses are those at which this rank finds it.

    rank       this one's number, of places.shape[0]
    places     int64 [ranks]: where each rank's summand stands, 16 bytes aligned, [rows, N] in the norm's type
    flags      int64 [ranks]: where each rank is told how far the others are
    told       int32 [most rows * ranks]: where this one is, zeros before the first exchange
    exchanges  int32 [most rows]: how many exchanges a row has had on this rank, which is nobody else's to read
    """

    rank: int
    places: Tensor
    flags: Tensor
    told: Tensor
    exchanges: Tensor


def sum_norm(ranks: Ranks, rows: int, norm: Norm, patience: int = 0) -> tuple[Tensor, Tensor]:
    """(rmsnorm(sum + norm.residual), sum + norm.residual), both new tensors [rows, N] in the weight's type, computed in
    fp32; sum is that of all ranks' summands.

    patience: after looking in vain so many times for what another rank tells, a row is NaN; 0: it looks for ever.
    """
    residual = norm.residual
    size = norm.weight.shape[0]
    assert residual is not None and residual.shape == (rows, size) and residual.is_contiguous()
    assert 0 < rows <= ranks.exchanges.shape[0]
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    block, warps = rmsnorm.program(size)
    at_once = _at_once(residual.device, warps)
    _sum_norm[(min(rows, at_once),)](
        ranks.places,
        ranks.flags,
        ranks.told,
        ranks.exchanges,
        residual,
        norm.weight,
        out,
        total,
        norm.eps,
        patience,
        rows,
        LOOP=rows > at_once,
        SIZE=size,
        BLOCK=block,
        RANK=ranks.rank,
        RANKS=ranks.places.shape[0],
        num_warps=warps,
        **overlap.launch_options(residual.device, rows),
    )
    return out, total


@functools.cache
def _at_once(device: torch.device, warps: int) -> int:
    """How many programs surely run at once: a quarter of the threads that a multiprocessor can have."""
    if device.type != "cuda":  # the interpreter's run one after the other
        return 2**20
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * max(1, 512 // (32 * warps))


def reference(summands: list[Tensor], norm: Norm) -> tuple[Tensor, Tensor]:
    """summands: [rows, N] each, by rank."""
    total = sum((summand.float() for summand in summands[1:]), summands[0].float())
    assert norm.residual is not None
    normed, total = rmsnorm.reference(total, norm.residual, norm.weight, norm.eps)
    return normed.to(norm.weight.dtype), total.to(norm.weight.dtype)


@triton.jit(do_not_specialize=["patience", "rows"])
def _sum_norm(
    places,
    flags,
    told,
    exchanges,
    residual,
    weight,
    out,
    total,
    eps,
    patience,
    rows,
    LOOP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    if LOOP:
        # No "for", whose loads may be moved ahead, to where nobody has waited.
        while row < rows:
            _row(row, places, flags, told, exchanges, residual, weight, out, total, eps, patience,
                 SIZE, BLOCK, RANK, RANKS, OVERLAP)  # fmt: skip
            row += tl.num_programs(0)
    else:
        _row(row, places, flags, told, exchanges, residual, weight, out, total, eps, patience,
             SIZE, BLOCK, RANK, RANKS, OVERLAP)  # fmt: skip


@triton.jit
def _row(
    row,
    places,
    flags,
    told,
    exchanges,
    residual,
    weight,
    out,
    total,
    eps,
    patience,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = row.to(tl.int64) * SIZE + column
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # The kernel before is the product: the residual, and the last exchange, are older.
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(exchanges + row) + 1
    told += row * RANKS
    mine = ()  # where each rank is told of this one
    summands = ()
    for rank in tl.static_range(RANKS):
        mine = mine + (tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + row * RANKS + RANK,)
        place = tl.load(places + rank).to(tl.pointer_type(weight.dtype.element_ty))
        summands = summands + (tl.multiple_of(place, 16) + at,)
    overlap.wait_and_trigger(OVERLAP)

    for other in tl.static_range(RANKS):
        if other != RANK:
            tl.atomic_xchg(mine[other], number, sem="release", scope="sys")
    looks = 0
    for other in tl.static_range(RANKS):
        if other != RANK:
            # A difference, for the number may have wrapped around; the other rank may be further already.
            while (tl.atomic_add(told + other, 0, sem="acquire", scope="sys") - number < 0) & (
                (patience == 0) | (looks < patience)
            ):
                looks += 1
    tl.debug_barrier()  # one thread has looked for all of them
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        # Past the L1 cache, which may hold what stood there before.
        summed += tl.load(summands[rank], mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value += tl.where((patience > 0) & (looks >= patience), float("nan"), summed)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    tl.store(out + at, rmsnorm.normed(value, gain, eps, SIZE).to(out.dtype.element_ty), mask=inside)
    tl.store(exchanges + row, number)
