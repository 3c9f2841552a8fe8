"""The Triton kernels against their plain-PyTorch references in fp32, over random ragged shapes.

Collected by test_kernels.py on a CUDA card, in bf16, fp16 and fp32, and run by test_kernels_interpreted.py on a CPU
in Triton's interpreter, in fp16 and fp32 (its bf16 products are wrong), at small sizes and in fewer combinations (see
quick_interpreter): a tile takes it 10 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from models.batch import ForwardBatch, SharedPrefixes
from models.kernels import (
    gemv,
    overlap,
    own_keys,
    paged_decode,
    paged_keys,
    paged_prefill,
    rmsnorm,
    rope_cache,
    shared_prefix,
    silu_mul,
    skinny,
)
from models.kernels.own_keys import OwnKeys
from models.kernels.rmsnorm import Norm
from models.layers import triton_attention
from models.layers.layernorm import RMSNorm
from models.layers.linear import GateUpLinear
from models.layers.triton_attention import TritonBackend

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_CARD else [torch.float32]
ELEMENTWISE_DTYPES = DTYPES if ON_CARD else [torch.float16, torch.float32]
# Inputs are rounded to the type before both sides see them; what remains is the rounding of attention's weights and
# of the result, values being of order 1.
TOLERANCE = {
    torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
}
# heads, KV heads, head_dim, block size
SHAPES = [(4, 2, 64, 16), (3, 1, 96, 32), (8, 1, 128, 128), (2, 1, 256, 64), (4, 2, 16, 12)]
if ON_CARD:
    SHAPES += [(9, 3, 64, 32), (4, 4, 96, 64), (16, 8, 128, 16), (6, 2, 256, 256), (16, 1, 128, 128)]
SHARING_SHAPES = [(4, 2, 64, 16), (6, 2, 96, 32), (8, 1, 128, 16)]
if ON_CARD:
    SHARING_SHAPES += [(9, 3, 64, 32), (4, 4, 96, 64), (16, 8, 128, 32), (6, 2, 256, 64)]
# What split walks are split for: on a card as far as they can be.
PROCESSORS = 10_000 if ON_CARD else 24


@pytest.fixture(autouse=True)
def exact_reference() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=ELEMENTWISE_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def any_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(got: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got.float(), expected.float(), **(TOLERANCE[got.dtype] | tolerance))


class Pages:
    """Sequences of (cached, new) tokens in scattered blocks of a pool in which everything else is NaN: the rest of
    their last blocks, the blocks of nobody, and the one that pads the tables. Queries are rows of a wider tensor."""

    def __init__(
        self, lengths: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype, width: int = 0
    ) -> None:
        heads, kv_heads, self.dim, self.size = shape
        self.lengths, self.scale = lengths, self.dim**-0.5
        needed = [-(-(cached + new) // self.size) for cached, new in lengths]
        ids = random.Random(len(lengths)).sample(range(sum(needed) + 2), sum(needed) + 1)
        self.blocks = [[ids.pop() for _ in range(count)] for count in needed]
        (padding,) = ids
        width = max(width, *needed, 1)
        self.tables = self.tensor([table + [padding] * (width - len(table)) for table in self.blocks])
        self.query_start = self.tensor([0, *(new for _, new in lengths)]).cumsum(0, dtype=torch.int32)
        self.context_lens = self.tensor([cached + new for cached, new in lengths])
        slots = (sum(needed) + 2, self.size, kv_heads, self.dim)
        self.k_cache, self.v_cache = (torch.full(slots, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
        for (cached, new), table in zip(lengths, self.blocks, strict=True):
            position = torch.arange(cached + new)
            at = (torch.tensor(table, dtype=torch.int64)[position // self.size], position % self.size)
            for cache in (self.k_cache, self.v_cache):
                cache[at] = torch.randn(cached + new, kv_heads, self.dim).to(dtype).to(DEVICE)
        rows = sum(new for _, new in lengths)
        self.q = torch.randn(rows, heads + 2 * kv_heads, self.dim).to(dtype).to(DEVICE)[:, :heads]
        self.out = torch.full(self.q.shape, torch.nan, dtype=dtype, device=DEVICE)

    @staticmethod
    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def slot_mapping(self) -> torch.Tensor:
        slots = [
            table[p // self.size] * self.size + p % self.size
            for (cached, new), table in zip(self.lengths, self.blocks, strict=True)
            for p in range(cached, cached + new)
        ]
        return torch.tensor(slots, dtype=torch.int64, device=DEVICE)

    def expected(self, window: int = 0) -> torch.Tensor:
        return paged_prefill.reference(
            self.q, self.k_cache, self.v_cache, self.query_start, self.context_lens, self.tables, self.scale,
            window=window,
        )  # fmt: skip


def ragged(seed: int, count: int, cached: int, new: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    scale = 20 if ON_CARD else 1
    return [(rng.choice([0, rng.randrange(cached * scale)]), rng.randint(1, new * scale)) for _ in range(count)]


def shared_prefixes(pages: Pages, members: list[list[int]], lens: list[int], per_tile: int) -> SharedPrefixes:
    """Tiles of these members, who get their prefixes, of so many tokens, in common; two more tiles are not used."""
    skipped = [0] * len(pages.lengths)
    for tile, length in zip(members, lens, strict=True):
        for one in tile:
            pages.tables[one, : length // pages.size] = pages.tables[tile[0], : length // pages.size]
            skipped[one] = length
    rows = [tile + [-1] * (per_tile - len(tile)) for tile in (*members, [], [])]
    return SharedPrefixes(pages.tensor(rows), pages.tensor([*lens, 0, 0]), pages.tensor(skipped))


def split_walk(pages: Pages, splits: int) -> paged_decode.SplitWalk | None:
    """A workspace for that many parts of each sequence, as dirty as it may be."""
    if splits == 1:
        return None
    seqs, heads, dim = pages.out.shape
    partials = paged_keys.Partials.empty(seqs, heads, splits, dim, DEVICE)
    partials.values.fill_(torch.nan)
    partials.log_sums.fill_(torch.nan)
    return paged_decode.SplitWalk(partials, torch.zeros(seqs * heads, dtype=torch.int32, device=DEVICE))


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_behind_prefixes(shape: tuple, split: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    lengths = [*ragged(sum(shape), 3, 100, 40), (0, 1), (shape[3], 0), (shape[3] * 2 - 1, 2)]
    # A wide table is what a long sequence, and a captured graph, has; split walks are for those.
    pages = Pages(lengths, shape, dtype, width=4096 // shape[3] if split else 0)
    paged_prefill.paged_prefill(
        pages.q, pages.k_cache, pages.v_cache, pages.query_start, pages.context_lens, pages.tables, pages.scale,
        out=pages.out, processors=PROCESSORS if split else 0,
    )  # fmt: skip
    close(pages.out, pages.expected())


@pytest.mark.parametrize("window", [1, 20, 1000])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_sliding_window_hides_what_is_further_back(window: int, split: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    shape = (4, 2, 64, 16)
    pages = Pages(ragged(window, 2, 150, 40), shape, dtype, width=256)
    paged_prefill.paged_prefill(
        pages.q, pages.k_cache, pages.v_cache, pages.query_start, pages.context_lens, pages.tables, pages.scale,
        out=pages.out, window=window, processors=PROCESSORS if split else 0,
    )  # fmt: skip
    close(pages.out, pages.expected(window))
    decodes = Pages([(cached, 1) for cached, _ in ragged(window, 4, 150, 1)], shape, dtype)
    walk = split_walk(decodes, 4) if split else None
    paged_decode.paged_decode(
        decodes.q, decodes.k_cache, decodes.v_cache, decodes.context_lens, decodes.tables, decodes.scale,
        out=decodes.out, split=walk, window=window,
    )  # fmt: skip
    close(decodes.out, decodes.expected(window))


@pytest.mark.parametrize("splits", [1, 4, 32] if ON_CARD else [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_of_many_lengths(shape: tuple, splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    size = shape[3]
    cached = [0, 1, size - 1, size, 2 * size - 1, *(c for c, _ in ragged(sum(shape), 2, 300, 1))]
    pages = Pages([(c, 1) for c in cached], shape, dtype, width=64)
    walk = split_walk(pages, splits)
    paged_decode.paged_decode(
        pages.q, pages.k_cache, pages.v_cache, pages.context_lens, pages.tables, pages.scale,
        out=pages.out, split=walk,
    )  # fmt: skip
    close(pages.out, pages.expected())
    assert walk is None or not walk.arrived.any()


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("splits", [1, 4, 32] if ON_CARD else [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_that_rotate_and_write_their_own_keys(
    shape: tuple, splits: int, norms: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(15)
    heads, kv_heads, dim, size = shape
    cached = [0, size - 1, size, 2 * size + 3, *(c for c, _ in ragged(sum(shape), 2, 200, 1))]
    pages = Pages([(c, 1) for c in cached], shape, dtype, width=64)
    rows, slots = len(cached), pages.slot_mapping()
    for cache in (pages.k_cache, pages.v_cache):
        cache.view(-1, kv_heads, dim)[slots] = torch.nan
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype).to(DEVICE)
    cos, sin, weights = angles(rows, dim, dtype)
    rotation = rope_cache.Rotation(cos, sin, slots, (*weights, 1e-6) if norms else None)
    caches = pages.k_cache.clone(), pages.v_cache.clone()
    walk = split_walk(pages, splits)
    for _ in range(2):  # the second finds what the first left in its counters
        paged_decode.decode_qkv(
            qkv, rotation, *caches, pages.context_lens, pages.tables, pages.scale, out=pages.out, split=walk
        )
    pages.q = rope_cache.reference(qkv, rotation, pages.k_cache, pages.v_cache, num_heads=heads)
    close(pages.out, pages.expected())
    for got, expected in zip(caches, (pages.k_cache, pages.v_cache), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("rotates", [False, True], ids=["keys there", "new keys"])
@pytest.mark.parametrize(("splits", "parts"), [(1, 1), (4, 4), (16, 2)] if ON_CARD else [(1, 1), (4, 4)])
@pytest.mark.parametrize("shape", SHARING_SHAPES, ids=str)
def test_decodes_that_have_prefixes_in_common(
    shape: tuple, splits: int, parts: int, rotates: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(25)
    heads, kv_heads, dim, size = shape
    per_tile = shared_prefix.sequences_per_tile(heads // kv_heads)
    long, short = 6 * size, size
    cached = [long, long + 1, long + size, short + 3, 2 * size, 0, size, long + 70, 5, *range(long, long + 63, 7)]
    pages = Pages([(c, 1) for c in cached], shape, dtype, width=64)
    members = [[0, 7, 1, 2][:per_tile], [4, 3], list(range(9, 9 + per_tile))[:9]]
    shared = shared_prefixes(pages, members, [long, short, long], per_tile)
    programs = -(-len(cached) // per_tile) * kv_heads
    prefixes = shared_prefix.Prefixes.of(shared, heads, kv_heads, dim, parts * programs)
    assert prefixes.partials.splits == parts
    prefixes.partials.values.fill_(torch.nan)
    prefixes.partials.log_sums.fill_(torch.nan)
    options = {"out": pages.out, "split": split_walk(pages, splits), "prefixes": prefixes}
    if not rotates:
        arguments = pages.q, pages.k_cache, pages.v_cache, pages.context_lens, pages.tables, pages.scale
        paged_decode.paged_decode(*arguments, **options)
        close(pages.out, pages.expected())
        return
    rows, slots = len(cached), pages.slot_mapping()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype).to(DEVICE)
    cos, sin, weights = angles(rows, dim, dtype)
    rotation = rope_cache.Rotation(cos, sin, slots, (*weights, 1e-6))
    caches = pages.k_cache.clone(), pages.v_cache.clone()
    paged_decode.decode_qkv(qkv, rotation, *caches, pages.context_lens, pages.tables, pages.scale, **options)
    pages.q = rope_cache.reference(qkv, rotation, pages.k_cache, pages.v_cache, num_heads=heads)
    close(pages.out, pages.expected())
    for got, expected in zip(caches, (pages.k_cache, pages.v_cache), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("least_keys", [40, 100, 1000])
def test_short_sequences_beside_long_ones_are_not_split(least_keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(20)
    pages = Pages([(c, 1) for c in (0, 39, 40, 99, 130, 290)], (4, 2, 64, 16), dtype)
    walk = dataclasses.replace(split_walk(pages, 4), least_keys=least_keys)
    walk.partials.log_sums.fill_(torch.nan)
    for _ in range(2):
        paged_decode.paged_decode(
            pages.q, pages.k_cache, pages.v_cache, pages.context_lens, pages.tables, pages.scale, out=pages.out,
            split=walk,
        )  # fmt: skip
        close(pages.out, pages.expected())
    assert not walk.arrived.any()
    block_n, lens = paged_decode._tile(64, dtype.itemsize)[0], pages.context_lens.tolist()
    were_split = [bool(row.isfinite().any()) for row in walk.partials.log_sums]
    shares = [-(-max(-(-n // 4), least_keys) // block_n) * block_n for n in lens]
    assert were_split == [n > share for n, share in zip(lens, shares, strict=True)]


@pytest.mark.parametrize("splits", [1, 4])
def test_a_padding_row_of_no_tokens_gives_zeros_and_harms_nobody(splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    pages = Pages([(40, 1), (3, 1), (90, 1)], (4, 2, 64, 16), dtype)
    pages.context_lens[1] = 0
    arguments = (pages.q, pages.k_cache, pages.v_cache, pages.context_lens, pages.tables, pages.scale)
    paged_decode.paged_decode(*arguments, out=pages.out, split=split_walk(pages, splits))
    close(pages.out, paged_decode.reference(*arguments))
    assert not pages.out[1].any()


def test_rows_past_the_last_chunk_are_left_to_nobody(dtype: torch.dtype) -> None:
    """The padded token count of a captured graph: sequences without tokens, rows without a sequence."""
    torch.manual_seed(5)
    pages = Pages([(33, 40), (0, 17), (0, 0), (0, 0)], (4, 2, 64, 16), dtype)
    rows = pages.q.shape[0]
    padded = torch.cat([pages.q, torch.zeros_like(pages.q[:9])])
    out = torch.zeros(padded.shape, dtype=dtype, device=DEVICE)
    paged_prefill.paged_prefill(
        padded, pages.k_cache, pages.v_cache, pages.query_start, pages.context_lens, pages.tables, pages.scale, out=out
    )
    close(out[:rows], pages.expected())


@pytest.fixture
def own_tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of any size read their own keys from qkv where they can, in the interpreter always, by small tiles; an
    entry, the tile's keys, for each time that they do."""
    used: list[int] = []
    tiles = OwnKeys.tiles
    monkeypatch.setattr(OwnKeys, "tiles", lambda self, block_n: used.append(block_n) or tiles(self, block_n))
    monkeypatch.setattr(own_keys, "LEAST_ROWS", 1)
    if not ON_CARD:
        monkeypatch.setattr(own_keys, "TILE", (16, 16, 4, 3))
        monkeypatch.setattr(own_keys, "pays", lambda rows, *rest: rows > 0)
    return used


