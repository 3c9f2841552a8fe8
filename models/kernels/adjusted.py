"""Shared by the kernels of the draw: a row's logits with bias and penalties, and the noise of the race.

Scores of the race are compared by their logarithms to base 2: log2(p_i / E_i) takes one logarithm where the quotient
takes an exponential and a division, and the winner is the same but for near-ties of about two parts in a million.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import os

import triton
import triton.language as tl

from models.kernels import row_settings

WORDS = tl.constexpr(row_settings.WORDS)
STREAM, TOP_P = tl.constexpr(row_settings.STREAM), tl.constexpr(row_settings.TOP_P)
TEMPERATURE, MIN_P = tl.constexpr(row_settings.TEMPERATURE), tl.constexpr(row_settings.MIN_P)
REPETITION, PRESENCE = tl.constexpr(row_settings.REPETITION), tl.constexpr(row_settings.PRESENCE)
FREQUENCY, TOP_K = tl.constexpr(row_settings.FREQUENCY), tl.constexpr(row_settings.TOP_K)
NUM_BIASES, PENALIZED = tl.constexpr(row_settings.NUM_BIASES), tl.constexpr(row_settings.PENALIZED)
PROMPT_TOKENS, TRUNCATED = tl.constexpr(row_settings.PROMPT_TOKENS), tl.constexpr(row_settings.TRUNCATED)
MAX_BIASES, MAX_COUNT = tl.constexpr(row_settings.MAX_BIASES), tl.constexpr(row_settings.MAX_COUNT)
LOG2_E = tl.constexpr(1.4426950408889634)
MIN_HEAT = tl.constexpr(1e-6)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def int_field(words, index, place: tl.constexpr):
    return tl.load(words.to(tl.pointer_type(tl.int32)) + index * 2 * WORDS + place)


@triton.jit
def single_field(words, index, place: tl.constexpr):
    return tl.load(words.to(tl.pointer_type(tl.float32)) + index * 2 * WORDS + place)


@triton.jit
def log2_scale(heat):
    """What differences of logits are multiplied with: a temperature and the change of base."""
    return 1.0 / tl.maximum(heat, MIN_HEAT) * LOG2_E


@triton.jit
def adjusted_logits(
    logits, token, inside, words, index, position, last, bias_ids, bias_values, bias_until, counts, vocab_size,
    ADJUSTS: tl.constexpr,
):  # fmt: skip
    """float32, the logits of `token` with bias and penalties; -inf outside. last: the id of the step's own token, -1
    where it is not to be counted: it counts as output, though `counts` may not hold it yet.

    Every kernel must come to the same bits, as they compare what they compute. So the division is exact and the
    sums are fused where they are written so.
    """
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    if ADJUSTS:
        for entry in range(int_field(words, index, NUM_BIASES)):
            at = index * MAX_BIASES + entry
            value = tl.where(position < tl.load(bias_until + at), tl.load(bias_values + at), 0.0)
            logit = tl.where(token == tl.load(bias_ids + at), logit + value, logit)
        if int_field(words, index, PENALIZED) != 0:
            word = tl.load(counts + index * vocab_size + token, mask=inside, other=0).to(tl.int32)
            count = (word & MAX_COUNT) + (token == last).to(tl.int32)
            repetition = single_field(words, index, REPETITION)
            repeated = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, tl.zeros_like(logit) + repetition))
            presence = tl.where(count > 0, single_field(words, index, PRESENCE), 0.0)
            penalty = tl.fma(single_field(words, index, FREQUENCY), count.to(tl.float32), presence)
            logit = tl.where((word != 0) | (count > 0), repeated - penalty, logit)
    return logit


@triton.jit
def own_token(words, index, position, input_id):
    """`last` of adjusted_logits."""
    counted = (int_field(words, index, PENALIZED) != 0) & (position > int_field(words, index, PROMPT_TOKENS))
    return tl.where(counted, input_id, -1)


@triton.jit
def row_key(words, index, position):
    """engine.noise.row_key: two words of 32 bits."""
    x = (tl.load(words + index * WORDS + STREAM) + position).to(tl.uint64, bitcast=True)
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 32).to(tl.uint32), x.to(tl.uint32)


@triton.jit
def _log2(x):
    """The card's own instruction, one where tl.log2 takes thirty; of what is not subnormal."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2_noise(token_hash, high, low):
    """log2 of engine.noise.TokenNoise.exponential over log(2). The card's logarithm is too coarse near 1, so
    -log2(1 - u) is u times a polynomial there: minimax of degree 5 on [0, 1/4], within 4e-8."""
    x = token_hash.to(tl.uint32, bitcast=True) ^ high
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + low
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    u = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2**-31, 2**-32
    u = tl.minimum(u, 0.99999994)
    series = 0.33864363490526256 * 1.4426950408889634
    series = series * u + 0.1446311543174185 * 1.4426950408889634
    series = series * u + 0.2576441951029148 * 1.4426950408889634
    series = series * u + 0.3328703489444567 * 1.4426950408889634
    series = series * u + 0.5000100812144557 * 1.4426950408889634
    series = series * u + 0.9999999648878728 * 1.4426950408889634
    return _log2(tl.where(u <= 0.25, u * series, -_log2(1.0 - u)))
