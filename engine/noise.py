"""Noise for sampling that depends on nothing but (seed, position, token id).

A generator's stream would tie a request's tokens to whatever else is drawn in the same step. Counter-based
noise (the idea of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) is a hash of its
coordinates instead: a request meets the same numbers alone, in a batch, after preemption and on any path
through the sampler.

The row key is splitmix64 of (seed, position). Its two halves then key a 32-bit finalizer ("lowbias32", found
by Chris Wellons' hash-prospector) over the token ids, because 32-bit lanes cost half as much as 64-bit ones
and this runs once per vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int, bits: int) -> int:
    """The two's complement integer with these bits: torch has no wrapping unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


def mix64(x: Tensor) -> Tensor:
    """splitmix64's step and finalizer on int64 of any shape: a bijection with good avalanche."""
    x = x + _signed(_GOLDEN, 64)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _low_int32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32, without relying on how a narrowing cast overflows."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


class TokenNoise:
    """Standard exponential variates, one per (row key, token id)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._token_hash = _low_int32(mix64(torch.arange(vocab_size, dtype=torch.int64, device=device)))

    def exponential(self, stream: Tensor, position: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """float32 [N, K] of Exp(1) variates for token_ids int64 [N, K]; None means every token, K = vocabulary.

        stream int64 [N] is mix64(seed), which a caller computes once per request; position is int64 [N]. The
        values lie in [2**-32, 17]: fine grained towards zero, which is the end that decides an exponential race.
        """
        key = mix64(stream + position)[:, None]
        tokens = self._token_hash[None] if token_ids is None else self._token_hash[token_ids]
        x = tokens ^ _low_int32(key)
        x ^= (x >> 16) & 0xFFFF
        x *= _signed(0x7FEB352D, 32)
        x += _low_int32(key >> 32)
        x ^= (x >> 15) & 0x1FFFF
        x *= _signed(0x846CA68B, 32)
        x ^= (x >> 16) & 0xFFFF
        x &= 0x7FFFFFFF
        # -u in (-1, 0); the clamp keeps a u that float32 rounds up to 1 from giving infinity.
        minus_u = x.to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-(1.0 - 2.0**-24))
        return minus_u.log1p_().neg_()
