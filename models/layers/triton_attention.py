"""Attention by the project's Triton kernels (models/kernels), for CUDA cards.

Decodes and prompt chunks of a step go to a kernel each. All that the kernels need of lengths they read on the
device, so that a step can be replayed as a CUDA graph: what is chosen on the host (grids, splits) follows from the
number of sequences and tokens and from the width of the block tables alone, which a graph fixes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from models.batch import ForwardBatch, SharedPrefixes
from models.kernels import overlap, own_keys
from models.kernels.own_keys import OwnKeys
from models.kernels.paged_decode import SplitWalk, decode_qkv, paged_decode
from models.kernels.paged_keys import MOST_SPLITS, Partials, choose_splits
from models.kernels.paged_prefill import WARM_UP_ROWS, paged_prefill
from models.kernels.rope_cache import Rotation, rope_cache
from models.kernels.shared_prefix import Prefixes, sequences_per_tile
from models.layers.attention import AttentionBackend

_MOST_COUNTERS = 1023  # sequences times KV heads of a step whose sequences are split
# Sequences times KV heads from which on reading a shared prefix once pays. With fewer each program lasts longer, and
# one that walks a prefix for many has no others to hide its waits behind.
_LEAST_SHARING = 384
# Where choose_splits does not split: keys of a part at least, and parts. What shares a prefix are most often
# conversations of about one length, and then a part more is only one more to merge.
_LONG_KEYS = 512
_LONG_KEYS_SHARING = 1024
_LONG_SPLITS = 4


@dataclass(slots=True)
class _Plan:
    """What all layers of a step share: the batch's tables and lengths cut into decodes [0, N) and chunks [N, S)."""

    query_start: Tensor  # int32 [S - N + 1]
    decode_lens: Tensor  # int32 [N]
    decode_tables: Tensor  # int32 [N, W]
    chunk_lens: Tensor  # int32 [S - N]
    chunk_tables: Tensor  # int32 [S - N, W]
    split: SplitWalk | None  # the decodes' workspace; None where they are not split
    prefixes: Prefixes | None


