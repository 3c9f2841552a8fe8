"""Noise for sampling that depends on nothing but (seed, position, token id).

A generator's stream would tie a request's tokens to whatever else is drawn in the same step. Counter-based
noise (the idea of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) is a hash of its
coordinates instead: a request meets the same numbers alone, in a batch and after preemption.

The row key is splitmix64 of (seed, position), on the host. Its two halves then key a 32-bit finalizer
("lowbias32", found by Chris Wellons' hash-prospector) over the token ids, on the device: 32-bit lanes cost
half as much as 64-bit ones, and this runs once per vocabulary entry.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_MASK64 = 2**64 - 1

Word = TypeVar("Word", int, np.ndarray)


def mix64(x: Word) -> Word:
    """splitmix64's step and finalizer: a bijection of 64-bit words (int or uint64 array) with good avalanche."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def row_key(stream: int, position: int) -> tuple[int, int]:
    """The two int32 that key a row's noise. stream is mix64(seed), computed once per request."""
    key = mix64((stream + position) & _MASK64)
    return _int32(key >> 32), _int32(key & 0xFFFFFFFF)


def fork_seed(seed: int, index: int) -> int:
    """The seed, 0 <= seed < 2**63, of a request's continuation number `index`; the first keeps the request's own."""
    return seed if index == 0 else mix64(seed ^ mix64(index)) >> 1


def _int32(word: int) -> int:
    """The two's complement integer with these 32 bits: torch multiplies no unsigned ones."""
    return word - 2**32 if word >> 31 else word


def _token_hashes(vocab_size: int) -> np.ndarray:
    """uint32 [vocab_size], all different: two tokens of one hash would always race with the same noise, and the less
    likely one could not be drawn. (Of 32 bits 151,936 random ones are expected to meet 2.7 times.)"""
    ids = np.arange(vocab_size, dtype=np.uint64)
    mixed = mix64(ids)
    while True:
        hashes = mixed.astype(np.uint32)
        later = np.setdiff1d(ids, np.unique(hashes, return_index=True)[1])
        if not len(later):
            return hashes
        mixed[later] = mix64(mixed[later])


class TokenNoise:
    """Standard exponential variates, one per (row key, token id)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.token_hash = torch.from_numpy(_token_hashes(vocab_size).view(np.int32)).to(device)

    def exponential(self, keys: Tensor) -> Tensor:
        """float32 [N, vocabulary] of Exp(1) variates for row keys int32 [N, 2].

        They lie in [2**-32, 17] and are fine grained towards zero, the end that decides an exponential race.
        """
        x = self.token_hash ^ keys[:, :1]
        x ^= (x >> 16) & 0xFFFF  # a logical shift: torch's keeps the sign
        x *= _int32(0x7FEB352D)
        x += keys[:, 1:]
        x ^= (x >> 15) & 0x1FFFF
        x *= _int32(0x846CA68B)
        x ^= (x >> 16) & 0xFFFF
        x &= 0x7FFFFFFF
        # -u in (-1, 0); the clamp keeps a u that float32 rounds up to 1 from giving infinity.
        minus_u = x.to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-(1.0 - 2.0**-24))
        return minus_u.log1p_().neg_()
