"""Attention of decodes to the leading blocks that several of them have in common, read once for all.

The system prompt of many conversations stands in the same blocks. A program takes a tile of decodes that share a
prefix, with all query heads of one KV head as rows, and a part of the prefix. What it finds is of the form of a part of
split-KV attention (see paged_keys.py); paged_decode.py, which walks the rest of each sequence beside this kernel, adds
it.

(Left to the L2 cache, 256 sequences of 1,344 tokens of which 512 are shared take 251 us a layer on an H200, and 196
without these 512.)
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from models.batch import SharedPrefixes
from models.kernels import overlap
from models.kernels.paged_keys import LOG2_E, Partials, attend_keys, cache_constants
from models.kernels.rope_cache import Rotation, gains, rotation_arguments, rotation_constants

# Query heads in a tile, if a KV head has not more. (64: level for 48 to 128 sequences, 3% of a step slower for 256.)
_ROWS = 32
# Parts of a prefix at most.
_MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What decodes share, tiles of sequences_per_tile() members, and room for what is found, [N, Hq, parts, D]."""

    shared: SharedPrefixes
    partials: Partials

    @classmethod
    def of(cls, shared: SharedPrefixes, heads: int, kv_heads: int, dim: int, processors: int) -> Prefixes:
        """A prefix is cut into parts where else there would not be a program for each of the card's multiprocessors,
        since the walk over the rest runs beside; each part costs that one a read more."""
        decodes, per_tile = shared.skipped.shape[0], shared.members.shape[1]
        programs = -(-decodes // per_tile) * kv_heads
        parts = min(_MOST_PARTS, 1 << max(processors // programs, 1).bit_length() - 1)
        return cls(shared, Partials.empty(decodes, heads, parts, dim, shared.skipped.device))

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """What paged_decode reads: the tokens of each decode that are done, and the parts' values and log_sums."""
        return self.shared.skipped, self.partials.values, self.partials.log_sums


def sequences_per_tile(group: int) -> int:
    """`group` query heads to a KV head."""
    return _rows(group) // group


def _rows(group: int) -> int:
    return max(_ROWS, 1 << (group - 1).bit_length())


def attend_prefixes(
    q: Tensor,
    rotation: Rotation | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    prefixes: Prefixes,
) -> None:
    """Fills prefixes.partials of the decodes that are in a tile; of the others they are left undefined.

    Arguments as in paged_decode(), or with a rotation in decode_qkv(), which call this.
    """
    kv_heads, dim = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    num_tiles, per_tile = prefixes.shared.members.shape
    assert prefixes.shared.members.is_contiguous() and per_tile == sequences_per_tile(group)
    padded = max(16, triton.next_power_of_2(dim))
    block_n = max(16, min(64, 16384 // (padded * q.element_size())))
    _attend_prefixes[(kv_heads, num_tiles, prefixes.partials.splits)](
        q,
        *rotation_arguments(rotation, q, block_tables),
        k_cache,
        v_cache,
        prefixes.partials.values,
        prefixes.partials.log_sums,
        prefixes.shared.members,
        prefixes.shared.lens,
        block_tables,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        **cache_constants(q, k_cache),
        BLOCK_M=_rows(group),
        BLOCK_N=block_n,
        PER_TILE=per_tile,
        **rotation_constants(rotation),
        num_warps=4,
        num_stages=2,
        **overlap.launch_options(q.device, q.shape[0]),
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["members", "lens", "block_tables"],
)
def _attend_prefixes(
    q,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    eps,
    k_cache,
    v_cache,
    part_values,
    part_log_sums,
    members,
    lens,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_TILE: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    place = members + tile * PER_TILE
    prefix = tl.load(lens + tile)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    within = dim < DIM
    partner = (dim + DIM // 2) % DIM
    seq = tl.load(place + lane // GROUP, mask=(prefix > 0) & (lane < PER_TILE * GROUP), other=-1).to(tl.int64)
    valid = seq >= 0
    inside = valid[:, None] & within[None, :]
    head = kv_head * GROUP + lane % GROUP
    share = tl.cdiv(tl.cdiv(prefix, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    start = split * share
    end = tl.minimum(start + share, prefix)
    table = block_tables + tl.maximum(tl.load(place), 0).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    # Also where there is nothing to do: the kernel behind this one counts on it that all before this one have ended.
    overlap.wait_and_trigger(OVERLAP)
    if prefix == 0:
        return
    rows = q + (seq * q_row_stride + head * q_head_stride)[:, None]
    queries = tl.load(rows + dim[None, :], mask=inside, other=0.0)
    if ROTATES:
        x = queries.to(tl.float32)
        other = tl.load(rows + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            gain, partner_gain = gains(q_weight, dim, partner, within, DIM_PADDED, NORMS)
            scale_q = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x, other = x * (scale_q * gain[None, :]), other * (scale_q * partner_gain[None, :])
        angle = seq[:, None] * DIM + dim[None, :]
        x *= tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        other *= tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        queries = (x + other).to(k_cache.dtype.element_ty)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    values = tl.zeros([BLOCK_M, DIM_PADDED], dtype=tl.float32)
    position = tl.zeros([BLOCK_M], dtype=tl.int32) + (prefix - 1)
    for key in range(start, end, BLOCK_N):
        total, peak, values = attend_keys(
            queries, position, total, peak, values, key, end, table, k_head, v_head, scale,
            KV_HEADS * DIM, DIM, DIM_PADDED, BLOCK_SIZE, BLOCK_N, 0, True, PRECISION,
        )  # fmt: skip
    # A part without keys has a weight of 0.
    part = (seq * (KV_HEADS * GROUP) + head) * tl.num_programs(2) + split
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(part_log_sums + part, peak * scale + tl.log2(total), mask=valid)
    tl.store(part_values + (part * DIM)[:, None] + dim[None, :], values, mask=inside)
