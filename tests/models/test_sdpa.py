"""The sdpa backend against attention written out in fp64, over random mixes of decodes and chunks."""

from __future__ import annotations

import random

import pytest
import torch

from models.batch import ForwardBatch
from models.layers import sdpa
from models.layers.sdpa import SdpaBackend


class Case:
    """A random ragged step over a pool that already holds every sequence's past."""

    def __init__(self, seed, lengths, *, heads=6, kv_heads=2, dim=16, block_size=4, scatter=True):
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
        self.k_cache = torch.randn(shape, generator=generator) * 50
        self.v_cache = torch.randn(shape, generator=generator) * 50
        self.keys, self.values, self.queries = [], [], []
        for (cached, new), table in zip(lengths, self.blocks, strict=True):
            self.queries.append(torch.randn(new, heads, dim, generator=generator))
            self.keys.append(torch.randn(cached + new, kv_heads, dim, generator=generator))
            self.values.append(torch.randn(cached + new, kv_heads, dim, generator=generator))
            for p in range(cached):
                self.k_cache[table[p // block_size], p % block_size] = self.keys[-1][p]
                self.v_cache[table[p // block_size], p % block_size] = self.values[-1][p]

    def run(self, backend: SdpaBackend, only: list[int] | None = None) -> list[torch.Tensor]:
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
SHAPES = [(6, 2), (4, 4), (4, 1), (9, 3)]


@pytest.mark.parametrize("scatter", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_attention_over_pages_equals_attention_written_out(mix: str, heads: int, kv_heads: int, scatter: bool) -> None:
    case = Case(0, MIXES[mix], heads=heads, kv_heads=kv_heads, scatter=scatter)
    for index, out in enumerate(case.run(SdpaBackend())):
        torch.testing.assert_close(out.double(), case.expected(index), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scatter", [False, True], ids=["runs", "scattered"])
def test_long_decodes_and_full_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch, scatter: bool) -> None:
    """Limits so low that some decodes are read in place and the gathered ones need several rounds."""
    monkeypatch.setattr(sdpa, "_LONG", 24)
    monkeypatch.setattr(sdpa, "_GATHERED_TOKENS", 32)
    lengths = [(cached, 1) for cached in (5, 40, 6, 7, 21, 70, 1, 23, 12)]
    case = Case(2, [*lengths, (9, 3)], scatter=scatter)
    for index, out in enumerate(case.run(SdpaBackend())):
        torch.testing.assert_close(out.double(), case.expected(index), atol=2e-6, rtol=1e-5)


def test_one_backend_serves_steps_of_any_size() -> None:
    """Its buffers grow and are used again, smaller, afterwards."""
    backend = SdpaBackend()
    for seed, longest in enumerate((4, 60, 9, 130, 2)):
        case = Case(seed, [(longest, 1), (longest + 1, 1)])
        for index, out in enumerate(case.run(backend)):
            torch.testing.assert_close(out.double(), case.expected(index), atol=2e-6, rtol=1e-5)


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    case = Case(1, MIXES["everything at once"])
    case.run(SdpaBackend())
    written = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool)
    for (cached, new), table, keys in zip(case.lengths, case.blocks, case.keys, strict=True):
        for p in range(cached, cached + new):
            at = (table[p // case.size], p % case.size)
            assert torch.equal(case.k_after[at], keys[p])
            written[at] = True
    assert torch.equal(case.k_after[~written], case.k_cache[~written])
    assert torch.equal(case.v_after[~written], case.v_cache[~written])


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_does_not_depend_on_its_neighbours(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [(rng.randrange(1, 40), 1) for _ in range(4)] + [
        (rng.randrange(20), rng.randrange(1, 20)) for _ in range(3)
    ]
    case = Case(seed, lengths)
    together = case.run(SdpaBackend())
    for index in range(len(lengths)):
        torch.testing.assert_close(case.run(SdpaBackend(), only=[index])[0], together[index], atol=2e-6, rtol=1e-5)
