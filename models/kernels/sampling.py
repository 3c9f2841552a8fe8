"""The next token of rows that are greedy or drawn from the whole vocabulary, in one pass over the logits.

The draw is the exponential race of engine.sampler with the counter-based noise of engine.noise: argmax of p_i / E_i,
where E_i follows from (seed, position, token id) alone. Everything is read on the device, so that the draw can be
part of a captured step, and its tokens are those of the sampler on a CPU but for near-ties: a score may differ by
about one part in a million.

A row is cut into parts, so that a lone one still fills the card. Each part finds its winner relative to its own
largest logit; a second kernel puts the parts on one scale and takes the best.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BAD_TOKEN = -1
_BLOCK = 2048
_MIN_TEMPERATURE = 1e-6


def sample(
    logits: Tensor,
    temperature: Tensor,
    streams: Tensor,
    positions: Tensor,
    token_hash: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """int64 [R]: the lowest id among those of the highest score; BAD_TOKEN for a row with NaN, +inf or only -inf.

    logits       float32 [R, V], last dimension contiguous
    temperature  float32 [R]; 0 is greedy
    streams      int64 [R], the 64 bits of mix64(seed)
    positions    int64 [R], the index in the sequence of the token to be drawn
    token_hash   int32 [V], the low 32 bits of mix64(token id)
    out          int64 [R] contiguous, to be filled and returned; None: a new tensor
    """
    rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and token_hash.shape == (vocab_size,)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    assert tokens.shape == (rows,) and tokens.dtype == torch.int64 and tokens.is_contiguous()
    if not rows:
        return tokens
    parts = triton.cdiv(vocab_size, _BLOCK)
    peaks, scores = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    winners = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _race[(rows, parts)](
        logits,
        logits.stride(0),
        temperature,
        streams,
        positions,
        token_hash,
        peaks,
        scores,
        winners,
        VOCAB_SIZE=vocab_size,
        BLOCK=_BLOCK,
        MIN_TEMPERATURE=_MIN_TEMPERATURE,
    )
    _final[(rows,)](
        temperature,
        peaks,
        scores,
        winners,
        tokens,
        PARTS=parts,
        PARTS_PADDED=triton.next_power_of_2(parts),
        BAD=BAD_TOKEN,
        MIN_TEMPERATURE=_MIN_TEMPERATURE,
    )
    return tokens


def reference(logits: Tensor, temperature: Tensor, streams: Tensor, positions: Tensor, token_hash: Tensor) -> Tensor:
    key = _mix64(streams + positions)
    high, low = _logical_shift(key, 32), key & 0xFFFFFFFF
    x = token_hash.long() & 0xFFFFFFFF ^ high[:, None]
    x ^= x >> 16
    x = (x * 0x7FEB352D + low[:, None]) & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    u = ((x & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-32).clamp(max=1.0 - 2.0**-24)
    best = logits.amax(1, keepdim=True)
    scaled = (logits - best) / temperature[:, None].clamp(min=_MIN_TEMPERATURE)
    scores = scaled.clamp(min=-80.0).exp() / -torch.log1p(-u)
    scores = torch.where(temperature[:, None] > 0, scores, logits)
    return torch.where(best.isfinite().squeeze(1), scores.max(1).indices, BAD_TOKEN)


def _mix64(x: Tensor) -> Tensor:
    """engine.noise.mix64 on int64, whose products wrap."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _logical_shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _logical_shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


@triton.jit
def _row_key(stream, position):
    """engine.noise.row_key: two words of 32 bits."""
    x = (stream + position).to(tl.uint64, bitcast=True)
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 32).to(tl.uint32), x.to(tl.uint32)


@triton.jit
def _exponential(token_hash, high, low):
    """engine.noise.TokenNoise.exponential. log1p is written out: the card's logarithm is too coarse near 1."""
    x = token_hash.to(tl.uint32, bitcast=True) ^ high
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + low
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    u = (x & 0x7FFFFFFF).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2**-31, 2**-32
    u = tl.minimum(u, 0.99999994)
    # -log(1 - u) = 2 atanh(u / (2 - u)), by its series where that converges fast.
    s = u / (2.0 - u)
    t = s * s
    series = 1.0 / 17 * t + 1.0 / 15
    series = series * t + 1.0 / 13
    series = series * t + 1.0 / 11
    series = series * t + 1.0 / 9
    series = series * t + 1.0 / 7
    series = series * t + 1.0 / 5
    series = series * t + 1.0 / 3
    small = 2.0 * (s + s * t * series)
    return tl.where(u <= 0.5, small, -tl.log(1.0 - u))


@triton.jit
def _race(
    logits,
    row_stride,
    temperature,
    streams,
    positions,
    token_hash,
    peaks,
    scores,
    winners,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB_SIZE
    logit = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    peak = tl.max(logit, 0)
    heat = tl.load(temperature + row)
    if heat > 0:
        high, low = _row_key(tl.load(streams + row), tl.load(positions + row))
        noise = _exponential(tl.load(token_hash + token, mask=inside, other=0), high, low)
        # A part of nothing but -inf has a peak that cannot be subtracted; its scores are of no account.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp(tl.maximum((logit - base) / tl.maximum(heat, MIN_TEMPERATURE), -80.0))
        score = tl.where(inside, weight / noise, -1.0)
    else:
        score = logit
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCAB_SIZE), 0)
    unusable = tl.sum(((logit != logit) | (logit == float("inf"))).to(tl.int32), 0) > 0
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, tl.where(unusable, float("inf"), peak))
    tl.store(scores + at, best)
    tl.store(winners + at, winner)


@triton.jit
def _final(
    temperature,
    peaks,
    scores,
    winners,
    tokens,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BAD: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    inside = part < PARTS
    peak = tl.load(peaks + row * PARTS + part, mask=inside, other=float("-inf"))
    score = tl.load(scores + row * PARTS + part, mask=inside, other=float("-inf"))
    winner = tl.load(winners + row * PARTS + part, mask=inside, other=0)
    highest = tl.max(peak, 0)
    heat = tl.load(temperature + row)
    if heat > 0:
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        faded = tl.exp(tl.maximum((peak - finite) / tl.maximum(heat, MIN_TEMPERATURE), -80.0))
        score = tl.where(peak == float("-inf"), -1.0, score * faded)
    best = tl.max(score, 0)
    token = tl.min(tl.where(inside & (score == best), winner, 2147483647), 0)
    usable = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(tokens + row, tl.where(usable, token, BAD).to(tl.int64))
