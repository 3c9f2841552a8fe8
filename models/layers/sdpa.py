"""Attention by PyTorch's scaled_dot_product_attention, on any device, without a compiler.

What a step needs beyond the layer's tensors is planned once, at the first layer, and kept in batch.scratch.

Decodes. The query heads of one KV head go in as rows of one query, so that no key is repeated and no mask is
needed for grouping. A sequence whose block ids are one ascending run can be read in place, as a strided view of
the pool, at no copy; sequences together fill the cores better. So a lone or a long decode in a run is read in
place, and the others are gathered, whole blocks at a time, with others of about their length (padded to the
longest, at most twice the shortest, and masked) into a buffer that is kept: once a layer and step, no more.

Prefill chunks go one sequence at a time: causal over themselves, or with a mask behind a cached prefix.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from models.batch import ForwardBatch
from models.layers.attention import AttentionBackend

# From here on copying a history costs more than what a fuller batch gains (measured on two cores).
_LONG = 1024
# Tokens gathered at a time: bounds the buffer (and keeps it in the cache) whatever the batch.
_GATHERED_TOKENS = 16384


@dataclass(slots=True)
class _Span:
    """One decode, at `row` of the batch, whose sequence lies in slots [start, end)."""

    row: int
    start: int
    end: int


@dataclass(slots=True)
class _Gather:
    """Decodes of similar length: rows int64 [B] of the batch, blocks int64 [B * W], mask [B, 1, 1, W * block_size]
    or None where every sequence fills its blocks."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class _Chunk:
    """Rows [first, last) are one sequence's prompt tokens. `blocks` int64 [W] is None where nothing is cached
    before them; else they attend to the first `length` tokens there, those in slots [start, start + length) if
    the blocks are a run (start is not None)."""

    first: int
    last: int
    length: int
    start: int | None = None
    blocks: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class _Plan:
    spans: list[_Span] = field(default_factory=list)
    gathers: list[_Gather] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)


class SdpaBackend(AttentionBackend):
    """See the module's docstring. Holds the buffers that blocks are gathered into."""

    name = "sdpa"

    def __init__(self) -> None:
        self._keys = self._values = torch.empty(0)

    def release_buffers(self) -> None:
        self._keys = self._values = torch.empty(0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, batch: ForwardBatch
    ) -> Tensor:
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        plan = batch.scratch.get(self.name)
        if plan is None:
            plan = batch.scratch[self.name] = _plan(batch, q.dtype, q.device)
        k_slots, v_slots = k_cache.view(-1, kv_heads, dim), v_cache.view(-1, kv_heads, dim)
        k_slots.index_copy_(0, batch.slot_mapping, k)
        v_slots.index_copy_(0, batch.slot_mapping, v)

        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
        if tokens == 1 and plan.spans:
            return _attend_span(plan.spans[0], grouped, k_slots, v_slots, scale).reshape(1, heads * dim)
        out = q.new_empty(tokens, kv_heads, heads // kv_heads, dim)
        for span in plan.spans:
            row = slice(span.row, span.row + 1)
            out[row] = _attend_span(span, grouped[row], k_slots, v_slots, scale)
        for gather in plan.gathers:
            keys, values = self._gather(k_cache, v_cache, gather.blocks, gather.rows.shape[0])
            queries = grouped.index_select(0, gather.rows)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=gather.mask, scale=scale)
            out.index_copy_(0, gather.rows, attended)
        by_head = out.view(tokens, heads, dim)
        for chunk in plan.chunks:
            rows = slice(chunk.first, chunk.last)
            keys, values = self._history(chunk, k[rows], v[rows], k_cache, v_cache)
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=chunk.blocks is None,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            by_head[rows] = attended[0].transpose(0, 1)
        return out.view(tokens, heads * dim)

    def _history(self, chunk: _Chunk, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hkv, L, D] that a chunk attends to; k, v are its own."""
        if chunk.blocks is None:
            return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        if chunk.start is not None:
            span = slice(chunk.start, chunk.start + chunk.length)
            k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
            return k_slots[span].transpose(0, 1).unsqueeze(0), v_slots[span].transpose(0, 1).unsqueeze(0)
        keys, values = self._gather(k_cache, v_cache, chunk.blocks, 1)
        return keys[:, :, : chunk.length], values[:, :, : chunk.length]

    def _gather(self, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Blocks int64 [B * W] of both caches, copied -> [B, Hkv, W * block_size, D] each, valid until the next call.

        The buffers only grow: a fresh allocation of this size would be mapped, and faulted in, on every layer.
        """
        shape = (blocks.shape[0], *k_cache.shape[1:])
        count = blocks.shape[0] * k_cache.stride(0)
        if self._keys.numel() < count or self._keys.dtype != k_cache.dtype or self._keys.device != k_cache.device:
            self._keys, self._values = k_cache.new_empty(count), k_cache.new_empty(count)
        keys, values = self._keys[:count].view(shape), self._values[:count].view(shape)
        torch.index_select(k_cache, 0, blocks, out=keys)
        torch.index_select(v_cache, 0, blocks, out=values)
        by_sequence = (sequences, -1, *k_cache.shape[2:])
        return keys.view(by_sequence).transpose(1, 2), values.view(by_sequence).transpose(1, 2)


