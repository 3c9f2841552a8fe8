"""What paged prefill and paged decode share: a walk over a sequence's pages with an online softmax, and the merge of
partial results where several programs each walked a part (split-KV, as in Flash-Decoding; Dao et al., 2023).

Exponentials are of base 2, one instruction: scale carries a factor log2(e). Scores are kept as the product gives them,
and scaled where they are exponents.

Arguments that change from step to step are not specialized on (their being 1, or divisible by 16, or a pointer's
alignment): each new combination would be compiled in the middle of serving.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap

LOG2_E = math.log2(math.e)
MOST_SPLITS = 32


@dataclass(slots=True)
class Partials:
    """Results of up to `splits` programs a row, to be merged: values fp32 [rows, heads, splits, D], each normalised
    over its own keys, and log_sums fp32 [rows, heads, splits], log2 of its sum of exp2(score); -inf: no key."""

    values: Tensor
    log_sums: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, splits: int, dim: int, device: torch.device) -> Partials:
        values = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=device)
        return cls(values, torch.empty(rows, heads, splits, dtype=torch.float32, device=device))

    @property
    def splits(self) -> int:
        return self.values.shape[2]

    def merge(self, out: Tensor) -> None:
        """out [rows, heads, D] contiguous, filled; 0 where no split has a key."""
        rows, heads, splits, dim = self.values.shape
        assert out.is_contiguous() and out.shape == (rows, heads, dim)
        _merge[(rows * heads,)](
            self.values,
            self.log_sums,
            out,
            splits,
            MOST_SPLITS=8 if splits <= 8 else MOST_SPLITS,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            num_warps=1,
            **overlap.launch_options(out.device, rows),
        )


def merge_reference(partials: Partials) -> Tensor:
    """fp32 [rows, heads, D]."""
    weights = torch.exp2(partials.log_sums - partials.log_sums.amax(-1, keepdim=True).clamp(min=-1e30))
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    kept = torch.where(weights[..., None] > 0, partials.values, 0.0)  # an empty split's values are not written
    return (kept * weights[..., None]).sum(2)


def choose_splits(programs: int, longest: int, processors: int, *, least_keys: int) -> int:
    """Into how many parts to cut every sequence's keys: a power of two that gives each of the card's
    multiprocessors about two programs, with parts of at least least_keys where a sequence has `longest` keys.

    Depends only on sizes that a captured graph fixes, never on the lengths of the moment.
    """
    wanted = min(2 * processors // max(programs, 1), longest // least_keys, MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def cache_constants(q: Tensor, k_cache: Tensor) -> dict[str, Any]:
    """The kernels' constants that follow from queries [T, Hq, D] and the cache."""
    block_size, kv_heads, dim = k_cache.shape[1:]
    return {
        "KV_HEADS": kv_heads, "GROUP": q.shape[1] // kv_heads, "DIM": dim,
        "DIM_PADDED": max(16, triton.next_power_of_2(dim)), "BLOCK_SIZE": block_size,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


@triton.jit
def attend_keys(
    q,
    position,
    total,
    peak,
    out,
    start,
    end,
    table,
    k_head,
    v_head,
    scale,
    TOKEN_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the walk: keys [start, start + BLOCK_N), cut at `end` and at each row's position where CAUSAL.

    q [M, DIM_PADDED]; position int32 [M]; (total, peak) fp32 [M] and out fp32 [M, DIM_PADDED] are the running sum of
    weights, maximum of unscaled scores and weighted values, returned updated. scale is positive. table: the sequence's
    row of the block table. k_head, v_head: the caches at this KV head.
    """
    key = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM_PADDED)
    if CAUSAL:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
    else:
        block = tl.load(table + key // BLOCK_SIZE)
    # int64: the pool of one layer has more than 2**31 elements on a large card.
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    at = slot[:, None] * TOKEN_STRIDE + dim[None, :]
    if CAUSAL:
        readable = (key < end)[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_head + at, mask=readable, other=0.0)
        v = tl.load(v_head + at, mask=readable, other=0.0)
    elif DIM == DIM_PADDED:
        k = tl.load(k_head + at)
        v = tl.load(v_head + at)
    else:
        k = tl.load(k_head + at, mask=(dim < DIM)[None, :], other=0.0)
        v = tl.load(v_head + at, mask=(dim < DIM)[None, :], other=0.0)
    return attend_tile(q, position, total, peak, out, k, v, key, end, scale, WINDOW, CAUSAL, PRECISION)


@triton.jit
def attend_tile(
    q,
    position,
    total,
    peak,
    out,
    k,
    v,
    key,
    end,
    scale,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """attend_keys of keys and values k, v [BLOCK_N, DIM_PADDED] that are at hand; key int32 [BLOCK_N]: which they are.
    Without CAUSAL all rows must see all of them."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAUSAL:
        seen = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    if CAUSAL:
        # A row that has seen no key yet would subtract -inf from -inf.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        base = new_peak
    # A multiplication and a subtraction that become one instruction.
    weight = tl.exp2(score * scale - (base * scale)[:, None])
    fade = tl.exp2((peak - base) * scale)
    total = total * fade + tl.sum(weight, 1)
    out = tl.dot(weight.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
    return total, new_peak, out


@triton.jit
def ask_for_keys(
    start,
    end,
    table,
    k_head,
    v_head,
    TOKEN_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Ask for the keys and values of [start, start + BLOCK_N), as far as they are before `end`, to come to the L2
    cache."""
    LINE: tl.constexpr = 128 // (k_head.dtype.element_ty.primitive_bitwidth // 8)  # elements of a cache line
    key = tl.minimum(start + tl.arange(0, BLOCK_N), end - 1)
    slot = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    line = tl.minimum(tl.arange(0, triton.next_power_of_2((DIM + LINE - 1) // LINE)) * LINE, DIM - 1)
    at = slot[:, None] * TOKEN_STRIDE + line[None, :]
    overlap.prefetch(k_head + at, True)
    overlap.prefetch(v_head + at, True)


@triton.jit
def merged(values, log_sums, first, parts, dim, MOST_SPLITS: tl.constexpr, DIM: tl.constexpr):
    """fp32 [DIM_PADDED]: one head's result from those of its `parts` parts, which lie from `first` on. They are read
    from the L2 cache: other multiprocessors wrote them."""
    split = tl.arange(0, MOST_SPLITS)
    at = (first + split[:, None]) * DIM + dim[None, :]
    inside = (split < parts)[:, None] & (dim < DIM)[None, :]
    value = tl.load(values + at, mask=inside, other=0.0, cache_modifier=".cg")
    log_sum = tl.load(log_sums + first + split, mask=split < parts, other=float("-inf"), cache_modifier=".cg")
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    return tl.sum(value * weight[:, None], 0) / tl.sum(weight, 0)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    values,
    log_sums,
    out,
    splits,
    MOST_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    overlap.wait_and_trigger(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST_SPLITS)
    dim = tl.arange(0, DIM_PADDED)
    log_sum = tl.load(log_sums + row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(peak == float("-inf"), 0.0, peak))
    at = (row * splits + split[:, None]) * DIM + dim[None, :]
    # A split without keys has written no values: what stands there may be NaN, so it is not read at all.
    written = (log_sum > float("-inf"))[:, None] & (dim < DIM)[None, :]
    value = tl.load(values + at, mask=written, other=0.0)
    merged = tl.sum(value * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
    tl.store(out + row * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)
