"""Attention by the project's Triton kernels (models/kernels), for CUDA cards.

Decodes and prompt chunks of a step go to a kernel each. All that the kernels need of lengths they read on the
device, so that a step can be replayed as a CUDA graph: what is chosen on the host (grids, splits) follows from the
number of sequences and tokens and from the width of the block tables alone, which a graph fixes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from models.batch import ForwardBatch
from models.kernels.paged_decode import paged_decode
from models.kernels.paged_keys import Partials, choose_splits
from models.kernels.paged_prefill import WARM_UP_ROWS, paged_prefill
from models.kernels.rope_cache import rope_cache
from models.layers.attention import AttentionBackend


@dataclass(slots=True)
class _Plan:
    """What all layers of a step share: the batch's tables and lengths cut into decodes [0, N) and chunks [N, S)."""

    query_start: Tensor  # int32 [S - N + 1]
    decode_lens: Tensor  # int32 [N]
    decode_tables: Tensor  # int32 [N, W]
    chunk_lens: Tensor  # int32 [S - N]
    chunk_tables: Tensor  # int32 [S - N, W]
    partials: Partials | None  # the decodes' workspace; None where they are not split


class TritonBackend(AttentionBackend):
    """window: keys that a query sees, itself included; 0: all before it."""

    name = "triton"
    wants_device_lengths = True
    has_forward_qkv = True

    def __init__(self, window: int = 0) -> None:
        self._window = window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, batch: ForwardBatch
    ) -> Tensor:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, batch.slot_mapping, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, batch.slot_mapping, v)
        return self._attend(q, k_cache, v_cache, scale, batch)

    def forward_qkv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        batch: ForwardBatch,
    ) -> Tensor:
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        kv_heads, dim = k_cache.shape[2:]
        q = rope_cache(
            qkv,
            *rope,
            batch.slot_mapping,
            k_cache,
            v_cache,
            num_heads=qkv.shape[1] // dim - 2 * kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
        )
        return self._attend(q, k_cache, v_cache, scale, batch)

    def warm_up(self, num_heads: int, k_cache: Tensor, v_cache: Tensor) -> None:
        """Runs each kernel in each form that sizes can ask for, one token or chunk against block 0."""
        block_size, kv_heads, dim = k_cache.shape[1:]
        group, device = num_heads // kv_heads, k_cache.device
        for rows in WARM_UP_ROWS:
            tokens = max(1, rows // group)
            q = torch.zeros(tokens, num_heads, dim, dtype=k_cache.dtype, device=device)
            out = torch.empty_like(q)
            lens = torch.tensor([tokens], dtype=torch.int32, device=device)
            start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
            table = torch.zeros(1, -(-8192 // block_size), dtype=torch.int32, device=device)
            for processors in (0, _processors(device)):
                paged_prefill(q, k_cache, v_cache, start, lens, table, 1.0, out=out, window=self._window,
                              processors=processors)  # fmt: skip
            for partials in (None, Partials.empty(1, num_heads, 2, dim, device)):
                paged_decode(q[:1], k_cache, v_cache, lens, table, 1.0, out=out[:1], partials=partials,
                             window=self._window)  # fmt: skip

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, batch: ForwardBatch) -> Tensor:
        """q [T, Hq, D] over the cache, which holds the step's own keys and values -> [T, Hq * D]."""
        plan = batch.scratch.get(self.name)
        if plan is None:
            plan = batch.scratch[self.name] = _plan(q, k_cache, batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = batch.num_decodes
        paged_decode(
            q[:decodes],
            k_cache,
            v_cache,
            plan.decode_lens,
            plan.decode_tables,
            scale,
            out=out[:decodes],
            partials=plan.partials,
            window=self._window,
        )
        paged_prefill(
            q[decodes:],
            k_cache,
            v_cache,
            plan.query_start,
            plan.chunk_lens,
            plan.chunk_tables,
            scale,
            out=out[decodes:],
            window=self._window,
            processors=_processors(q.device),
        )
        return out.view(q.shape[0], -1)


def _plan(q: Tensor, k_cache: Tensor, batch: ForwardBatch) -> _Plan:
    query_start, context_lens = batch.query_start, batch.context_lens_tensor
    if query_start is None or context_lens is None:  # a caller without buffers for them, such as warm-up
        starts = [0, *accumulate(batch.query_lens)]
        query_start = torch.tensor(starts, dtype=torch.int32, device=q.device)
        context_lens = torch.tensor(batch.context_lens, dtype=torch.int32, device=q.device)
    decodes, heads, kv_heads = batch.num_decodes, q.shape[1], k_cache.shape[2]
    longest = batch.block_tables.shape[1] * batch.block_size
    splits = choose_splits(decodes * kv_heads, longest, _processors(q.device), least_keys=128)
    return _Plan(
        query_start[decodes:],
        context_lens[:decodes],
        batch.block_tables[:decodes],
        context_lens[decodes:],
        batch.block_tables[decodes:],
        Partials.empty(decodes, heads, splits, q.shape[2], q.device) if splits > 1 and decodes else None,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; in the interpreter a few, so that split walks are taken there, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
