"""Attention by the package flash_attn (version 2) over the paged KV cache, where it is installed.

Untested on real hardware: its calls are tested against a stand-in with the signatures of flash-attn 2.8. It wants KV
blocks of a multiple of 256 tokens, half precision, heads of at most 256 and a card of compute capability 8.0 or more.
Steps are launched kernel by kernel: the longest lengths go to it as numbers, which a CUDA graph would freeze.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from models.batch import ForwardBatch
from models.layers.attention import AttentionBackend

BLOCK_MULTIPLE = 256  # tokens of a KV block
MOST_HEAD_DIM = 256
CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)


def why_unusable() -> str | None:
    """What keeps the package from being used, whatever the card and the model; None where nothing does."""
    try:
        package: Any = importlib.import_module("flash_attn")
        functions = [package.flash_attn_varlen_func, package.flash_attn_with_kvcache]
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed"
    except (ImportError, AttributeError, OSError) as error:  # built for another torch, or of another version
        return f"the package flash_attn does not load: {error}".splitlines()[0]
    if any("block_table" not in inspect.signature(function).parameters for function in functions):
        return f"flash_attn {getattr(package, '__version__', '')} reads no paged cache; version 2.5 and later do"
    return None


def why_not_head_dim(head_dim: int) -> str | None:
    """What keeps heads of this size from being computed; None where nothing does."""
    if head_dim > MOST_HEAD_DIM or head_dim % 8:
        return f"it takes heads of a multiple of 8 up to {MOST_HEAD_DIM}, this model's have {head_dim}"
    return None


@dataclass(slots=True)
class _Plan:
    """What all layers of a step share: lengths and tables int32 of decodes [0, N) and chunks [N, S), on the device."""

    decode_lens: Tensor  # [N]
    decode_tables: Tensor  # [N, W]
    query_start: Tensor  # [S - N + 1]
    key_start: Tensor  # [S - N + 1]
    chunk_tables: Tensor  # [S - N, W]
    longest_query: int
    longest_context: int


class FlashAttnBackend(AttentionBackend):
    """Raises ImportError where the package cannot be used."""

    name = "flash_attn"

    def __init__(self) -> None:
        if reason := why_unusable():
            raise ImportError(f"attention backend 'flash_attn': {reason}")
        self._package: Any = importlib.import_module("flash_attn")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, batch: ForwardBatch
    ) -> Tensor:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, batch.slot_mapping, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, batch.slot_mapping, v)
        plan = batch.scratch.get(self.name)
        if plan is None:
            plan = batch.scratch[self.name] = _plan(batch, q.device)
        out, decodes = torch.empty_like(q), batch.num_decodes
        if decodes:
            attended = self._package.flash_attn_with_kvcache(
                q[:decodes, None],
                k_cache,
                v_cache,
                cache_seqlens=plan.decode_lens,
                block_table=plan.decode_tables,
                softmax_scale=scale,
                causal=True,
            )
            out[:decodes] = attended[:, 0]
        if decodes < len(batch.query_lens):
            out[decodes:] = self._package.flash_attn_varlen_func(
                q[decodes:],
                k_cache,
                v_cache,
                cu_seqlens_q=plan.query_start,
                cu_seqlens_k=plan.key_start,
                max_seqlen_q=plan.longest_query,
                max_seqlen_k=plan.longest_context,
                softmax_scale=scale,
                causal=True,
                block_table=plan.chunk_tables,
            )
        return out.view(q.shape[0], -1)


def _plan(batch: ForwardBatch, device: torch.device) -> _Plan:
    decodes = batch.num_decodes
    queries, contexts = batch.query_lens[decodes:], batch.context_lens[decodes:]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return _Plan(
        decode_lens=tensor(batch.context_lens[:decodes]),
        decode_tables=batch.block_tables[:decodes],
        query_start=tensor([0, *accumulate(queries)]),
        key_start=tensor([0, *accumulate(contexts)]),
        chunk_tables=batch.block_tables[decodes:],
        longest_query=max(queries, default=0),
        longest_context=max(contexts, default=0),
    )
