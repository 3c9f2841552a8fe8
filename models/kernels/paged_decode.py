"""Attention of one new token a sequence over its paged KV cache.

Bound by the bytes of the keys and values, which are read once: a program takes all query heads of one KV head
(padded to 16 rows, what a tensor core takes at least) and a part of one sequence's keys. Of the programs that share a
sequence the one that finishes last merges their parts. The grid is (KV heads, sequences, splits), fixed by sizes that
a CUDA graph fixes; lengths and block tables are read on the device, and a program whose part is empty returns at once.

Blocks that several sequences have in common (the system prompt of many conversations) are not read here where a kernel
before has read them for all (shared_prefix.py): a sequence's walk begins behind them, and that kernel's result is added
at the end of its first part. The two run side by side.

decode_qkv() takes what rope_cache.py does before into the same kernel: each program rotates its own queries, and the
one that has a sequence's last keys writes the new one and its value to the cache. It does not read them there: they
enter its softmax from registers. A step of few sequences is bound by how many loads wait for another, so all that does
not depend on the kernel before is asked for before its end, and the rest at once.
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
from models.kernels.paged_keys import LOG2_E, MOST_SPLITS, Partials, ask_for_keys, attend_keys, cache_constants, merged
from models.kernels.rope_cache import Rotation, gains, rotation_arguments, rotation_constants
from models.kernels.shared_prefix import Prefixes, attend_prefixes

# Keys of a part that are on the way to the L2 cache before the kernel before has ended.
_ASKED_AHEAD = 64


@dataclass(frozen=True, slots=True)
class SplitWalk:
    """What a walk by several programs a sequence needs: their results, [S, Hq, splits, D], and arrived, int32 zeros of
    at least S * Hkv, which are zeros again after a launch. Launches that may run at once must not share it. A part has
    at least least_keys keys, so that of short sequences nothing is to be merged."""

    partials: Partials
    arrived: Tensor
    least_keys: int = 1


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
    prefixes: Prefixes | None = None,
) -> None:
    """Fills out [S, Hq, D], contiguous; 0 for a sequence of no tokens (padding).

    q               [S, Hq, D], last dimension contiguous
    k_cache, v_cache  [num_blocks, block_size, Hkv, D] contiguous; the new tokens' keys and values are in them
    context_lens    int32 [S], tokens of each sequence, the new one included
    block_tables    int32 [S, W], last dimension contiguous
    split           None: a sequence is not split
    window          keys a query sees, itself included; 0: all
    prefixes        what sequences have in common, to be read once; without a window
    """
    _launch(q, None, k_cache, v_cache, context_lens, block_tables, scale, out, split, window, prefixes)


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
    prefixes: Prefixes | None = None,
) -> None:
    """paged_decode of the queries of qkv [S, (Hq + 2 * Hkv) * D], contiguous, after rope_cache has treated it: the
    token of row s is its sequence's last, and goes to the cache at rotation.slots[s]."""
    kv_heads, dim = k_cache.shape[2:]
    assert qkv.is_contiguous() and qkv.shape == (out.shape[0], (out.shape[1] + 2 * kv_heads) * dim)
    q = qkv.view(out.shape[0], -1, dim)[:, : out.shape[1]]
    _launch(q, rotation, k_cache, v_cache, context_lens, block_tables, scale, out, split, window, prefixes)


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
    prefixes: Prefixes | None,
) -> None:
    num_seqs, heads = q.shape[:2]
    kv_heads, dim = k_cache.shape[2:]
    if not num_seqs:
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    assert out.is_contiguous() and out.shape == q.shape
    assert split is None or split.arrived.numel() >= num_seqs * kv_heads
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    splits = 1 if split is None else split.partials.splits
    block_n, warps, stages = _tile(padded, q.element_size())
    if prefixes is not None:
        assert not window and prefixes.partials.values.shape[:2] == q.shape[:2]
        attend_prefixes(q, rotation, k_cache, v_cache, block_tables, scale, prefixes)
    _paged_decode[(kv_heads, num_seqs, splits)](
        q,
        *rotation_arguments(rotation, q, context_lens),
        k_cache,
        v_cache,
        out,
        out if split is None else split.partials.values,
        out if split is None else split.partials.log_sums,
        context_lens if split is None else split.arrived,
        context_lens,
        block_tables,
        *((context_lens, q, q) if prefixes is None else prefixes.found()),
        scale * LOG2_E,
        1 if split is None else split.least_keys,
        1 if prefixes is None else prefixes.partials.splits,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        **cache_constants(q, k_cache),
        WINDOW=window,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        SPLIT=splits > 1,
        MOST_SPLITS=8 if splits <= 8 else MOST_SPLITS,
        SHARES=prefixes is not None,
        ASKED_AHEAD=_ASKED_AHEAD,
        **rotation_constants(rotation),
        num_warps=warps,
        num_stages=stages,
        **overlap.launch_options(q.device, num_seqs),
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
    """(BLOCK_N, warps, stages). Measured on an H200 with heads of 128 in bf16, 1 to 256 sequences of 192 to 3,648 keys:
    two warps want little of a multiprocessor each, and it holds many. (One warp with half the keys is 4% faster for
    many sequences of equal lengths, and 4% slower where they differ.)"""
    return max(16, min(128, 16384 // (dim * element_size))), 2, 2


@triton.jit(
    do_not_specialize=["table_stride", "least_keys", "prefix_parts"],
    do_not_specialize_on_alignment=["context_lens", "block_tables", "skipped"],
)
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
    skipped,
    prefix_values,
    prefix_log_sums,
    scale,
    least_keys,
    prefix_parts,
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
    SHARES: tl.constexpr,
    ASKED_AHEAD: tl.constexpr,
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
    within = dim < DIM
    head = kv_head * GROUP + lane
    valid = lane < GROUP

    start = 0
    if SHARES:
        start = tl.load(skipped + seq)
    has_prefix = start > 0
    end = context  # of the keys that are read from the cache
    if WINDOW > 0:
        start = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    if ROTATES:
        end = tl.maximum(context - 1, start)
    parts = 1  # those that have keys; a sequence without any has one all the same
    if SPLIT:
        share = tl.cdiv(tl.maximum(tl.cdiv(end - start, tl.num_programs(2)), least_keys), BLOCK_N) * BLOCK_N
        parts = tl.maximum(tl.cdiv(end - start, share), 1)
        start = start + split * share
        end = tl.minimum(start + share, end)
    table = block_tables + seq * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    if ROTATES:
        slot = tl.load(slots + seq)
        partner = (dim + DIM // 2) % DIM
        angle_cos = tl.load(cos + seq * DIM + dim, mask=within, other=0.0).to(tl.float32)
        angle_sin = tl.load(sin + seq * DIM + dim, mask=within, other=0.0).to(tl.float32)
        q_gain, q_partner_gain = gains(q_weight, dim, partner, within, DIM_PADDED, NORMS)
        k_gain, k_partner_gain = gains(k_weight, dim, partner, within, DIM_PADDED, NORMS)
        if OVERLAP and not SHARES:
            for key in range(start, tl.minimum(end, start + ASKED_AHEAD), BLOCK_N):
                ask_for_keys(key, end, table, k_head, v_head, KV_HEADS * DIM, DIM, BLOCK_SIZE, BLOCK_N)
    if SHARES:
        overlap.trigger(OVERLAP)
    else:
        overlap.wait_and_trigger(OVERLAP)
    if SPLIT:
        if split >= parts:
            return
    # The keys of [start, whole) need no mask: neither the end nor the window cuts them.
    whole = start
    if WINDOW == 0:
        whole = start + (end - start) // BLOCK_N * BLOCK_N

    # Read without having waited: not from a multiprocessor's own cache, which is only sure to be renewed by then.
    CACHE: tl.constexpr = ".cg" if SHARES else ""
    inside = valid[:, None] & within[None, :]
    row = q + seq * q_row_stride
    query_rows = row + (head * q_head_stride)[:, None]
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, DIM_PADDED], dtype=tl.float32)
    if ROTATES:
        key_row = row + (KV_HEADS * GROUP + kv_head) * DIM
        x = tl.load(query_rows + dim[None, :], mask=inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
        other = tl.load(query_rows + partner[None, :], mask=inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
        new = tl.load(key_row + dim, mask=within, other=0.0, cache_modifier=CACHE).to(tl.float32)
        new_other = tl.load(key_row + partner, mask=within, other=0.0, cache_modifier=CACHE).to(tl.float32)
        value = tl.load(key_row + KV_HEADS * DIM + dim, mask=within, other=0.0, cache_modifier=CACHE).to(
            v_cache.dtype.element_ty
        )
        if NORMS:
            scale_q = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x, other = x * (scale_q * q_gain[None, :]), other * (scale_q * q_partner_gain[None, :])
            scale_k = tl.rsqrt(tl.sum(new * new, 0) / DIM + eps)
            new, new_other = new * (scale_k * k_gain), new_other * (scale_k * k_partner_gain)
        queries = (x * angle_cos[None, :] + other * angle_sin[None, :]).to(k_cache.dtype.element_ty)
        new_key = (new * angle_cos + new_other * angle_sin).to(k_cache.dtype.element_ty)
        if (split == parts - 1) & (context > 0):
            if slot >= 0:
                at = (slot * KV_HEADS + kv_head) * DIM + dim
                tl.store(k_cache + at, new_key, mask=within)
                tl.store(v_cache + at, value, mask=within)
            # The softmax of this key alone.
            peak = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
            total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
            values += value.to(tl.float32)[None, :]
    else:
        queries = tl.load(query_rows + dim[None, :], mask=inside, other=0.0, cache_modifier=CACHE)
    position = tl.zeros([BLOCK_M], dtype=tl.int32) + (context - 1)
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

    target = seq * (KV_HEADS * GROUP) + head
    if SHARES:
        overlap.wait(OVERLAP)  # for the prefix, which has most often long been read
        if has_prefix & (split == 0):
            for i in range(prefix_parts):
                at = target * prefix_parts + i
                log_sum = tl.load(prefix_log_sums + at, mask=valid, other=float("-inf"))
                read = tl.load(prefix_values + (at * DIM)[:, None] + dim[None, :], mask=inside, other=0.0)
                new_peak = tl.maximum(peak, log_sum / scale)
                fade, weight = tl.exp2((peak - new_peak) * scale), tl.exp2(log_sum - new_peak * scale)
                peak, total = new_peak, total * fade + weight
                values = values * fade[:, None] + read * weight[:, None]
    values = values / tl.where(total > 0, total, 1.0)[:, None]
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
                    member_row = seq * (KV_HEADS * GROUP) + kv_head * GROUP + member
                    first = member_row * tl.num_programs(2)
                    result = merged(part_values, part_log_sums, first, parts, dim, MOST_SPLITS, DIM)
                    tl.store(out + member_row * DIM + dim, result.to(out.dtype.element_ty), mask=within)
            return
    tl.store(out + (target * DIM)[:, None] + dim[None, :], values.to(out.dtype.element_ty), mask=inside)
