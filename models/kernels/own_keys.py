"""Attention of long prompt chunks to their own keys and values, read from the step's projection, not from the cache.

Pages scatter a sequence over the pool, so a tile of them is gathered key by key: an address and an asynchronous copy
for every 16 bytes, by the warps that multiply. A chunk's own keys and values also stand together, in the step's qkv
tensor, where rope_cache.py rotates the keys in place. From there a tile is one request to Hopper's tensor memory
accelerator (TMA), whose descriptors (base, extent, strides) the host makes.

A layer of Qwen3-0.6B (16 heads over 8, of 128) on an H200, by pages and so: 156 and 114 us for 3,584 tokens, 131 and
110 for 8 chunks of 1,024. Short chunks behind long prefixes gained nothing or lost 3%; a captured graph knows the
tokens of its step but not of which kind they are, so steps of few tokens are left to the pages.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.paged_keys import attend_tile

# Rows (query, head) of a step's chunks from which on it pays.
LEAST_ROWS = 4097
# BLOCK_M, BLOCK_N, warps, stages: one more than by pages, as a stage costs nothing here but shared memory, of which
# heads of 128 take 112 KiB. Heads of 256 would spill registers.
TILE = (64, 64, 4, 3)


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """k, v [T, Hkv, D]: the step's own, of which a row's heads stand together; D is a power of 2.

    Rows that belong to no chunk may hold anything, NaN included.
    """

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, qkv: Tensor, num_heads: int, kv_heads: int) -> OwnKeys:
        """Those in qkv [T, (Hq + 2 * Hkv) * D], contiguous: views, no copies."""
        heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, -1)
        return cls(*heads[:, num_heads:].split(kv_heads, dim=1))

    def after(self, rows: int) -> OwnKeys:
        """Without the first rows."""
        return OwnKeys(self.k[rows:], self.v[rows:])

    def tiles(self, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Descriptors, of the keys and of the values, that load one KV head of block_n rows. They hold the tensors'
        addresses, so each launch makes its own; a captured graph keeps those of its capture, as it does pointers."""
        tokens, kv_heads, dim = self.k.shape
        assert self.k.stride() == self.v.stride() and self.k.stride()[1:] == (dim, 1)
        extent, strides = [tokens, kv_heads * dim], [self.k.stride(0), 1]
        k, v = (TensorDescriptor(x, extent, strides, [block_n, dim]) for x in (self.k, self.v))
        return k, v


def pays(rows: int, dim: int, dtype: torch.dtype, device: torch.device, window: int) -> bool:
    """Whether chunks of so many rows (query, head) in all should take their own keys from qkv."""
    return rows >= LEAST_ROWS and not window and dim == 128 and dtype.itemsize == 2 and _is_able(device)


@functools.cache
def _is_able(device: torch.device) -> bool:
    """Hopper: TMA, and shared memory for three stages. Cards after it have not been tried."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@triton.jit
def attend_own_keys(
    q,
    position,
    total,
    peak,
    out,
    start,
    seen_by_all,
    end,
    offset,
    kv_head,
    k_rows,
    v_rows,
    k_tiles,
    v_tiles,
    row_stride,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys [start, end) of a sequence, all of the chunk, of which those before seen_by_all need no mask.

    Key number `key` stands in row offset + key of k_rows, v_rows (the tensors' starts) and k_tiles, v_tiles (their
    descriptors). The others as in attend_keys.
    """
    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM)
    column = kv_head * DIM
    # Only tiles that all queries see whole come through TMA, which masks nothing. One that went on would hold rows of
    # the next sequence, or of padding, whose values may be NaN, which a weight of 0 does not make 0.
    whole = start + tl.maximum(seen_by_all - start, 0) // BLOCK_N * BLOCK_N
    for key in range(start, whole, BLOCK_N):
        k = k_tiles.load([offset + key, column])
        v = v_tiles.load([offset + key, column])
        total, peak, out = attend_tile(
            q, position, total, peak, out, k, v, key + lane, end, scale, 0, False, PRECISION
        )  # fmt: skip
    for key in range(whole, end, BLOCK_N):
        at = (offset + key + lane).to(tl.int64)[:, None] * row_stride + column + dim[None, :]
        inside = (key + lane < end)[:, None]
        k = tl.load(k_rows + at, mask=inside, other=0.0)
        v = tl.load(v_rows + at, mask=inside, other=0.0)
        total, peak, out = attend_tile(
            q, position, total, peak, out, k, v, key + lane, end, scale, 0, True, PRECISION
        )  # fmt: skip
    return total, peak, out
