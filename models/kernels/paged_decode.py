"""Attention of one new token a sequence over its paged KV cache.

Bound by the bytes of the keys and values, which are read once: a program takes all query heads of one KV head
(padded to 16 rows, what a tensor core takes at least) and a part of one sequence's keys. Of the programs that share a
sequence the one that finishes last merges their parts. The grid is (KV heads, sequences, splits), fixed by sizes that
a CUDA graph fixes; lengths and block tables are read on the device, and a program whose part is empty returns at once.

decode_qkv() takes what rope_cache.py does before into the same kernel: each program rotates its own queries, and the
one that has a sequence's last key writes that and its value to the cache before it reads them there.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap, paged_prefill
from models.kernels.paged_keys import LOG2_E, MOST_SPLITS, Partials, attend_keys
from models.kernels.rope_cache import Rotation, rotated_heads


@dataclass(frozen=True, slots=True)
class SplitWalk:
    """What a walk by several programs a sequence needs: their results, [S, Hq, splits, D], and arrived, int32 zeros of
    at least S * Hkv, which are zeros again after a launch. Launches that may run at once must not share it."""

    partials: Partials
    arrived: Tensor


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    out: Tensor,
    split: SplitWalk | None = None,
    window: int = 0,
) -> None:
    """Fills out [S, Hq, D], contiguous; 0 for a sequence of no tokens (padding).

    q               [S, Hq, D], last dimension contiguous
    k_cache, v_cache  [num_blocks, block_size, Hkv, D] contiguous; the new tokens' keys and values are in them
    context_lens    int32 [S], tokens of each sequence, the new one included
    block_tables    int32 [S, W], last dimension contiguous
    split           None: a sequence is not split
    window          keys a query sees, itself included; 0: all
    """
    _launch(q, None, k_cache, v_cache, context_lens, block_tables, scale, out, split, window)


def decode_qkv(
    qkv: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    out: Tensor,
    split: SplitWalk | None = None,
    window: int = 0,
) -> None:
    """paged_decode of the queries of qkv [S, (Hq + 2 * Hkv) * D], contiguous, after rope_cache has treated it: the
    token of row s is its sequence's last, and goes to the cache at rotation.slots[s]."""
    kv_heads, dim = k_cache.shape[2:]
    assert qkv.is_contiguous() and qkv.shape == (out.shape[0], (out.shape[1] + 2 * kv_heads) * dim)
    q = qkv.view(out.shape[0], -1, dim)[:, : out.shape[1]]
    _launch(q, rotation, k_cache, v_cache, context_lens, block_tables, scale, out, split, window)


def _launch(
    q: Tensor,
    rotation: Rotation | None,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor,
    split: SplitWalk | None,
    window: int,
) -> None:
    num_seqs, heads = q.shape[:2]
    block_size, kv_heads, dim = k_cache.shape[1:]
    if not num_seqs:
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    assert out.is_contiguous() and out.shape == q.shape
    assert split is None or split.arrived.numel() >= num_seqs * kv_heads
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    splits = 1 if split is None else split.partials.splits
    block_n, warps, stages = _tile(padded, q.element_size())
    _paged_decode[(kv_heads, num_seqs, splits)](
        q,
        *(rotation.arguments(q) if rotation is not None else (q, q, context_lens, q, q, 0.0)),
        k_cache,
        v_cache,
        out,
        out if split is None else split.partials.values,
        out if split is None else split.partials.log_sums,
        context_lens if split is None else split.arrived,
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
        MOST_SPLITS=MOST_SPLITS,
        ROTATES=rotation is not None,
        NORMS=rotation is not None and rotation.norms is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **overlap.launch_options(q.device),
    )


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


