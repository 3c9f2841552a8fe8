"""Causal attention of prompt chunks over the paged KV cache, chunks of many sequences in one launch.

A program takes a tile of one chunk's queries with all query heads of one KV head (grouped-query attention: a key is
loaded once for its whole group) and walks the sequence's pages up to its last query. Which sequence a tile belongs
to it finds by binary search, so that the grid depends on the number of tokens and sequences alone: at most
tokens // BLOCK_Q + sequences tiles, of which those past the end return at once. Where tiles are too few to fill the
card (a short chunk behind a long prefix) their keys are split over several programs.

Long chunks may be given their own keys and values as they stand in the step's projection (own_keys.py): pages are then
walked for the cached part alone.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap, own_keys
from models.kernels.own_keys import OwnKeys, attend_own_keys
from models.kernels.paged_keys import LOG2_E, Partials, attend_keys, cache_constants, choose_splits

# Rows (query, head) of a chunk, one number for each tile that _tile chooses.
WARM_UP_ROWS = (16, 64, 2048, 8192)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    out: Tensor,
    own: OwnKeys | None = None,
    window: int = 0,
    processors: int = 1,
) -> None:
    """Fills out [T, Hq, D], contiguous; rows past the last chunk (padding) are left undefined.

    q               [T, Hq, D], last dimension contiguous: the chunks' queries one after another
    k_cache, v_cache  [num_blocks, block_size, Hkv, D] contiguous; the chunks' own keys and values are in them
    query_start     int32 [S + 1], ascending: sequence s has rows query_start[s] .. query_start[s + 1] - 1, counted
                    from query_start[0]; it may have none (padding)
    context_lens    int32 [S], tokens of each sequence, the chunk's included
    block_tables    int32 [S, W], last dimension contiguous
    own             keys and values of the rows of q, to be read in place of the cache's; without a window only
    window          keys a query sees, itself included; 0: all before it
    processors      multiprocessors to keep busy
    """
    block_size, kv_heads, dim = k_cache.shape[1:]
    tokens, heads, num_seqs = q.shape[0], q.shape[1], context_lens.shape[0]
    if not (tokens and num_seqs):
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    assert out.is_contiguous() and out.shape == q.shape
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(dim))
    if own is None:
        block_m, block_n, warps, stages = _tile(padded, q.dtype, tokens * group)
        own_arguments = q, q, q, q, 0  # not used
    else:
        assert not window and dim == padded and own.k.shape == (tokens, kv_heads, dim)
        block_m, block_n, warps, stages = own_keys.TILE
        own_arguments = own.k, own.v, *own.tiles(block_n), own.k.stride(0)
    block_m = max(block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    programs = (tokens // block_q + num_seqs) * kv_heads
    # The programs of sequences without rows, which a graph is padded with, end at once; the others keep the card busy.
    busy = (tokens // block_q + 1) * kv_heads
    splits = choose_splits(busy, block_tables.shape[1] * block_size, processors, least_keys=256)
    partials = Partials.empty(tokens, heads, splits, dim, q.device) if splits > 1 else None
    _paged_prefill[(programs, splits)](
        q,
        k_cache,
        v_cache,
        out if partials is None else partials.values,
        out if partials is None else partials.log_sums,
        query_start,
        context_lens,
        block_tables,
        scale * LOG2_E,
        num_seqs,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        *own_arguments,
        **cache_constants(q, k_cache),
        WINDOW=window,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        OWN=own is not None,
        SPLIT=splits > 1,
        num_warps=warps,
        num_stages=stages,
        **overlap.launch_options(q.device, tokens),
    )
    if partials is not None:
        partials.merge(out)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    window: int = 0,
) -> Tensor:
    """fp32 [T, Hq, D], one sequence at a time over its gathered keys."""
    group = q.shape[1] // k_cache.shape[2]
    starts = [int(row) - int(query_start[0]) for row in query_start]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for s, context in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        new = starts[s + 1] - starts[s]
        if not new:
            continue
        blocks = block_tables[s, : -(-context // k_cache.shape[1])].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        key = torch.arange(context, device=q.device)[None, :]
        position = torch.arange(context - new, context, device=q.device)[:, None]
        hidden = key > position
        if window:
            hidden |= key <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def _tile(dim: int, dtype: torch.dtype, rows: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages) for heads padded to `dim` and chunks of `rows` rows (query, head) in all.

    Bounded by 227 KiB of shared memory: one tile of queries, and `stages` tiles each of keys and of values.
    """
    if dtype == torch.float32:  # products without tensor cores: registers bound the tile
        return (32, 32, 4, 2) if dim <= 128 else (16, 16, 4, 2)
    if rows <= 16:
        block_m = 16
    elif rows <= 64 or dim >= 128:
        block_m = 64
    else:
        block_m = 128
    if dim == 128:  # measured on an H200
        return block_m, 64 if rows > 1024 else 128, 4, 2
    return block_m, 64 if dim < 128 else 32, 4, 3 if dim < 128 else 2


