"""Attention by PyTorch's scaled_dot_product_attention, on any device, without a compiler.

What a step needs beyond the layer's tensors is planned once, at the first layer, and kept in batch.scratch.
A sequence whose block ids are one ascending run is read in place, as a strided view of the pool. The others
are gathered block by block, once a layer: decodes all together, padded to the longest and masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from models.batch import ForwardBatch
from models.layers.attention import AttentionBackend


@dataclass(slots=True)
class _Decode:
    """One new token whose sequence lies in slots [start, end)."""

    row: int
    start: int
    end: int


@dataclass(slots=True)
class _Gather:
    """Decodes whose blocks are scattered: rows [B] of the batch, blocks [B * W], mask [B, 1, 1, W * block_size]."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(slots=True)
class _Prefill:
    """Rows [first, last) are one sequence's chunk. Without cached tokens before it it attends to itself;
    with them to slots [start, end) or, if start is None, to the first `end` tokens of the gathered `blocks`."""

    first: int
    last: int
    cached: bool = False
    start: int | None = None
    end: int = 0
    blocks: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class _Plan:
    decodes: list[_Decode] = field(default_factory=list)
    gather: _Gather | None = None
    prefills: list[_Prefill] = field(default_factory=list)


class SdpaBackend(AttentionBackend):
    """See the module's docstring."""

    name = "sdpa"

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

        # The query heads of one KV head share its keys: they go in as rows of one query, which needs no mask.
        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
        if plan.gather is None and len(plan.decodes) == 1 and tokens == 1:
            only = plan.decodes[0]
            return _attend_span(grouped, k_slots, v_slots, only.start, only.end, scale).reshape(1, heads * dim)
        out = torch.empty(tokens, kv_heads, heads // kv_heads, dim, dtype=q.dtype, device=q.device)
        for decode in plan.decodes:
            row = slice(decode.row, decode.row + 1)
            out[row] = _attend_span(grouped[row], k_slots, v_slots, decode.start, decode.end, scale)
        if plan.gather is not None:
            gather = plan.gather
            keys = _gather(k_cache, gather.blocks, gather.rows.numel())
            values = _gather(v_cache, gather.blocks, gather.rows.numel())
            attended = F.scaled_dot_product_attention(
                grouped.index_select(0, gather.rows), keys, values, attn_mask=gather.mask, scale=scale
            )
            out.index_copy_(0, gather.rows, attended)
        by_head = out.view(tokens, heads, dim)
        for chunk in plan.prefills:
            by_head[chunk.first : chunk.last] = _attend_chunk(chunk, q, k, v, k_cache, v_cache, scale)
        return out.view(tokens, heads * dim)


def _attend_span(q: Tensor, k_slots: Tensor, v_slots: Tensor, start: int, end: int, scale: float) -> Tensor:
    """q [1, Hkv, G, D] over slots [start, end), in place -> [1, Hkv, G, D]."""
    keys = k_slots[start:end].transpose(0, 1).unsqueeze(0)
    values = v_slots[start:end].transpose(0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(q, keys, values, scale=scale)


def _attend_chunk(
    chunk: _Prefill, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> Tensor:
    """The chunk's rows of q over everything its sequence holds -> [n, Hq, D]."""
    rows = slice(chunk.first, chunk.last)
    if not chunk.cached:
        keys, values = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
    elif chunk.start is not None:
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        span = slice(chunk.start, chunk.end)
        keys, values = k_slots[span].transpose(0, 1).unsqueeze(0), v_slots[span].transpose(0, 1).unsqueeze(0)
    else:
        assert chunk.blocks is not None
        keys = _gather(k_cache, chunk.blocks, 1)[:, :, : chunk.end]
        values = _gather(v_cache, chunk.blocks, 1)[:, :, : chunk.end]
    attended = F.scaled_dot_product_attention(
        q[rows].transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=not chunk.cached,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, sequences: int) -> Tensor:
    """Blocks [B * W] of a cache [N, block_size, Hkv, D] -> a copy [B, Hkv, W * block_size, D]."""
    kv_heads, dim = cache.shape[2:]
    copied = cache.index_select(0, blocks).view(sequences, -1, kv_heads, dim)
    return copied.transpose(1, 2)


def _plan(batch: ForwardBatch, dtype: torch.dtype, device: torch.device) -> _Plan:
    plan = _Plan()
    size = batch.block_size
    scattered: list[int] = []
    row = 0
    for index, (new, length) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        blocks = batch.block_lists[index][: -(-length // size)]
        in_run = blocks[-1] - blocks[0] == len(blocks) - 1 and all(b == blocks[0] + i for i, b in enumerate(blocks))
        start = blocks[0] * size
        if new == 1 and length > 1:
            if in_run:
                plan.decodes.append(_Decode(row, start, start + length))
            else:
                scattered.append(index)
        elif new == length:
            plan.prefills.append(_Prefill(row, row + new))
        else:
            mask = _causal_mask(new, length, dtype, device)
            if in_run:
                plan.prefills.append(_Prefill(row, row + new, True, start, start + length, mask=mask))
            else:
                index_tensor = torch.tensor(blocks, device=device)
                plan.prefills.append(_Prefill(row, row + new, True, None, length, index_tensor, mask))
        row += new
    if scattered:
        plan.gather = _plan_gather(batch, scattered, dtype, device)
    return plan


def _plan_gather(batch: ForwardBatch, scattered: list[int], dtype: torch.dtype, device: torch.device) -> _Gather:
    size = batch.block_size
    first_row = [0]
    for new in batch.query_lens:
        first_row.append(first_row[-1] + new)
    lengths = [batch.context_lens[i] for i in scattered]
    width = -(-max(lengths) // size)
    padded: list[int] = []
    for index, length in zip(scattered, lengths, strict=True):
        blocks = batch.block_lists[index][: -(-length // size)]
        # Padding repeats a block of the sequence itself: always valid memory, and masked out below.
        padded += blocks + blocks[:1] * (width - len(blocks))
    visible = torch.arange(width * size) < torch.tensor(lengths)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return _Gather(
        rows=torch.tensor([first_row[i] for i in scattered], device=device),
        blocks=torch.tensor(padded, device=device),
        mask=mask[:, None, None, :].to(device),
    )


def _causal_mask(new: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[new, length]: token i of the chunk sees the cached ones, those of the chunk before it, and itself."""
    hidden = torch.ones(new, length, dtype=torch.bool, device=device).triu_(length - new + 1)
    return torch.zeros(new, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
