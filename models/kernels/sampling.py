"""The next token of every row of a step: bias, penalties, temperature, truncations and the draw, all on the device.

The draw is the exponential race of engine.sampler with the counter-based noise of engine.noise: argmax of p_i / E_i,
where E_i follows from (seed, position, token id) alone. Everything is read on the device, so that the draw can be
part of a captured step, and its tokens are those of the sampler on a CPU but for near-ties: a score may differ by
about two parts in a million.

Three launches. A row is cut into parts, so that a lone one still fills the card, and each part finds its winner
relative to its own largest logit (_race). A second kernel puts the parts on one scale and takes the best (_final).
Truncated rows get from these their largest logit; models.kernels.truncation then finds what they keep and draws from
it, and returns at once where no row is truncated.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import truncation
from models.kernels.adjusted import (
    MAX_COUNT,
    TEMPERATURE,
    TRUNCATED,
    adjusted_logits,
    int_field,
    log2_noise,
    log2_scale,
    own_token,
    row_key,
    single_field,
)
from models.kernels.row_settings import RowSettings
from models.kernels.sampling_reference import BAD_TOKEN, reference

__all__ = ["BAD_TOKEN", "reference", "sample"]
_BLOCK = 2048


def sample(
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
    """int64 [R]: the lowest id among those of the highest score; BAD_TOKEN for a row with NaN, +inf or only -inf.

    logits      [R, V] of any floating type, last dimension contiguous
    rows        int64 [R], which rows of the settings
    positions   int64 [R], the index in the sequence of the token to be drawn
    token_hash  int32 [V], the token ids' hashes (engine.noise), all different
    input_ids   int64 [R], the token before it. Given, bias and penalties apply, and it is added to the counts where it
                is output; None: the logits have them already
    truncates   False: no row of the step is truncated
    out         int64 [R] contiguous, to be filled and returned; None: a new tensor
    """
    count, vocab_size = logits.shape
    device = logits.device
    assert logits.stride(1) == 1 and token_hash.shape == (vocab_size,)
    tokens = torch.empty(count, dtype=torch.int64, device=device) if out is None else out
    assert tokens.shape == (count,) and tokens.dtype == torch.int64 and tokens.is_contiguous()
    if not count:
        return tokens
    adjusts = input_ids is not None
    assert not adjusts or settings.counts is not None
    parts = triton.cdiv(vocab_size, _BLOCK)
    peaks, scores = torch.empty(2, count, parts, dtype=torch.float32, device=device)
    winners = torch.empty(count, parts, dtype=torch.int32, device=device)
    space = truncation.Workspace.empty(count, device)
    # Without adjustments these are not read.
    words = settings.words
    biases = (settings.bias_ids, settings.bias_values, settings.bias_until) if adjusts else (words, words, words)
    counts = settings.counts if adjusts else words
    inputs = input_ids if adjusts else positions
    what = (logits, logits.stride(0), words, rows, positions, inputs, *biases, counts)
    _race[(count, parts)](
        *what, token_hash, peaks, scores, winners, VOCAB_SIZE=vocab_size, BLOCK=_BLOCK, ADJUSTS=adjusts
    )
    _final[(count,)](
        words, rows, positions, inputs, counts, peaks, scores, winners, tokens, space.peaks, space.arrivals,
        VOCAB_SIZE=vocab_size, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts), BAD=BAD_TOKEN,
        PROGRAMS=space.arrivals.shape[0], ADJUSTS=adjusts,
    )  # fmt: skip
    if truncates:
        truncation.draw_truncated(what, token_hash, space, tokens, adjusts)
    return tokens


@triton.jit
def _race(
    logits, row_stride, words, rows, positions, input_ids, bias_ids, bias_values, bias_until, counts,
    token_hash, peaks, scores, winners,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, ADJUSTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index, position = tl.load(rows + row), tl.load(positions + row)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB_SIZE
    last = own_token(words, index, position, tl.load(input_ids + row))
    logit = adjusted_logits(
        logits + row * row_stride, token, inside, words, index, position, last,
        bias_ids, bias_values, bias_until, counts, VOCAB_SIZE, ADJUSTS,
    )  # fmt: skip
    peak = tl.max(logit, 0)
    # A maximum passes NaN by; without its sign it is the largest of all bits.
    unusable = tl.max(logit.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) > 0x7F800000
    heat = single_field(words, index, TEMPERATURE)
    if (heat > 0) & (int_field(words, index, TRUNCATED) == 0):
        high, low = row_key(words, index, position)
        noise = log2_noise(tl.load(token_hash + token, mask=inside, other=0), high, low)
        # A part of nothing but -inf has a peak that cannot be subtracted; its scores are of no account.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        score = (logit - base) * log2_scale(heat) - noise
    else:
        score = logit
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, VOCAB_SIZE), 0)
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, tl.where(unusable, float("inf"), peak))
    tl.store(scores + at, best)
    tl.store(winners + at, winner)


@triton.jit
def _final(
    words, rows, positions, input_ids, counts, peaks, scores, winners, tokens, row_peaks, arrivals,
    VOCAB_SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BAD: tl.constexpr,
    PROGRAMS: tl.constexpr, ADJUSTS: tl.constexpr,
):  # fmt: skip
    """Also counts the step's own token, which _race counted on the fly, and prepares what truncation reads: of each
    row its largest logit, NaN where it needs no more, and that no program has arrived anywhere."""
    row = tl.program_id(0).to(tl.int64)
    index, position = tl.load(rows + row), tl.load(positions + row)
    part = tl.arange(0, PARTS_PADDED)
    inside = part < PARTS
    peak = tl.load(peaks + row * PARTS + part, mask=inside, other=float("-inf"))
    score = tl.load(scores + row * PARTS + part, mask=inside, other=float("-inf"))
    winner = tl.load(winners + row * PARTS + part, mask=inside, other=VOCAB_SIZE)
    highest = tl.max(peak, 0)
    usable = (highest > float("-inf")) & (highest < float("inf"))
    truncated = int_field(words, index, TRUNCATED) != 0
    heat = single_field(words, index, TEMPERATURE)
    if (heat > 0) & (truncated == 0):
        finite = tl.where(usable, highest, 0.0)
        score = tl.where(peak == float("-inf"), float("-inf"), score + (peak - finite) * log2_scale(heat))
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, winner, VOCAB_SIZE), 0)
    tl.store(tokens + row, tl.where(usable, token, BAD).to(tl.int64))
    tl.store(row_peaks + row, tl.where(usable & truncated, highest, float("nan")))
    if row == 0:
        tl.store(arrivals + tl.arange(0, PROGRAMS), tl.zeros([PROGRAMS], tl.int32))
    if ADJUSTS:
        last = own_token(words, index, position, tl.load(input_ids + row))
        if last >= 0:
            at = counts + index * VOCAB_SIZE + last
            word = tl.load(at)
            tl.store(at, tl.where((word & MAX_COUNT) < MAX_COUNT, word + 1, word).to(tl.int16))
