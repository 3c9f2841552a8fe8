"""The sdpa backend against attention written out in fp64, over random mixes of decodes and chunks."""

from __future__ import annotations

import random

import pytest
import torch

from attention_case import MIXES, Case
from models.layers import sdpa
from models.layers.sdpa import SdpaBackend

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