class TritonBackend(AttentionBackend):
    """window: keys that a query sees, itself included; 0: all before it."""

    name = "triton"
    wants_device_lengths = True
    has_forward_qkv = True

    def __init__(self, window: int = 0) -> None:
        self._window = window
        self._arrived: Tensor | None = None  # of SplitWalk: one layer is at work at a time

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
        rotation = Rotation(*rope, batch.slot_mapping, norms)
        kv_heads, dim = k_cache.shape[2:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        if batch.num_decodes < qkv.shape[0]:
            chunk_rows = (qkv.shape[0] - batch.num_decodes) * (heads // kv_heads)
            in_place = own_keys.pays(chunk_rows, dim, qkv.dtype, qkv.device, self._window)
            q = rope_cache(qkv, rotation, k_cache, v_cache, num_heads=heads, in_place=in_place)
            own = OwnKeys.of(qkv, heads, kv_heads) if in_place else None
            return self._attend(q, k_cache, v_cache, scale, batch, own)
        plan = self._plan(heads, k_cache, batch)
        out = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
        decode_qkv(
            qkv,
            rotation,
            k_cache,
            v_cache,
            plan.decode_lens,
            plan.decode_tables,
            scale,
            out=out,
            split=plan.split,
            window=self._window,
            prefixes=plan.prefixes,
        )
        return out.view(qkv.shape[0], -1)

    def sequences_per_tile(self, num_heads: int, kv_heads: int, decodes: int) -> int:
        per_tile = sequences_per_tile(num_heads // kv_heads)
        return per_tile if per_tile > 1 and not self._window and decodes * kv_heads >= _LEAST_SHARING else 0

    def warm_up(self, num_heads: int, k_cache: Tensor, v_cache: Tensor, most_decodes: int) -> None:
        """Runs each kernel in each form that sizes can ask for, one token or chunk against block 0."""
        block_size, kv_heads, dim = k_cache.shape[1:]
        group, device = num_heads // kv_heads, k_cache.device
        # Launches of few tokens overlap, which is a form of its own.
        around_few = overlap.MOST_ROWS, overlap.MOST_ROWS + 1
        for tokens in sorted({*(max(1, rows // group) for rows in WARM_UP_ROWS), *around_few}):
            qkv = torch.zeros(tokens, (num_heads + 2 * kv_heads) * dim, dtype=k_cache.dtype, device=device)
            q = qkv.view(tokens, -1, dim)[:, :num_heads]
            out = torch.empty(q.shape, dtype=q.dtype, device=device)
            lens = torch.tensor([tokens], dtype=torch.int32, device=device)
            start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
            table = torch.zeros(1, -(-8192 // block_size), dtype=torch.int32, device=device)
            own = None
            if own_keys.pays(tokens * group, dim, q.dtype, device, self._window):
                self._warm_up_rotation(qkv, num_heads, k_cache, v_cache)
                own = OwnKeys.of(qkv, num_heads, kv_heads)
            for processors in (0, _processors(device)):
                paged_prefill(q, k_cache, v_cache, start, lens, table, 1.0, out=out, own=own, window=self._window,
                              processors=processors)  # fmt: skip
        for splits in (1, 2, MOST_SPLITS):
            self._warm_up_decodes(splits, num_heads, k_cache, v_cache)
        if self.sequences_per_tile(num_heads, kv_heads, most_decodes):
            for splits in (1, 2):
                self._warm_up_decodes(splits, num_heads, k_cache, v_cache, shared=True)
        for tokens, splits in product(around_few, (2, MOST_SPLITS)):
            out = torch.empty(tokens, num_heads, dim, dtype=k_cache.dtype, device=device)
            Partials.empty(tokens, num_heads, splits, dim, device).merge(out)

    def _warm_up_rotation(self, qkv: Tensor, heads: int, k_cache: Tensor, v_cache: Tensor) -> None:
        """In place, of rows without a slot."""
        tokens, dim = qkv.shape[0], k_cache.shape[3]
        angle = torch.zeros(tokens, dim, dtype=qkv.dtype, device=qkv.device)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=qkv.device)
        for norms in (None, (angle[0], angle[0], 1e-6)):
            rotation = Rotation(angle, angle, nowhere, norms)
            rope_cache(qkv, rotation, k_cache, v_cache, num_heads=heads, in_place=True)

    def _warm_up_decodes(
        self, splits: int, heads: int, k_cache: Tensor, v_cache: Tensor, *, shared: bool = False
    ) -> None:
        """Of a sequence without tokens, and without company where that would be asked for."""
        kv_heads, dim = k_cache.shape[2:]
        dtype, device = k_cache.dtype, k_cache.device
        qkv = torch.zeros(1, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
        q = qkv.view(1, -1, dim)[:, :heads]
        lens, table = torch.zeros(2, 1, 1, dtype=torch.int32, device=device)
        angle = torch.zeros(1, dim, dtype=dtype, device=device)
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
        split = self._split(1, heads, kv_heads, splits, dim, device)
        out = torch.empty(q.shape, dtype=dtype, device=device)
        options = {"out": out, "split": split, "window": self._window, "prefixes": None}
        if shared:
            nobody = torch.full((1, sequences_per_tile(heads // kv_heads)), -1, dtype=torch.int32, device=device)
            nothing = torch.zeros(2, 1, dtype=torch.int32, device=device)
            options["prefixes"] = Prefixes.of(SharedPrefixes(nobody, *nothing), heads, kv_heads, dim, 1)
        paged_decode(q, k_cache, v_cache, lens[:, 0], table, 1.0, **options)
        for norms in (None, (angle[0], angle[0], 1e-6)):
            rotation = Rotation(angle, angle, nowhere, norms)
            decode_qkv(qkv, rotation, k_cache, v_cache, lens[:, 0], table, 1.0, **options)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        batch: ForwardBatch,
        own: OwnKeys | None = None,
    ) -> Tensor:
        """q [T, Hq, D] over the cache, which holds the step's own keys and values -> [T, Hq * D]. own: those of q's
        rows once more, for chunks to read instead."""
        plan = self._plan(q.shape[1], k_cache, batch)
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
            split=plan.split,
            window=self._window,
            prefixes=plan.prefixes,
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
            own=None if own is None else own.after(decodes),
            window=self._window,
            processors=_processors(q.device),
        )
        return out.view(q.shape[0], -1)

    def _plan(self, heads: int, k_cache: Tensor, batch: ForwardBatch) -> _Plan:
        """The step's, made by its first layer."""
        plan = batch.scratch.get(self.name)
        if plan is not None:
            return plan
        query_start, context_lens, device = batch.query_start, batch.context_lens_tensor, k_cache.device
        if query_start is None or context_lens is None:  # a caller without buffers for them, such as warm-up
            starts = [0, *accumulate(batch.query_lens)]
            query_start = torch.tensor(starts, dtype=torch.int32, device=device)
            context_lens = torch.tensor(batch.context_lens, dtype=torch.int32, device=device)
        decodes, kv_heads, dim = batch.num_decodes, *k_cache.shape[2:]
        longest = batch.block_tables.shape[1] * batch.block_size
        splits, least_keys = choose_splits(decodes * kv_heads, longest, _processors(device), least_keys=128), 1
        if splits == 1 and decodes * kv_heads <= _MOST_COUNTERS and longest >= _LONG_SPLITS * _LONG_KEYS:
            # The card is full, but not so full that a sequence longer than the others would not keep it waiting.
            splits, least_keys = _LONG_SPLITS, _LONG_KEYS if batch.shared is None else _LONG_KEYS_SHARING
        plan = batch.scratch[self.name] = _Plan(
            query_start[decodes:],
            context_lens[:decodes],
            batch.block_tables[:decodes],
            context_lens[decodes:],
            batch.block_tables[decodes:],
            self._split(decodes, heads, kv_heads, splits, dim, device, least_keys),
            None if batch.shared is None else Prefixes.of(batch.shared, heads, kv_heads, dim, _processors(device)),
        )
        return plan

    def _split(
        self, decodes: int, heads: int, kv_heads: int, splits: int, dim: int, device: torch.device, least_keys: int = 1
    ) -> SplitWalk | None:
        if splits == 1 or not decodes:
            return None
        if self._arrived is None or self._arrived.device != device:
            # Made in the warm-up, so that no graph's memory is in use for it.
            self._arrived = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)
        return SplitWalk(Partials.empty(decodes, heads, splits, dim, device), self._arrived, least_keys)


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; in the interpreter a few, so that split walks are taken there, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
