"""Attention of one new token a sequence over its paged KV cache.

Bound by the bytes of the keys and values, which are read once: a program takes all query heads of one KV head
(padded to 16 rows, what a tensor core takes at least) and a part of one sequence's keys. Parts of one sequence are
merged by a second kernel. The grid is (KV heads, sequences, splits), fixed by sizes that a CUDA graph fixes;
lengths and block tables are read on the device, and a program whose part is empty returns at once.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import paged_prefill
from models.kernels.paged_keys import LOG2_E, Partials, attend_keys


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    out: Tensor,
    partials: Partials | None = None,
    window: int = 0,
) -> None:
    """Fills out [S, Hq, D], contiguous; 0 for a sequence of no tokens (padding).

    q               [S, Hq, D], last dimension contiguous
    k_cache, v_cache  [num_blocks, block_size, Hkv, D] contiguous; the new tokens' keys and values are in them
    context_lens    int32 [S], tokens of each sequence, the new one included
    block_tables    int32 [S, W], last dimension contiguous
    partials        the workspace of a split walk, [S, Hq, splits, D]; None: a sequence is not split
    window          keys a query sees, itself included; 0: all
    """
    num_seqs, heads = q.shape[:2]
    block_size, kv_heads, dim = k_cache.shape[1:]
    if not num_seqs:
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    assert out.is_contiguous() and out.shape == q.shape
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    block_n, stages = _tile(padded, q.element_size())
    splits = 1 if partials is None else partials.splits
    _paged_decode[(kv_heads, num_seqs, splits)](
        q,
        k_cache,
        v_cache,
        out if partials is None else partials.values,
        out if partials is None else partials.log_sums,
        context_lens,
        block_tables,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PADDED=padded,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=stages,
    )
    if partials is not None:
        partials.merge(out)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    window: int = 0,
) -> Tensor:
    """fp32 [S, Hq, D]: prefill with chunks of one token, none for a sequence of no tokens."""
    rows = torch.arange(q.shape[0] + 1, device=q.device)
    filled = context_lens > 0
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    out[filled] = paged_prefill.reference(
        q[filled],
        k_cache,
        v_cache,
        rows[: int(filled.sum()) + 1],
        context_lens[filled],
        block_tables[filled],
        scale,
        window=window,
    )
    return out


def _tile(dim: int, element_size: int) -> tuple[int, int]:
    """(BLOCK_N, stages): tiles of 16 KiB of keys and as many of values, three of each in flight."""
    return max(16, min(128, 16384 // (dim * element_size))), 3


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["context_lens", "block_tables"])
def _paged_decode(
    q,
    k_cache,
    v_cache,
    out,
    log_sums,
    context_lens,
    block_tables,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    context = tl.load(context_lens + seq)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    head = kv_head * GROUP + lane
    valid = lane < GROUP
    target = seq * (KV_HEADS * GROUP) + head
    if SPLIT:
        target = target * tl.num_programs(2) + tl.program_id(2)

    start = 0
    end = context
    if WINDOW > 0:
        start = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        start = start + tl.program_id(2) * share
        end = tl.minimum(start + share, end)
        if start >= end:
            tl.store(log_sums + target, tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), mask=valid)
            return
    # The keys of [start, whole) need no mask: neither the end nor the window cuts them.
    whole = start
    if WINDOW == 0:
        whole = start + (end - start) // BLOCK_N * BLOCK_N

    inside = valid[:, None] & (dim < DIM)[None, :]
    queries = tl.load(q + seq * q_row_stride + (head * q_head_stride)[:, None] + dim[None, :], mask=inside, other=0.0)
    position = tl.zeros([BLOCK_M], dtype=tl.int32) + (context - 1)
    table = block_tables + seq * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, DIM_PADDED], dtype=tl.float32)
    for key in range(start, whole, BLOCK_N):
        total, peak, values = attend_keys(
            queries, position, total, peak, values, key, end, table, k_head, v_head, scale,
            KV_HEADS * DIM, DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for key in range(whole, end, BLOCK_N):
        total, peak, values = attend_keys(
            queries, position, total, peak, values, key, end, table, k_head, v_head, scale,
            KV_HEADS * DIM, DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, True, PRECISION,
        )  # fmt: skip

    values = values / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        tl.store(log_sums + target, peak + tl.log2(total), mask=valid)
    tl.store(out + (target * DIM)[:, None] + dim[None, :], values.to(out.dtype.element_ty), mask=inside)
