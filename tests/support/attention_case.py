"""Random ragged steps over a paged pool, and the attention of each sequence written out in fp64."""

from __future__ import annotations

import random

import torch

from models.batch import ForwardBatch
from models.layers.attention import AttentionBackend


class Case:
    """A random ragged step over a pool that already holds every sequence's past."""

    def __init__(self, seed, lengths, *, heads=6, kv_heads=2, dim=16, block_size=4, scatter=True, dtype=torch.float32):
        """lengths: (cached, new) of each sequence, decodes first."""
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.kv_heads, self.dim, self.size = lengths, heads, kv_heads, dim, block_size
        needed = [-(-(cached + new) // block_size) for cached, new in lengths]
        ids = list(range(sum(needed) + 3))
        if scatter:
            random.Random(seed).shuffle(ids)
        self.blocks = [[ids.pop(0) for _ in range(count)] for count in needed]
        shape = (sum(needed) + 3, block_size, kv_heads, dim)
        # Stale values everywhere: what a sequence must not see is not conveniently zero.
        self.k_cache = (torch.randn(shape, generator=generator) * 50).to(dtype)
        self.v_cache = (torch.randn(shape, generator=generator) * 50).to(dtype)
        self.keys, self.values, self.queries = [], [], []
        for (cached, new), table in zip(lengths, self.blocks, strict=True):
            self.queries.append(torch.randn(new, heads, dim, generator=generator).to(dtype))
            self.keys.append(torch.randn(cached + new, kv_heads, dim, generator=generator).to(dtype))
            self.values.append(torch.randn(cached + new, kv_heads, dim, generator=generator).to(dtype))
            for p in range(cached):
                self.k_cache[table[p // block_size], p % block_size] = self.keys[-1][p]
                self.v_cache[table[p // block_size], p % block_size] = self.values[-1][p]

    def run(self, backend: AttentionBackend, only: list[int] | None = None) -> list[torch.Tensor]:
        """Each sequence's output [new, Hq * D]; `only` runs a part of the batch over a copy of the pool."""
        chosen = range(len(self.lengths)) if only is None else only
        lengths = [self.lengths[i] for i in chosen]
        tables = [self.blocks[i] for i in chosen]
        width = max(map(len, tables))
        slots = [
            table[p // self.size] * self.size + p % self.size
            for (cached, new), table in zip(lengths, tables, strict=True)
            for p in range(cached, cached + new)
        ]
        new_lens = [new for _, new in lengths]
        positions = [p for cached, new in lengths for p in range(cached, cached + new)]
        batch = ForwardBatch(
            input_ids=torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_lens=new_lens,
            context_lens=[cached + new for cached, new in lengths],
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            block_lists=[list(t) for t in tables],
            num_decodes=sum(1 for cached, new in lengths if new == 1 and cached),
            block_size=self.size,
            logits_indices=torch.arange(len(slots)),
            scratch={},
        )
        q = torch.cat([self.queries[i] for i in chosen])
        k = torch.cat([self.keys[i][self.lengths[i][0] :] for i in chosen])
        v = torch.cat([self.values[i][self.lengths[i][0] :] for i in chosen])
        self.k_after, self.v_after = self.k_cache.clone(), self.v_cache.clone()
        out = None
        for _ in range(2):  # the second layer uses the first one's plan
            out = backend.forward(q, k, v, self.k_after, self.v_after, self.dim**-0.5, batch)
        assert out is not None and out.shape == (len(slots), self.heads * self.dim)
        return list(out.split(new_lens))

    def expected(self, index: int) -> torch.Tensor:
        cached, new = self.lengths[index]
        group = self.heads // self.kv_heads
        q = self.queries[index].double()
        k = self.keys[index].double().repeat_interleave(group, dim=1)
        v = self.values[index].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        future = torch.arange(cached + new)[None, :] > torch.arange(cached, cached + new)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(new, -1)


MIXES = {
    "one decode": [(9, 1)],
    "decodes": [(9, 1), (1, 1), (30, 1), (3, 1)],
    "a first token alone": [(0, 1)],
    "whole prompts": [(0, 7), (0, 1), (0, 12)],
    "chunks behind a prefix": [(8, 5), (3, 9), (4, 4)],
    "everything at once": [(9, 1), (16, 1), (0, 6), (8, 3), (0, 1)],
    "lengths at block edges": [(3, 1), (4, 1), (7, 1), (4, 4), (0, 4), (0, 8)],
}
