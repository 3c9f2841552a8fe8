"""Step graphs without a card: a graph that calls the function it recorded, and the references of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, sampler, shared_prefixes, step_graphs
from engine.device import DeviceManager
from models import loader
from models.batch import ForwardBatch, SharedPrefixes
from models.kernels import paged_decode, paged_prefill, rope_cache, sampling_reference, step_rows
from models.layers.attention import AttentionBackend

# Of an engine with few rows and small blocks, so that steps of all kinds come soon.
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kvcache_block_size": 4, "num_kvcache_blocks": 400, "max_num_seqs": 9,
    "max_num_batched_tokens": 64,
}  # fmt: skip


class FakeRecorder:
    """replays: the number of rows of each replayed step, in order. used: bytes that each recording takes."""

    def __init__(self, device: torch.device | None = None, used: int = 0) -> None:
        self.recorded = 0
        self.replays = 0
        self._used = used

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        function()

        def replay() -> None:
            self.replays += 1
            function()

        return replay

    def used_bytes(self) -> int:
        return self.recorded * self._used

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)


class ReferenceBackend(AttentionBackend):
    """TritonBackend with each kernel's reference in its place: reads lengths and tables as tensors only."""

    name = "triton"
    wants_device_lengths = True
    has_forward_qkv = True
    tiles_seen = 0  # of shared prefixes, over all steps and layers
    least_sharing = 4  # decodes from which on they are asked for

    def sequences_per_tile(self, num_heads: int, kv_heads: int, decodes: int) -> int:
        return 3 if decodes >= self.least_sharing else 0

    def forward(self, *args: Any) -> Tensor:
        raise NotImplementedError

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
        kv_heads, dim = k_cache.shape[2:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        rotation = rope_cache.Rotation(*rope, batch.slot_mapping, norms)
        q = rope_cache.reference(qkv, rotation, k_cache, v_cache, num_heads=heads)
        n, lens = batch.num_decodes, batch.context_lens_tensor
        assert lens is not None and batch.query_start is not None
        if batch.shared is not None:
            try:
                self.tiles_seen += check_shared(batch.shared, lens[:n], batch.block_tables[:n], batch.block_size)
            except AssertionError as error:  # a fault of a step the engine would get over
                pytest.fail(f"what decodes are said to share is not so: {error}")
        decoded = paged_decode.reference(q[:n], k_cache, v_cache, lens[:n], batch.block_tables[:n], scale)
        chunks = paged_prefill.reference(
            q[n:], k_cache, v_cache, batch.query_start[n:], lens[n:], batch.block_tables[n:], scale
        )
        return torch.cat((decoded, chunks)).flatten(1)


def check_shared(shared: SharedPrefixes, lens: Tensor, tables: Tensor, block_size: int) -> int:
    """Whether what a step's decodes are said to share is what they share; returns how many tiles there are."""
    covered, tiles = [0] * len(lens), 0
    for members, length in zip(shared.members.tolist(), shared.lens.tolist(), strict=True):
        there = [one for one in members if one >= 0]
        if not length:
            assert not there
            continue
        tiles += 1
        assert members[0] >= 0 and len(there) >= 2 and length % block_size == 0
        for one in there:
            assert covered[one] == 0 and length < lens[one]
            covered[one] = length
            assert torch.equal(tables[one, : length // block_size], tables[members[0], : length // block_size])
    assert shared.skipped.tolist() == covered
    return tiles


def graphs_of(llm: LLM) -> step_graphs.StepGraphs:
    graphs = llm.engine.runner.graphs  # type: ignore[attr-defined]
    assert graphs is not None
    return graphs


def install(patch: pytest.MonkeyPatch) -> None:
    """From here on engines on a CPU use references for kernels, and capture steps."""
    patch.setattr(DeviceManager, "_attention_backend", lambda self, *chosen: "triton")
    patch.setattr(loader, "get_backend", lambda name: ReferenceBackend())
    kernel = SimpleNamespace(sample=sampling_reference.reference)
    patch.setattr(sampler, "kernels", SimpleNamespace(load=lambda name, device: kernel))
    rows = SimpleNamespace(step_rows=step_rows.reference)
    patch.setattr(step_graphs, "kernels", SimpleNamespace(load=lambda name, device: rows))
    patch.setattr(step_graphs, "why_eager", lambda enforce_eager, *rest: "asked for" if enforce_eager else None)
    patch.setattr(shared_prefixes, "LEAST_SAVED", 4)
    patch.setattr(shared_prefixes, "LEAST_SAVED_EACH", 2)
    patch.setattr(step_graphs, "CudaRecorder", FakeRecorder)
