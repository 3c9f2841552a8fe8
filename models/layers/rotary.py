"""Rotary position embedding (Su et al., arXiv:2104.09864) and the ways of stretching it to longer contexts.

The formulas are those of transformers' modeling_rope_utils, in the same order of operations, so that the angles
are equal to the last bit of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.batch import ForwardBatch
from models.config import ModelConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions, from a table built once.

    forward -> (cos, sin), each [T, 1, head_dim] in the model's dtype. sin is negative in its first half, so that
    a rotation is x * cos + swapped_halves(x) * sin (see rotate).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inv_freq, self.attention_scaling = rope_frequencies(config)
        cos, sin = _table(torch.arange(config.max_position_embeddings), inv_freq, self.attention_scaling)
        self.register_buffer("cos", cos.to(device, dtype), persistent=False)
        self.register_buffer("sin", sin.to(device, dtype), persistent=False)
        self.config = config
        self.dynamic = (config.rope_scaling or {}).get("rope_type") == "dynamic"

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.dynamic and max(batch.context_lens) > self.config.max_position_embeddings:
            return self._beyond(batch)
        return self.cos.index_select(0, batch.positions), self.sin.index_select(0, batch.positions)

    def _beyond(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Dynamic NTK past the trained length: every sequence's base follows from its own length in this step."""
        rows = [_dynamic(self.config, length)[0] for length in batch.context_lens]
        inv_freq = torch.stack(rows).repeat_interleave(torch.tensor(batch.query_lens), dim=0)
        cos, sin = _table(batch.positions.cpu(), inv_freq, self.attention_scaling)
        return cos.to(self.cos), sin.to(self.sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, head_dim] by the angles of RotaryEmbedding; a new tensor."""
    half = x.shape[-1] // 2
    # Two roundings, as the reference has them; a fused multiply-add would differ in the last bit.
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1).mul_(sin)
    return swapped.add_(x * cos)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(inverse frequencies fp32 [head_dim / 2], factor on cos and sin); ValueError for an unknown rope type."""
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    try:
        return ROPE_TYPES[kind](config)
    except KeyError as error:
        raise ValueError(f"rope type {kind!r} needs {error.args[0]!r} in rope_scaling, which has {scaling}") from error


def _table(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """positions [T], inv_freq [D/2] or [T, D/2] -> cos, sin fp32 [T, 1, D] with sin's first half negated."""
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def _inverse(config: ModelConfig, base: float) -> Tensor:
    dim = config.head_dim
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(config: ModelConfig) -> tuple[Tensor, float]:
    return _inverse(config, config.rope_theta), 1.0


def _linear(config: ModelConfig) -> tuple[Tensor, float]:
    return _inverse(config, config.rope_theta) / _factor(config), 1.0


def _dynamic(config: ModelConfig, length: int = 0) -> tuple[Tensor, float]:
    """NTK-aware scaling by the current length; no effect up to max_position_embeddings."""
    trained, dim, factor = config.max_position_embeddings, config.head_dim, _factor(config)
    stretch = factor * max(length, trained) / trained - (factor - 1)
    return _inverse(config, config.rope_theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(config: ModelConfig) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths divided by factor, short ones kept, a smooth step between."""
    scaling = _scaling(config)
    factor, low, high = _factor(config), scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    inv_freq = _inverse(config, config.rope_theta)
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(between, blended, scaled), 1.0


def _yarn(config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv:2309.00071)."""
    scaling, dim, base = _scaling(config), config.head_dim, config.rope_theta
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling["factor"] if scaling["factor"] is not None else config.max_position_embeddings / trained
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequency = base ** (torch.arange(0, dim, 2).float() / dim)
    attention *= scaling.get("attention_multiplier", 1.0)
    return 1.0 / (factor * frequency) * (1 - kept) + 1.0 / frequency * kept, float(attention)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _factors(config: ModelConfig) -> tuple[Tensor, float]:
    """A divisor per frequency, as GGUF files store llama3's scaling (tensor rope_freqs.weight)."""
    divisors = torch.tensor(_scaling(config)["factors"], dtype=torch.float32)
    return _inverse(config, config.rope_theta) / divisors, 1.0


def _factor(config: ModelConfig) -> float:
    if (factor := _scaling(config).get("factor")) is None:
        raise KeyError("factor")
    return factor


def _scaling(config: ModelConfig) -> dict[str, Any]:
    assert config.rope_scaling is not None
    return config.rope_scaling


ROPE_TYPES: dict[str, Callable[[ModelConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _factors,
}