def _attend_span(span: _Span, q: Tensor, k_slots: Tensor, v_slots: Tensor, scale: float) -> Tensor:
    """q [1, Hkv, G, D] over the span's slots, in place -> [1, Hkv, G, D]."""
    keys = k_slots[span.start : span.end].transpose(0, 1).unsqueeze(0)
    values = v_slots[span.start : span.end].transpose(0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(q, keys, values, scale=scale)


def _plan(batch: ForwardBatch, dtype: torch.dtype, device: torch.device) -> _Plan:
    plan = _Plan()
    size = batch.block_size
    # (row, context length, blocks) of the decodes that are gathered, by the bit length of their block count
    similar: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
    row = 0
    for new, length, table in zip(batch.query_lens, batch.context_lens, batch.block_lists, strict=True):
        blocks = table[: -(-length // size)]
        start = blocks[0] * size if _is_run(blocks) else None
        if new == length:
            plan.chunks.append(_Chunk(row, row + new, length))
        elif new > 1:
            mask = _causal_mask(new, length, dtype, device)
            plan.chunks.append(_Chunk(row, row + new, length, start, torch.tensor(blocks, device=device), mask))
        elif start is not None and (length >= _LONG or len(batch.query_lens) == 1):
            plan.spans.append(_Span(row, start, start + length))
        else:
            similar[len(blocks).bit_length()].append((row, length, blocks))
        row += new
    for group in similar.values():
        fit = max(1, _GATHERED_TOKENS // (size * max(len(blocks) for _, _, blocks in group)))
        for at in range(0, len(group), fit):
            plan.gathers.append(_plan_gather(group[at : at + fit], size, dtype, device))
    return plan


def _plan_gather(
    group: list[tuple[int, int, list[int]]], size: int, dtype: torch.dtype, device: torch.device
) -> _Gather:
    width = max(len(blocks) for _, _, blocks in group)
    # Padding repeats a block of the sequence itself: always valid memory, and masked out.
    padded = [block for _, _, blocks in group for block in blocks + blocks[:1] * (width - len(blocks))]
    lengths = torch.tensor([length for _, length, _ in group])
    mask = None
    if int(lengths.min()) < width * size:
        hidden = torch.arange(width * size) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None, :].to(device)
    rows = torch.tensor([row for row, _, _ in group], device=device)
    return _Gather(rows, torch.tensor(padded, device=device), mask)


def _is_run(blocks: list[int]) -> bool:
    return blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == list(range(blocks[0], blocks[-1] + 1))


def _causal_mask(new: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[new, length]: token i of the chunk sees the cached ones, those of the chunk before it, and itself."""
    hidden = torch.ones(new, length, dtype=torch.bool, device=device).triu_(length - new + 1)
    return torch.zeros(new, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