def _tile(dim: int, element_size: int) -> tuple[int, int, int]:
    """(BLOCK_N, warps, stages). Measured on an H200 with heads of 128 in bf16, 1 to 256 sequences of 320 to 3,648 keys:
    two warps want little of a multiprocessor each, and it holds many."""
    return max(16, min(128, 16384 // (dim * element_size))), 2, 2


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["context_lens", "block_tables"])
def _paged_decode(
    q,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    eps,
    k_cache,
    v_cache,
    out,
    part_values,
    part_log_sums,
    arrived,
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
    MOST_SPLITS: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_lens + seq)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    head = kv_head * GROUP + lane
    valid = lane < GROUP

    start = 0
    end = context
    if WINDOW > 0:
        start = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    parts = 1  # those that have keys; a sequence without any has one all the same
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), BLOCK_N), 1) * BLOCK_N
        parts = tl.maximum(tl.cdiv(end - start, share), 1)
        start = start + split * share
        end = tl.minimum(start + share, end)
    table = block_tables + seq * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    overlap.wait_and_trigger(OVERLAP)
    if SPLIT:
        if split >= parts:
            return
    # The keys of [start, whole) need no mask: neither the end nor the window cuts them.
    whole = start
    if WINDOW == 0:
        whole = start + (end - start) // BLOCK_N * BLOCK_N

    inside = valid[:, None] & (dim < DIM)[None, :]
    query_rows = q + seq * q_row_stride + (head * q_head_stride)[:, None]
    if ROTATES:
        queries = rotated_heads(query_rows, seq, cos, sin, q_weight, eps, dim, inside, DIM, NORMS)
        queries = queries.to(k_cache.dtype.element_ty)
        slot = tl.load(slots + seq)
        if (slot >= 0) & (split == parts - 1):
            one = tl.arange(0, 1)[:, None]
            key_row = q + seq * q_row_stride + ((KV_HEADS * GROUP + kv_head) * DIM + one)
            written = (one == 0) & (dim < DIM)[None, :]
            at = (slot * KV_HEADS + kv_head) * DIM + dim[None, :]
            new_key = rotated_heads(key_row, seq, cos, sin, k_weight, eps, dim, written, DIM, NORMS)
            tl.store(k_cache + at, new_key.to(k_cache.dtype.element_ty), mask=written)
            new_value = tl.load(key_row + KV_HEADS * DIM + dim[None, :], mask=written, other=0.0)
            tl.store(v_cache + at, new_value.to(v_cache.dtype.element_ty), mask=written)
        tl.debug_barrier()  # the threads that read the new key are not those that wrote it
    else:
        queries = tl.load(query_rows + dim[None, :], mask=inside, other=0.0)
    position = tl.zeros([BLOCK_M], dtype=tl.int32) + (context - 1)
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
    target = seq * (KV_HEADS * GROUP) + head
    if SPLIT:
        if parts > 1:
            part = target * tl.num_programs(2) + split
            tl.store(part_log_sums + part, peak * scale + tl.log2(total), mask=valid)
            tl.store(part_values + (part * DIM)[:, None] + dim[None, :], values, mask=inside)
            tl.debug_barrier()  # all warps have stored before one of them counts
            counter = arrived + seq * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                for member in tl.static_range(GROUP):
                    row = seq * (KV_HEADS * GROUP) + kv_head * GROUP + member
                    merged = _merged(part_values, part_log_sums, row * tl.num_programs(2), parts, dim, MOST_SPLITS, DIM)
                    tl.store(out + row * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)
            return
    tl.store(out + (target * DIM)[:, None] + dim[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merged(values, log_sums, first, parts, dim, MOST_SPLITS: tl.constexpr, DIM: tl.constexpr):
    """fp32 [DIM_PADDED]: one head's result from those of its `parts` parts, which lie from `first` on. They are read
    from the L2 cache: other multiprocessors wrote them."""
    split = tl.arange(0, MOST_SPLITS)
    log_sum = tl.load(log_sums + first + split, mask=split < parts, other=float("-inf"), cache_modifier=".cg")
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    at = (first + split[:, None]) * DIM + dim[None, :]
    inside = (split < parts)[:, None] & (dim < DIM)[None, :]
    value = tl.load(values + at, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(value * weight[:, None], 0) / tl.sum(weight, 0)