@triton.jit
def _sequence_of(tile, query_start, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not after `tile`; sequence s starts at tile rows(s) // BLOCK_Q + s."""
    base = tl.load(query_start)
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if (tl.load(query_start + middle) - base) // BLOCK_Q + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_tables"],
)
def _paged_prefill(
    q,
    k_cache,
    v_cache,
    out,
    log_sums,
    query_start,
    context_lens,
    block_tables,
    scale,
    num_seqs,
    q_row_stride,
    q_head_stride,
    table_stride,
    own_k,
    own_v,
    own_k_tiles,
    own_v_tiles,
    own_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # The last tiles first: late in a chunk they have the most keys.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program % KV_HEADS
    tile = program // KV_HEADS
    seq = _sequence_of(tile, query_start, num_seqs, BLOCK_Q)
    base = tl.load(query_start)
    first_row = tl.load(query_start + seq) - base
    new = tl.load(query_start + seq + 1) - base - first_row
    first_query = (tile - first_row // BLOCK_Q - seq) * BLOCK_Q
    context = tl.load(context_lens + seq)
    cached = context - new
    overlap.wait_and_trigger(OVERLAP)
    if first_query >= new:
        return

    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    query = first_query + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    position = cached + query
    valid = (lane < BLOCK_Q * GROUP) & (query < new)
    row = (first_row + query).to(tl.int64)
    queries = tl.load(
        q + (row * q_row_stride + head * q_head_stride)[:, None] + dim[None, :],
        mask=valid[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )

    # Keys [start, end) of this program, by pages [start, paged_end); those of [start, whole) are before its first
    # query, hence seen by all.
    start = 0
    end = cached + tl.minimum(first_query + BLOCK_Q, new)
    if WINDOW > 0:
        start = tl.maximum(cached + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - start, tl.num_programs(1)), BLOCK_N) * BLOCK_N
        start = start + tl.program_id(1) * share
        end = tl.minimum(start + share, end)
    paged_end = end
    if OWN:
        paged_end = tl.minimum(end, cached)
    whole = start
    seen_by_all = tl.minimum(end, cached + first_query + 1)
    if WINDOW == 0:
        whole = start + tl.maximum(tl.minimum(seen_by_all, paged_end) - start, 0) // BLOCK_N * BLOCK_N

    table = block_tables + seq.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, DIM_PADDED], dtype=tl.float32)
    for key in range(start, whole, BLOCK_N):
        total, peak, values = attend_keys(
            queries, position, total, peak, values, key, paged_end, table, k_head, v_head, scale,
            KV_HEADS * DIM, DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, False, PRECISION,
        )  # fmt: skip
    for key in range(whole, paged_end, BLOCK_N):
        total, peak, values = attend_keys(
            queries, position, total, peak, values, key, paged_end, table, k_head, v_head, scale,
            KV_HEADS * DIM, DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, True, PRECISION,
        )  # fmt: skip
    if OWN:
        total, peak, values = attend_own_keys(
            queries, position, total, peak, values, tl.maximum(start, cached), seen_by_all, end, first_row - cached,
            kv_head, own_k, own_v, own_k_tiles, own_v_tiles, own_stride, scale, DIM, BLOCK_N, PRECISION,
        )  # fmt: skip

    values = values / tl.where(total > 0, total, 1.0)[:, None]
    target = row * (KV_HEADS * GROUP) + head
    inside = valid[:, None] & (dim < DIM)[None, :]
    if SPLIT:
        target = target * tl.num_programs(1) + tl.program_id(1)
        tl.store(log_sums + target, peak * scale + tl.log2(total), mask=valid)
    tl.store(out + (target * DIM)[:, None] + dim[None, :], values.to(out.dtype.element_ty), mask=inside)
