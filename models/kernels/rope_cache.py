"""From the fused projection to attention's inputs in one pass: QK-norm, rotary positions, and the KV cache write.

Replaces, per layer, two norms, two rotations and two scattered copies. A program takes one token and a few heads of
one kind (query, key or value), so that a lone token still spreads over several multiprocessors.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap

_HEADS_PER_PROGRAM = 4


@dataclass(frozen=True, slots=True)
class Rotation:
    """What is done to the query and key heads of T tokens, and where their keys and values go.

    cos, sin  [T, D] or [T, 1, D] of models.layers.rotary: sin is negative in its first half
    slots     int64 [T], block * block_size + offset; a negative one writes nothing
    norms     ([D] of queries, [D] of keys, eps) of the RMSNorm on every head before the rotation, or None
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    norms: tuple[Tensor, Tensor, float] | None

    def arguments(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """As the kernels take them: cos, sin, slots, the norms' weights and eps."""
        assert self.cos.is_contiguous() and self.sin.is_contiguous()
        return self.cos, self.sin, self.slots, *(self.norms or (unused, unused, 0.0))


def rotation_arguments(rotation: Rotation | None, unused: Tensor, no_slots: Tensor) -> tuple[Any, ...]:
    """Rotation.arguments() for a kernel that rotates only where there is one to do."""
    return (unused, unused, no_slots, unused, unused, 0.0) if rotation is None else rotation.arguments(unused)


def rotation_constants(rotation: Rotation | None) -> dict[str, bool]:
    """Of such a kernel."""
    return {"ROTATES": rotation is not None, "NORMS": rotation is not None and rotation.norms is not None}


def rope_cache(
    qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, *, num_heads: int, in_place: bool = False
) -> Tensor:
    """Rotated (and, with weights, normed) queries [T, Hq, D]; keys so treated and values go to the cache.

    qkv             [T, (Hq + 2 * Hkv) * D], query heads first, then key, then value heads
    k_cache, v_cache  [num_blocks, block_size, Hkv, D] contiguous
    in_place        the result is qkv's own query heads, and its keys, too, are treated, but for rows without a slot:
                    for own_keys.py. Else qkv is left as it is.
    """
    kv_heads, dim = k_cache.shape[2:]
    tokens = qkv.shape[0]
    assert qkv.is_contiguous() and qkv.numel() == tokens * (num_heads + 2 * kv_heads) * dim
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    heads = qkv.view(tokens, num_heads + 2 * kv_heads, dim)
    q = heads[:, :num_heads] if in_place else qkv.new_empty(tokens, num_heads, dim)
    if not tokens:
        return q
    block = _HEADS_PER_PROGRAM
    programs = triton.cdiv(num_heads, block) + 2 * triton.cdiv(kv_heads, block)
    _rope_cache[(tokens, programs)](
        qkv,
        *rotation.arguments(qkv),
        q,
        k_cache,
        v_cache,
        Q_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        HALF_PADDED=triton.next_power_of_2(dim // 2),
        NORMS=rotation.norms is not None,
        IN_PLACE=in_place,
        BLOCK=block,
        num_warps=1,
        **overlap.launch_options(qkv.device, tokens),
    )
    return q


def reference(qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, *, num_heads: int) -> Tensor:
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, dim).float()
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if rotation.norms is not None:
        q_weight, k_weight, eps = rotation.norms
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + eps) * q_weight.float()
        k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + eps) * k_weight.float()
    angles = rotation.cos.float().view(-1, 1, dim), rotation.sin.float().view(-1, 1, dim)
    q, k = (x * angles[0] + x.roll(dim // 2, -1) * angles[1] for x in (q, k))
    written = rotation.slots >= 0
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache.view(-1, kv_heads, dim)[rotation.slots[written]] = x[written].to(cache.dtype)
    return q.to(qkv.dtype)


@triton.jit
def _rope_cache(
    qkv,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    eps,
    q,
    k_cache,
    v_cache,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    overlap.wait_and_trigger(OVERLAP)
    DIM: tl.constexpr = 2 * HALF
    Q_PROGRAMS: tl.constexpr = (Q_HEADS + BLOCK - 1) // BLOCK
    KV_PROGRAMS: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lane = tl.arange(0, HALF_PADDED)[None, :]
    in_half = lane < HALF
    ROW: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * DIM
    Q_ROW: tl.constexpr = ROW if IN_PLACE else Q_HEADS * DIM
    row = qkv + token * ROW

    if program < Q_PROGRAMS:
        head = program * BLOCK + tl.arange(0, BLOCK)[:, None]
        first, second = _rotated(row, head, token, cos, sin, q_weight, eps, lane, in_half, Q_HEADS, HALF, NORMS)
        target = q + token * Q_ROW + head * DIM + lane
        inside = (head < Q_HEADS) & in_half
        tl.store(target, first.to(q.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            if program < Q_PROGRAMS + KV_PROGRAMS:
                head = (program - Q_PROGRAMS) * BLOCK + tl.arange(0, BLOCK)[:, None]
                keys = row + Q_HEADS * DIM
                first, second = _rotated(
                    keys, head, token, cos, sin, k_weight, eps, lane, in_half, KV_HEADS, HALF, NORMS
                )
                target = k_cache + slot * (KV_HEADS * DIM) + head * DIM + lane
                inside = (head < KV_HEADS) & in_half
                tl.store(target, first.to(k_cache.dtype.element_ty), mask=inside)
                tl.store(target + HALF, second.to(k_cache.dtype.element_ty), mask=inside)
                if IN_PLACE:
                    source = keys + head * DIM + lane
                    tl.store(source, first.to(qkv.dtype.element_ty), mask=inside)
                    tl.store(source + HALF, second.to(qkv.dtype.element_ty), mask=inside)
            else:
                head = (program - Q_PROGRAMS - KV_PROGRAMS) * BLOCK + tl.arange(0, BLOCK)[:, None]
                source = row + (Q_HEADS + KV_HEADS) * DIM + head * DIM + lane
                target = v_cache + slot * (KV_HEADS * DIM) + head * DIM + lane
                inside = (head < KV_HEADS) & in_half
                # In fp32 for no other reason than that both branches must give their variables the same type.
                first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
                tl.store(target, first.to(v_cache.dtype.element_ty), mask=inside)
                tl.store(target + HALF, second.to(v_cache.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    heads,
    head,
    token,
    cos,
    sin,
    weight,
    eps,
    lane,
    in_half,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Both halves, fp32 [BLOCK, HALF_PADDED], of the heads `head` [BLOCK, 1] that start at `heads`."""
    inside = (head < NUM_HEADS) & in_half
    source = heads + head * (2 * HALF) + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        first = first * scale * tl.load(weight + lane, mask=in_half, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight + HALF + lane, mask=in_half, other=0.0).to(tl.float32)
    angle = token * (2 * HALF) + lane
    cos_first = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    return first * cos_first + second * sin_first, second * cos_second + first * sin_second


@triton.jit
def gains(weight, dim, partner, within, DIM_PADDED: tl.constexpr, NORMS: tl.constexpr):
    """A norm's weight [D] as fp32 [DIM_PADDED], and that of each element's partner in the rotation."""
    if NORMS:
        gain = tl.load(weight + dim, mask=within, other=0.0).to(tl.float32)
        partner_gain = tl.load(weight + partner, mask=within, other=0.0).to(tl.float32)
    else:
        gain = tl.full([DIM_PADDED], 1.0, dtype=tl.float32)
        partner_gain = gain
    return gain, partner_gain