def takes_own_keys(dtype: torch.dtype, dim: int = 128) -> bool:
    return not ON_CARD or own_keys.pays(10_000, dim, dtype, DEVICE, 0)


OWN_SHAPES = [shape for shape in SHAPES if shape[2] in (64, 128)] if ON_CARD else [(4, 2, 16, 12), (3, 1, 64, 16)]


@pytest.mark.parametrize("lengths", [
    [(0, 90)], [(0, 1), (0, 50), (0, 16), (0, 33)], [(40, 70)], [(5, 40), (0, 0), (33, 3), (64, 49)],
], ids=["cold", "cold chunks", "behind a prefix", "chunks behind prefixes"])  # fmt: skip
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("shape", OWN_SHAPES, ids=str)
def test_chunks_read_their_own_keys_from_the_projection(
    shape: tuple, split: bool, lengths: list[tuple[int, int]], dtype: torch.dtype, own_tiles: list[int]
) -> None:
    """They are nowhere else: their slots in the cache hold NaN, and so do the rows behind the last chunk."""
    if not takes_own_keys(dtype):
        pytest.skip("no tensor memory accelerator, or a type that it is not used for")
    torch.manual_seed(20)
    heads, kv_heads, dim, size = shape
    times = 9 if ON_CARD else 1
    lengths = [(cached * times, new * times) for cached, new in lengths]
    pages = Pages(lengths, shape, dtype, width=4096 // size if split else 0)
    rows, slots, expected = len(pages.q), pages.slot_mapping(), pages.expected()
    qkv = torch.full((rows + 70, heads + 2 * kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    qkv[:rows, :heads] = pages.q
    for cache, first in ((pages.k_cache, heads), (pages.v_cache, heads + kv_heads)):
        own = cache.view(-1, kv_heads, dim)
        qkv[:rows, first : first + kv_heads] = own[slots]
        own[slots] = torch.nan
    out = torch.zeros(len(qkv), heads, dim, dtype=dtype, device=DEVICE)
    paged_prefill.paged_prefill(
        qkv[:, :heads], pages.k_cache, pages.v_cache, pages.query_start, pages.context_lens, pages.tables, pages.scale,
        out=out, own=OwnKeys.of(qkv.flatten(1), heads, kv_heads), processors=PROCESSORS if split else 0,
    )  # fmt: skip
    close(out[:rows], expected)
    assert len(own_tiles) == 1


@pytest.mark.parametrize(("decodes", "norms"), [(0, False), (3, True)], ids=["llama", "qwen3 with decodes"])
def test_the_backend_lets_chunks_read_their_own_keys_from_the_projection(
    decodes: int, norms: bool, dtype: torch.dtype, own_tiles: list[int]
) -> None:
    """Behind decodes, before padding rows of NaN, in every layer anew."""
    torch.manual_seed(21)
    lengths = [*[(40, 1), (16, 1), (0, 1)][:decodes], (0, 37), (21, 18), (50, 1)]
    heads, kv_heads, dim, _ = shape = (6, 2, 128, 16) if ON_CARD else (3, 1, 16, 16)
    pages = Pages(lengths, shape, dtype)
    batch = batch_of(pages, decodes, True)
    rows, padding = len(batch.slot_mapping), 19
    batch.slot_mapping = torch.cat((batch.slot_mapping, torch.full_like(batch.slot_mapping[:1], -1).expand(padding)))
    cos, sin, weights = angles(rows + padding, dim, dtype)
    given = (weights[0], weights[1], 1e-6) if norms else None
    backend = TritonBackend()
    for _ in range(2):
        qkv = torch.randn(rows + padding, (heads + 2 * kv_heads) * dim).to(dtype).to(DEVICE)
        qkv[rows:] = torch.nan
        k_cache, v_cache = pages.k_cache.clone(), pages.v_cache.clone()
        rotation = rope_cache.Rotation(cos, sin, batch.slot_mapping, given)
        pages.q = rope_cache.reference(qkv, rotation, pages.k_cache, pages.v_cache, num_heads=heads)[:rows]
        got = backend.forward_qkv(qkv, given, (cos, sin), k_cache, v_cache, pages.scale, batch)
        close(got.view(-1, heads, dim)[:rows], pages.expected())
        for written, expected in ((k_cache, pages.k_cache), (v_cache, pages.v_cache)):
            torch.testing.assert_close(written, expected, equal_nan=True, **TOLERANCE[dtype])
    assert len(own_tiles) == (2 if takes_own_keys(dtype, dim) else 0)


@pytest.mark.skipif(not ON_CARD, reason="CUDA graphs are of a card")
def test_a_captured_graph_reads_own_keys_where_they_stood_at_its_capture(
    dtype: torch.dtype, own_tiles: list[int]
) -> None:
    if not takes_own_keys(dtype):
        pytest.skip("no tensor memory accelerator, or a type that it is not used for")
    torch.manual_seed(22)
    pages = Pages([(30, 700), (0, 500)], (16, 8, 128, 16), dtype)
    batch = batch_of(pages, 0, True)
    rows = len(batch.slot_mapping)
    cos, sin, weights = angles(rows, 128, dtype)
    given, backend = (weights[0], weights[1], 1e-6), TritonBackend()
    source, qkv = torch.randn(2, rows, 32 * 128).to(dtype).to(DEVICE)
    caches = pages.k_cache.clone(), pages.v_cache.clone()
    graph, graph_out = torch.cuda.CUDAGraph(), None
    for captured in (False, True):
        with torch.cuda.graph(graph) if captured else contextlib.nullcontext():
            qkv.copy_(source)
            graph_out = backend.forward_qkv(qkv, given, (cos, sin), *caches, pages.scale, batch)
    assert graph_out is not None
    for _ in range(2):
        source.copy_(torch.randn(source.shape))
        rotation = rope_cache.Rotation(cos, sin, batch.slot_mapping, given)
        pages.q = rope_cache.reference(source, rotation, pages.k_cache, pages.v_cache, num_heads=16)
        graph.replay()
        close(graph_out.view(pages.q.shape), pages.expected())
    assert len(own_tiles) == 2


def test_only_long_chunks_of_half_precision_read_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not own_keys.pays(4096, 128, torch.bfloat16, torch.device("cpu"), 0)
    monkeypatch.setattr(own_keys, "_is_able", lambda device: True)
    assert max(paged_prefill.WARM_UP_ROWS) - 128 > own_keys.LEAST_ROWS  # less what is not a whole token's
    for rows, dim, dtype, window, pays in [
        (4097, 128, torch.bfloat16, 0, True),
        (8192, 128, torch.float16, 0, True),
        (4096, 128, torch.bfloat16, 0, False),
        (8192, 64, torch.bfloat16, 0, False),
        (8192, 128, torch.float32, 0, False),
        (8192, 96, torch.bfloat16, 0, False),
        (8192, 128, torch.bfloat16, 512, False),
    ]:
        assert own_keys.pays(rows, dim, dtype, DEVICE, window) == pays


def test_splits_fill_the_card_and_no_more() -> None:
    splits = [paged_keys.choose_splits(n, 4096, 132, least_keys=128) for n in (1, 8, 64, 128, 256, 2048)]
    assert splits == [32, 32, 4, 2, 1, 1]
    assert paged_keys.choose_splits(8, 256, 132, least_keys=128) == 2
    assert paged_keys.choose_splits(8, 16, 132, least_keys=128) == 1


def batch_of(pages: Pages, num_decodes: int, device_lengths: bool) -> ForwardBatch:
    slots = pages.slot_mapping()
    return ForwardBatch(
        input_ids=torch.zeros_like(slots),
        positions=torch.zeros_like(slots),
        slot_mapping=slots,
        query_lens=[new for _, new in pages.lengths],
        context_lens=[cached + new for cached, new in pages.lengths],
        block_tables=pages.tables,
        block_lists=pages.blocks,
        num_decodes=num_decodes,
        block_size=pages.size,
        logits_indices=slots,
        scratch={},
        query_start=pages.query_start if device_lengths else None,
        context_lens_tensor=pages.context_lens if device_lengths else None,
    )


MIXES = {
    "decodes": ([(9, 1), (1, 1), (70, 1)], 3),
    "chunks": ([(0, 7), (16, 30), (3, 1)], 0),
    "decodes and chunks": ([(40, 1), (16, 1), (0, 6), (8, 3), (0, 1)], 2),
}


@pytest.mark.parametrize("device_lengths", [False, True], ids=["lists", "device lengths"])
@pytest.mark.parametrize("mix", MIXES)
def test_the_backend_writes_new_keys_and_attends_to_all(mix: str, device_lengths: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    lengths, num_decodes = MIXES[mix]
    pages = Pages(lengths, (4, 2, 64, 16), dtype)
    batch = batch_of(pages, num_decodes, device_lengths)
    expected = pages.expected()
    slots = batch.slot_mapping
    k, v = (cache.view(-1, 2, 64)[slots].clone() for cache in (pages.k_cache, pages.v_cache))
    for cache in (pages.k_cache, pages.v_cache):
        cache.view(-1, 2, 64)[slots] = torch.nan
    backend = TritonBackend()
    for _ in range(2):  # the second layer uses the first one's plan
        out = backend.forward(pages.q, k, v, pages.k_cache, pages.v_cache, pages.scale, batch)
        close(out.view(expected.shape), expected)


@pytest.mark.parametrize("norms", [False, True], ids=["llama", "qwen3"])
def test_the_backend_takes_the_fused_projection_as_it_comes(norms: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    pages = Pages([(40, 1), (16, 1), (0, 6), (8, 3)], (6, 2, 64, 16), dtype)
    batch = batch_of(pages, 2, True)
    rows = len(batch.slot_mapping)
    qkv = torch.randn(rows, 10 * 64).to(dtype).to(DEVICE)
    cos, sin, weights = angles(rows, 64, dtype)
    backend = TritonBackend()
    given = (*weights, 1e-6) if norms else None
    got = backend.forward_qkv(qkv, given, (cos, sin), pages.k_cache, pages.v_cache, pages.scale, batch)
    k_cache, v_cache = pages.k_cache.clone(), pages.v_cache.clone()
    rotation = rope_cache.Rotation(cos, sin, batch.slot_mapping, given)
    pages.q = rope_cache.reference(qkv, rotation, k_cache, v_cache, num_heads=6)
    close(got.view(pages.q.shape), pages.expected())


def test_padding_rows_of_a_captured_decode_step_change_nothing(dtype: torch.dtype) -> None:
    """A graph for four decodes replayed with two: the others have no tokens and no slot, and their tables are old."""
    torch.manual_seed(14)
    pages = Pages([(40, 1), (16, 1), (5, 1), (70, 1)], (4, 2, 64, 16), dtype)
    cos, sin, weights = angles(4, 64, dtype)
    qkv = torch.randn(4, 8 * 64).to(dtype).to(DEVICE)
    outs, caches = [], []
    for used in (4, 2):
        batch = batch_of(pages, 4, True)
        batch.slot_mapping[used:] = -1
        batch.context_lens_tensor = pages.context_lens.clone()
        batch.context_lens_tensor[used:] = 0
        caches.append((pages.k_cache.clone(), pages.v_cache.clone()))
        norms = (weights[0], weights[1], 1e-6)
        outs.append(TritonBackend().forward_qkv(qkv, norms, (cos, sin), *caches[-1], pages.scale, batch))
    assert torch.equal(outs[0][:2], outs[1][:2])
    assert not outs[1][2:].any()
    kept = pages.slot_mapping()[2:]
    for before, after in zip((pages.k_cache, pages.v_cache), caches[1], strict=True):
        assert torch.equal(before.view(-1, 128)[kept], after.view(-1, 128)[kept])


@pytest.mark.parametrize("shape", SHAPES if ON_CARD else SHAPES[-1:], ids=str)
def test_every_form_is_compiled_by_the_warm_up(
    shape: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, own_tiles: list[int]
) -> None:
    """It must run on a pool of a single block, whatever the block size."""
    if not ON_CARD:
        monkeypatch.setattr(triton_attention, "WARM_UP_ROWS", (16, 64, 128))  # 8,192 are many here
        monkeypatch.setattr(overlap, "MOST_ROWS", 4)
    heads, kv_heads, dim, size = shape
    cache = torch.zeros(1, size, kv_heads, dim, dtype=dtype, device=DEVICE)
    TritonBackend().warm_up(heads, cache, cache, 256)
    assert bool(own_tiles) == takes_own_keys(dtype, dim)


# ---------------------------------------------------------------------- the fused elementwise kernels


def angles(rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(cos, sin, norm weights of queries and keys), sin with a negative first half."""
    angle = torch.rand(rows, 1, dim // 2) * 6
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    weights = [(torch.rand(dim) + 0.5).to(dtype).to(DEVICE) for _ in range(2)]
    return cos.to(dtype).to(DEVICE), sin.to(dtype).to(DEVICE), weights


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_and_the_cache_write(shape: tuple, norms: bool, in_place: bool, any_dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    heads, kv_heads, dim, size = shape
    rows = 300 if ON_CARD else 6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(any_dtype).to(DEVICE)
    cos, sin, (q_weight, k_weight) = angles(rows, dim, any_dtype)
    slots = torch.randperm(30 * size)[:rows].to(DEVICE)
    slots[4] = -1  # padding: it has a row, but no place in the cache
    caches = [torch.randn(30, size, kv_heads, dim).to(any_dtype).to(DEVICE) for _ in range(2)]
    expected_caches = [cache.clone() for cache in caches]
    rotation = rope_cache.Rotation(cos, sin, slots, (q_weight, k_weight, 1e-6) if norms else None)
    before = qkv.clone()
    q = rope_cache.rope_cache(qkv, rotation, *caches, num_heads=heads, in_place=in_place)
    close(q, rope_cache.reference(before, rotation, *expected_caches, num_heads=heads))
    for cache, expected in zip(caches, expected_caches, strict=True):
        close(cache, expected)
    if in_place:
        assert q.data_ptr() == qkv.data_ptr()
        own, expected = OwnKeys.of(qkv, heads, kv_heads), OwnKeys.of(before, heads, kv_heads)
        written = slots >= 0
        assert torch.equal(own.k[written], caches[0].view(-1, kv_heads, dim)[slots[written]])
        assert torch.equal(own.k[4], expected.k[4]) and torch.equal(own.v, expected.v)
    else:
        assert torch.equal(qkv, before)


@pytest.mark.parametrize("size", [64, 576, 4096])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rmsnorm_alone_and_with_the_residual(rows: int, size: int, any_dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    x, residual = ((torch.randn(rows, size) * 3).to(any_dtype).to(DEVICE) for _ in range(2))
    weight = (torch.rand(size) + 0.5).to(any_dtype).to(DEVICE)
    close(rmsnorm.rmsnorm(x, weight, 1e-5), rmsnorm.reference(x, None, weight, 1e-5)[0])
    before = x.clone(), residual.clone()
    for got, expected in zip(
        rmsnorm.add_rmsnorm(x, residual, weight, 1e-5), rmsnorm.reference(x, residual, weight, 1e-5), strict=True
    ):
        close(got, expected)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("size", [2, 160, 1536, 3072])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_silu_mul(rows: int, size: int, any_dtype: torch.dtype) -> None:
    torch.manual_seed(10)
    gate_up = (torch.randn(rows, 2 * size) * 4).to(any_dtype).to(DEVICE)
    close(silu_mul.silu_mul(gate_up), silu_mul.reference(gate_up))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("rows", "norm"),
    [
        (1, "no norm"),
        (1, "norm"),
        (1, "sum and norm"),
        (2, "sum and norm"),
        (3, ""),
        (5, ""),
        (17, ""),
        (64, ""),
        (65, ""),
        (150, ""),
    ],
)
@pytest.mark.parametrize("shape", [(6, 64), (40, 576), (74, 2304)], ids=str)
def test_products_of_few_rows(
    shape: tuple[int, int], rows: int, norm: str, gated: bool, any_dtype: torch.dtype
) -> None:
    torch.manual_seed(12)
    outputs, columns = shape
    x, residual = (torch.randn(rows, columns).to(any_dtype).to(DEVICE) for _ in range(2))
    weight = (torch.randn(shape) * columns**-0.5).to(any_dtype).to(DEVICE)
    bias = torch.randn(outputs).to(any_dtype).to(DEVICE) if rows % 2 else None
    gain = (torch.rand(columns) + 0.5).to(any_dtype).to(DEVICE)
    given = None if norm in ("", "no norm") else Norm(gain, 1e-6, residual if norm == "sum and norm" else None)
    expected = gemv.reference(x, weight, bias, norm=given, gated=gated)
    arrived = skinny.counters(weight)
    for out in (None, torch.full_like(expected[0], 9.0)):  # the second finds what the first left in its counters
        if rows <= gemv.MAX_ROWS:
            y, total = gemv.gemv(x, weight, bias, norm=given, gated=gated, out=out)
            close(total, expected[1])
        else:
            y = skinny.skinny(x, weight, bias, arrived, gated=gated, out=out)
        assert out is None or y is out
        close(y, expected[0])
    assert not arrived.any()


@pytest.mark.parametrize("rows", [3, 16, 17, 33, 64, 129])
@pytest.mark.parametrize(
    "shape", [(6, 64), (74, 512), (40, 1536), (74, 2304), *([(1024, 2048), (1024, 3072)] if ON_CARD else [])], ids=str
)
def test_products_of_few_rows_that_begin_the_norm_behind_them(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    """The sum is right, and so is a product of its norm; shares of W in registers and not, of one program and many."""
    if dtype == torch.float16:
        pytest.skip("a sum before its norm has no room in float16")
    torch.manual_seed(18)
    outputs, columns = shape
    x, residual = (torch.randn(rows, size).to(dtype).to(DEVICE) for size in (columns, outputs))
    weight = (torch.randn(shape) * columns**-0.5).to(dtype).to(DEVICE)
    bias = torch.randn(outputs).to(dtype).to(DEVICE) if rows % 2 else None
    gain = (torch.rand(outputs) + 0.5).to(dtype).to(DEVICE)
    norm = Norm(gain, 1e-6, residual)
    normed, total = skinny.add_reference(x, weight, bias, norm)
    arrived = skinny.counters(weight)
    for _ in range(2):  # the second finds what the first left in its counters
        added = skinny.add_skinny(x, weight, bias, arrived, norm)
        close(added.total, total)
        scale = torch.rsqrt(added.squares.sum(0) / outputs + added.eps)[:, None]
        close((added.gained.float() * scale).to(dtype), normed)
    assert not arrived.any()
    if outputs % 64:  # as a product's columns have to be
        wide = torch.zeros(rows, -(-outputs // 64) * 64, dtype=dtype, device=DEVICE)
        wide[:, :outputs] = added.gained
        added = skinny.Added(added.total, wide, added.squares * (wide.shape[1] / outputs), added.eps)
        normed = torch.nn.functional.pad(normed, (0, wide.shape[1] - outputs))
    behind = (torch.randn(24, normed.shape[1]) * outputs**-0.5).to(dtype).to(DEVICE)
    for gated in (False, True):
        y = skinny.skinny(added, behind, None, skinny.counters(behind), gated=gated)
        # The sum is rounded where a norm apart would round what it has taken of it.
        expected = gemv.reference(normed.float(), behind.float(), None, gated=gated)[0]
        torch.testing.assert_close(y.float(), expected, **{name: 4 * value for name, value in TOLERANCE[dtype].items()})


@pytest.mark.parametrize("shape", [(74, 512), (40, 1536)], ids=str)
@pytest.mark.parametrize("rows", [3, 16, 17, 32, 33])
def test_small_shares_of_a_weight_are_held(shape: tuple[int, int], rows: int, any_dtype: torch.dtype) -> None:
    torch.manual_seed(19)
    assert skinny._tile(rows, *shape).is_held == (rows <= 32)  # of few outputs
    x = torch.randn(rows, shape[1]).to(any_dtype).to(DEVICE)
    weight = (torch.randn(shape) * shape[1] ** -0.5).to(any_dtype).to(DEVICE)
    arrived = skinny.counters(weight)
    for gated in (False, True):
        for _ in range(2):
            y = skinny.skinny(x, weight, None, arrived, gated=gated)
            close(y, gemv.reference(x, weight, None, gated=gated)[0])
    assert not arrived.any()


def test_products_of_few_rows_share_the_columns_where_outputs_are_few(any_dtype: torch.dtype) -> None:
    """Several programs a row of W, of which the last adds up what all have."""
    assert skinny._tile(8, 74, 2304).splits > 1


@pytest.mark.skipif(not ON_CARD, reason="too many programs for the interpreter")
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 96, 256])
@pytest.mark.parametrize("shape", [(4096, 1024), (6144, 1024), (1024, 3072), (66_000, 512)], ids=str)
def test_products_in_the_tiles_of_many_outputs(shape: tuple[int, int], rows: int, any_dtype: torch.dtype) -> None:
    torch.manual_seed(17)
    x = torch.randn(rows, shape[1]).to(any_dtype).to(DEVICE)
    weight = (torch.randn(shape) * shape[1] ** -0.5).to(any_dtype).to(DEVICE)
    expected = gemv.reference(x, weight, None, gated=True)[0]
    # Of 3,072 products, each sum of them rounded, results up to 8.8 are off by up to 3.4e-5 (against fp64).
    tolerance = {"atol": 5e-5} if any_dtype == torch.float32 else {}
    if rows <= gemv.MAX_ROWS:
        close(gemv.gemv(x, weight, None, gated=True)[0], expected, **tolerance)
    else:
        close(skinny.skinny(x, weight, None, skinny.counters(weight), gated=True), expected, **tolerance)


@pytest.mark.parametrize("rows", [1, gemv.MAX_ROWS, gemv.MAX_ROWS + 1, skinny.MAX_ROWS + 1])
def test_norm_and_product_are_the_same_whichever_kernels_take_so_many_rows(rows: int) -> None:
    """With and without a residual; the last of the rows are more than any kernel of few takes."""
    torch.manual_seed(16)
    norm = RMSNorm(64, 1e-6, torch.float16, DEVICE)
    linear = GateUpLinear(64, 12, False, torch.float16, DEVICE)
    norm.weight.data.uniform_(0.5, 1.5)
    linear.weight.data.normal_(0, 64**-0.5)
    linear.pack_weight()
    x, residual = (torch.randn(rows, 64).to(torch.float16).to(DEVICE) for _ in range(2))
    assert linear.few_rows is not None and linear.few_rows.takes(rows, normed=False) == (rows <= skinny.MAX_ROWS)
    for added in (None, residual):
        expected = gemv.reference(x, linear.weight, None, norm=Norm(norm.weight, 1e-6, added), gated=True)
        for got, value in zip(norm.into(linear, x, added), expected, strict=True):
            close(got, value)


# ---------------------------------------------------------------------- whole models

interpreted = pytest.mark.skipif(ON_CARD, reason="tests/engine/test_cuda.py does this with real cards and sizes")


def few_prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(512) for _ in range(count)] for count in (1, 9, 5)]


def check_greedy(folder: Path, replies: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    from reference import assert_greedy

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_greedy(reference, few_prompts(), replies)


@interpreted
def test_a_model_of_nothing_but_kernels_has_the_greedy_tokens_of_transformers(tiny_qwen3: Path) -> None:
    from models.loader import load_model, read_config
    from tests.models.paged import PagedRunner

    model = load_model(tiny_qwen3, read_config(tiny_qwen3), dtype=torch.float32, attention_backend="triton")
    runner = PagedRunner(model, scatter=True, last_only=True)
    check_greedy(tiny_qwen3, runner.greedy(few_prompts(), 3, chunk=6))


@interpreted
def test_norms_that_begin_in_the_products_before_them_have_the_greedy_tokens_of_transformers(
    make_tiny_model: Callable[..., Path],
) -> None:
    """Steps of three rows and more; the model's other products of few rows, which are none of float32, in between."""
    from models.kernels.few_rows import FewRows
    from models.layers.linear import Linear
    from models.loader import load_model, read_config
    from tests.models.paged import PagedRunner

    folder = make_tiny_model("qwen3", seed=4, intermediate_size=192, num_hidden_layers=2)
    model = load_model(folder, read_config(folder), dtype=torch.float32, attention_backend="triton")
    added = []
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        linear.few_rows = few = FewRows(linear.weight, linear.bias, gated=linear.is_gated)
        few.add = lambda x, norm, add=few.add: added.append(x.shape) or add(x, norm)  # type: ignore[method-assign]
    runner = PagedRunner(model, scatter=True, last_only=True)
    check_greedy(folder, runner.greedy(few_prompts(), 3, chunk=6))
    assert {columns for _, columns in added} == {64, 192}  # of o_proj and of down_proj
    assert min(rows for rows, _ in added) > gemv.MAX_ROWS


@interpreted
def test_the_engine_hands_the_kernels_what_they_need(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths on the device, block tables that grow, decodes beside chunks, the draw by the kernel."""
    from engine import LLM, SamplingParams
    from engine.device import DeviceManager
    from engine.model_runner import ModelRunner

    monkeypatch.setattr(DeviceManager, "_attention_backend", lambda self, *chosen: "triton")
    monkeypatch.setattr(ModelRunner, "warm_up", lambda self, progress: None)  # 256 tokens are many here
    llm = LLM(
        tiny_llama, device="cpu", dtype="float32", kvcache_block_size=4, num_kvcache_blocks=32,
        max_num_seqs=4, max_num_batched_tokens=8,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    check_greedy(tiny_llama, [out.token_ids for out in llm.generate(few_prompts(), greedy, use_tqdm=False)])
    llm.exit()


@interpreted
def test_steps_that_read_nothing_but_their_buffers_have_the_greedy_tokens_of_transformers(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would capture, called anew: block tables in full width, padding rows, the draw into a buffer."""
    from engine import LLM, SamplingParams, model_runner, step_graphs
    from engine.device import DeviceManager
    from engine.graph_shapes import Shape
    from engine.model_runner import ModelRunner
    from fake_graphs import FakeRecorder

    monkeypatch.setattr(DeviceManager, "_attention_backend", lambda self, *chosen: "triton")
    monkeypatch.setattr(ModelRunner, "warm_up", lambda self, progress: None)
    monkeypatch.setattr(step_graphs, "why_eager", lambda *args: None)
    monkeypatch.setattr(step_graphs, "CudaRecorder", FakeRecorder)
    monkeypatch.setattr(model_runner, "all_shapes", lambda *limits: [Shape(2), Shape(4), Shape(2, 64, 4)])
    folder = make_tiny_model("llama", num_hidden_layers=2)
    llm = LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=32, max_num_seqs=4, max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    check_greedy(folder, [out.token_ids for out in llm.generate(few_prompts(), greedy, use_tqdm=False)])
    assert llm.engine.runner.graphs._recorder.replays == 3  # type: ignore[attr-defined]
    llm.exit()
