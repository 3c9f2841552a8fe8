"""The draw of models.kernels.sampling in plain PyTorch: adjust, mask what the truncations cut off, race."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels import row_settings
from models.kernels.row_settings import IN_PROMPT, MAX_BIASES, MAX_COUNT, RowSettings

BAD_TOKEN = -1
_MIN_TEMPERATURE = 1e-6


def reference(
    logits: Tensor,
    settings: RowSettings,
    rows: Tensor,
    positions: Tensor,
    token_hash: Tensor,
    *,
    input_ids: Tensor | None = None,
    truncates: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    logits = logits.float()
    if input_ids is not None:
        logits = _penalized(_biased(logits, settings, rows, positions), settings, rows, positions, input_ids)
    heat = settings.field(row_settings.TEMPERATURE, torch.float32)[rows][:, None]
    best = logits.amax(1, keepdim=True)
    weights = ((logits - best) / heat.clamp(min=_MIN_TEMPERATURE)).clamp(min=-80.0).exp()
    scores = weights / _noise(settings.field(row_settings.STREAM, torch.int64)[rows] + positions, token_hash)
    if truncates:
        scores = torch.where(_kept(logits, weights, settings, rows), scores, 0.0)
    scores = torch.where(heat > 0, scores, logits)
    tokens = torch.where(best.isfinite().squeeze(1), scores.max(1).indices, BAD_TOKEN)
    return tokens if out is None else out.copy_(tokens)


def _biased(logits: Tensor, settings: RowSettings, rows: Tensor, positions: Tensor) -> Tensor:
    assert settings.bias_ids is not None and settings.bias_values is not None and settings.bias_until is not None
    counts = settings.field(row_settings.NUM_BIASES, torch.int32)[rows]
    active = torch.arange(MAX_BIASES, device=logits.device) < counts[:, None]
    active &= positions[:, None] < settings.bias_until[rows]
    values = torch.where(active, settings.bias_values[rows], 0.0)
    return logits.scatter_add(1, settings.bias_ids[rows].long(), values)


def _penalized(logits: Tensor, settings: RowSettings, rows: Tensor, positions: Tensor, input_ids: Tensor) -> Tensor:
    """The step's own token is added to the counts first."""
    assert settings.counts is not None
    penalized = settings.field(row_settings.PENALIZED, torch.int32)[rows] != 0
    own = penalized & (positions > settings.field(row_settings.PROMPT_TOKENS, torch.int32)[rows])
    settings.counts[rows[own], input_ids[own]] += 1
    words = settings.counts[rows].int() & (IN_PROMPT | MAX_COUNT)
    count = words & MAX_COUNT
    repetition, presence, frequency = (
        settings.field(place, torch.float32)[rows][:, None]
        for place in (row_settings.REPETITION, row_settings.PRESENCE, row_settings.FREQUENCY)
    )
    changed = torch.where(logits < 0, logits * repetition, logits / repetition)
    changed = changed - (presence * (count > 0) + frequency * count)
    return torch.where(penalized[:, None] & (words != 0), changed, logits)


def _kept(logits: Tensor, weights: Tensor, settings: RowSettings, rows: Tensor) -> Tensor:
    """bool [R, V]: what top_k, then top_p of that, and min_p keep; all where a row is not truncated."""
    vocab_size = logits.shape[1]
    top_k = settings.field(row_settings.TOP_K, torch.int32)[rows][:, None]
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    top_p = settings.field(row_settings.TOP_P, torch.float64)[rows][:, None]
    order = logits.sort(dim=1, descending=True, stable=True).indices
    within = torch.arange(vocab_size, device=logits.device) < top_k
    mass = weights.gather(1, order).double() * within
    before = mass.cumsum(1) - mass
    kept = within & ((before < top_p * mass.sum(1, keepdim=True)) | (top_p >= 1.0))
    kept = torch.zeros_like(kept).scatter_(1, order, kept)
    kept &= weights >= settings.field(row_settings.MIN_P, torch.float32)[rows][:, None]
    return kept | (settings.field(row_settings.TRUNCATED, torch.int32)[rows][:, None] == 0)


def _noise(words: Tensor, token_hash: Tensor) -> Tensor:
    """engine.noise.TokenNoise.exponential, float32 [R, V], for int64 [R] of stream + position."""
    key = _mix64(words)
    high, low = _logical_shift(key, 32), key & 0xFFFFFFFF
    x = token_hash.long() & 0xFFFFFFFF ^ high[:, None]
    x ^= x >> 16
    x = (x * 0x7FEB352D + low[:, None]) & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    u = ((x & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-u)


def _mix64(x: Tensor) -> Tensor:
    """engine.noise.mix64 on int64, whose products wrap."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _logical_shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _logical_shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)
