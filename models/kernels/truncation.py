"""The draw of rows with top_k, top_p or min_p, without a sort of the vocabulary and without the host.

What is kept is a prefix of the tokens ranked by logit, then id: those before which fewer than top_k tokens and less
than top_p of the mass stand. Its end does not depend on the noise. So first the lowest logit that is kept is found by
bisection, on logits written as integers of the same order: a pass over the row counts and weighs the tokens above
each of eight pivots, of which the next interval follows, and notes the least and the largest key within the interval,
which end the search early: bf16 logits have few values. The first pass looks near the largest logit, each later one
finds 3 bits: usually 4 or 5 passes, at most 12. Where
top_p refers to what top_k left, that is found first. Then the tokens tied at that logit are counted, lowest id first,
and a last pass races those that are kept; blocks that keep nothing draw no noise.

One launch serves all rows. Programs form teams of one size, as large as the number of truncated rows allows; a team
works on one row at a time, each member on a range of ids, and its members wait for one another between passes.
They must all be resident at a time, so there are at most as many programs as the card has multiprocessors.

Masses are summed in float64, so that how a row is split does not show. A token at the boundary of a nucleus is decided
as on a CPU unless the mass before it comes within about 1e-6 of the limit, relative to it: that is how far two
implementations of exp differ, as the arguments are rounded to float32.
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.adjusted import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
    adjusted_logits,
    int_field,
    log2_noise,
    log2_scale,
    row_key,
    single_field,
)

_BLOCK = 1024
_WARPS = 16
_MAX_TEAM = 64
_FEW_ROWS = 1024  # one kernel serves as many, so that none is compiled while requests wait
PIVOTS = tl.constexpr(8)
LOWEST = tl.constexpr(-(2**31))  # below the key of every logit
BELOW_ALL = tl.constexpr(-2139095042)  # one less than the key of -inf
MIN_LOG2_WEIGHT = tl.constexpr(-115.41560327111707)  # of e**-80, the sampler's floor


@dataclass(slots=True)
class Workspace:
    """What programs tell one another; P programs, [2, ...] in turns.

    peaks     float32 [R], a row's largest logit; NaN where it is not to be truncated
    arrivals  int32 [P], per team how often members came to a meeting; zero before the launch
    above, masses  int32, float64 [2, P, PIVOTS]: tokens above each pivot, and their weights
    ranges    int32 [2, P, 2], the least and the largest key
    scores, winners  float32, int32 [2, P]
    """

    peaks: Tensor
    arrivals: Tensor
    above: Tensor
    masses: Tensor
    ranges: Tensor
    scores: Tensor
    winners: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Workspace:
        count = _num_programs(device)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        pivots = PIVOTS.value
        return cls(
            new(rows, dtype=torch.float32), new(count), new(2, count, pivots),
            new(2, count, pivots, dtype=torch.float64), new(2, count, 2), new(2, count, dtype=torch.float32),
            new(2, count),
        )  # fmt: skip


@functools.cache
def _num_programs(device: torch.device) -> int:
    """A power of two. Elsewhere than on a card programs run one after the other, and none may wait for another."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 ** (processors.bit_length() - 1)


def draw_truncated(what: tuple[Any, ...], token_hash: Tensor, space: Workspace, tokens: Tensor, adjusts: bool) -> None:
    """Write the tokens of the rows that space.peaks names. what: the arguments that _race of models.kernels.sampling
    begins with."""
    rows, vocab_size = what[0].shape
    programs = space.arrivals.shape[0]
    _truncated[(programs,)](
        *what, token_hash, space.peaks, space.arrivals, space.above, space.masses, space.ranges, space.scores,
        space.winners, tokens, rows, VOCAB_SIZE=vocab_size, ROWS_PADDED=max(_FEW_ROWS, triton.next_power_of_2(rows)),
        PROGRAMS=programs, MAX_TEAM=min(_MAX_TEAM, programs), BLOCK=_BLOCK, ADJUSTS=adjusts, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _key(logit):
    """int32 of the order of float32 values; -0.0 and 0.0 are one."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(logit, peak, scale):
    return tl.exp2(tl.maximum((logit - peak) * scale, MIN_LOG2_WEIGHT))


@triton.jit
def _meet(arrivals, team, meeting, members):
    """Wait until every member has come to this meeting; what they stored before can then be read."""
    tl.debug_barrier()
    if members > 1:
        arrived = tl.atomic_add(arrivals + team, 1, sem="acq_rel") + 1
        while arrived < (meeting + 1) * members:
            arrived = tl.atomic_add(arrivals + team, 0, sem="acq_rel")
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows"])
def _truncated(
    logits, row_stride, words, rows, positions, _input_ids, bias_ids, bias_values, bias_until, counts,
    token_hash, peaks, arrivals, above, masses, ranges, scores, winners, tokens, num_rows,
    VOCAB_SIZE: tl.constexpr, ROWS_PADDED: tl.constexpr, PROGRAMS: tl.constexpr, MAX_TEAM: tl.constexpr,
    BLOCK: tl.constexpr, ADJUSTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    candidate = tl.arange(0, ROWS_PADDED)
    row_peak = tl.load(peaks + candidate, mask=candidate < num_rows, other=float("nan"))
    asked = (row_peak == row_peak).to(tl.int32)
    num_asked = tl.sum(asked, 0)
    members = 1
    while (members * 2 <= MAX_TEAM) & (members * 2 * num_asked <= PROGRAMS):
        members *= 2
    team, member = program // members, program % members
    share = tl.cdiv(tl.cdiv(VOCAB_SIZE, members), BLOCK) * BLOCK
    first, end = member * share, tl.minimum((member + 1) * share, VOCAB_SIZE)
    place = tl.cumsum(asked, 0) - 1
    pivot, mate, lane = tl.arange(0, PIVOTS), tl.arange(0, MAX_TEAM), tl.arange(0, BLOCK)
    is_mate = mate < members
    meeting = 0
    for turn in range(team, num_asked, PROGRAMS // members):
        row = tl.sum(tl.where((place == turn) & (asked != 0), candidate, 0), 0).to(tl.int64)
        index, position, peak = tl.load(rows + row), tl.load(positions + row), tl.load(peaks + row)
        heat = single_field(words, index, TEMPERATURE)
        scale = log2_scale(heat)
        top_k = int_field(words, index, TOP_K)
        top_p = tl.load(words.to(tl.pointer_type(tl.float64)) + index * WORDS + TOP_P)
        last = -1  # the row's own token: by now _final has counted it
        line = logits + row * row_stride

        # The lowest key that is kept lies in (low, high]; the tokens above `high` are num_above of above_mass.
        low = tl.full((), BELOW_ALL, tl.int64)
        high = _key(peak).to(tl.int64)
        num_above, num_from_low = tl.full((), 0, tl.int32), tl.full((), VOCAB_SIZE, tl.int32)
        above_mass, total = tl.full((), 0.0, tl.float64), tl.full((), -1.0, tl.float64)
        passes = 0
        for by_mass in range(2):
            wanted = tl.where(by_mass == 1, top_p < 1.0, top_k > 0)
            if (by_mass == 1) & wanted & (top_k > 0):
                # top_p is of the mass within top_k, and its boundary not below that of top_k.
                tied = tl.minimum(top_k - num_above, num_from_low - num_above)
                total = above_mass + tied * _weight(_value(high.to(tl.int32)), peak, scale).to(tl.float64)
                low = high - 1
                high = _key(peak).to(tl.int64)
                num_above, above_mass = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
            while wanted & (high - low > 1):
                pivots = low + (high - low) * pivot // PIVOTS
                if passes == 0:
                    # Most boundaries are near the largest logit: at 1/2, 1, 2, ..., 32 below it, in units of the heat.
                    near = _key(peak - heat * tl.exp2(6.0 - pivot)).to(tl.int64)
                    pivots = tl.where(pivot == 0, low, tl.minimum(near, high - 1))
                passes += 1
                more = tl.zeros([PIVOTS, BLOCK], tl.int32)
                mass = tl.zeros([PIVOTS, BLOCK], tl.float64)
                least, most = tl.full([BLOCK], 2147483647, tl.int32), tl.full([BLOCK], LOWEST, tl.int32)
                for start in range(first, end, BLOCK):
                    token = start + lane
                    inside = token < end
                    logit = adjusted_logits(
                        line, token, inside, words, index, position, last,
                        bias_ids, bias_values, bias_until, counts, VOCAB_SIZE, ADJUSTS,
                    )  # fmt: skip
                    key = tl.where(inside, _key(logit), LOWEST)
                    if tl.max(key, 0) > low.to(tl.int32):
                        weight = _weight(logit, peak, scale).to(tl.float64)
                        beyond = key[None, :] > pivots.to(tl.int32)[:, None]
                        more += beyond.to(tl.int32)
                        mass += tl.where(beyond, weight[None, :], 0.0)
                        between = (key > low.to(tl.int32)) & (key <= high.to(tl.int32))
                        least = tl.minimum(least, tl.where(between, key, 2147483647))
                        most = tl.maximum(most, tl.where(between, key, LOWEST))
                slot = (meeting % 2) * PROGRAMS + program
                tl.store(above + slot * PIVOTS + pivot, tl.sum(more, 1))
                tl.store(masses + slot * PIVOTS + pivot, tl.sum(mass, 1))
                tl.store(ranges + slot * 2, tl.min(least, 0))
                tl.store(ranges + slot * 2 + 1, tl.max(most, 0))
                _meet(arrivals, team, meeting, members)
                mates = (meeting % 2) * PROGRAMS + team * members + mate
                meeting += 1
                at = mates[:, None] * PIVOTS + pivot[None, :]
                all_above = tl.sum(tl.load(above + at, mask=is_mate[:, None], other=0, volatile=True), 0)
                all_mass = tl.sum(tl.load(masses + at, mask=is_mate[:, None], other=0.0, volatile=True), 0)
                lowest = tl.min(tl.load(ranges + mates * 2, mask=is_mate, other=2147483647, volatile=True), 0)
                highest = tl.max(tl.load(ranges + mates * 2 + 1, mask=is_mate, other=LOWEST, volatile=True), 0)
                total = tl.where((by_mass == 1) & (total < 0), tl.sum(tl.where(pivot == 0, all_mass, 0.0), 0), total)
                kept = tl.where(by_mass == 1, all_mass < top_p * total, all_above < top_k)
                # Pivot 0 is `low`, from which on too much is kept, whatever the rounding.
                num_cut = tl.maximum(tl.sum((kept == 0).to(tl.int32), 0), 1)
                if num_cut < PIVOTS:
                    high = tl.sum(tl.where(pivot == num_cut, pivots, 0), 0)
                    num_above = tl.sum(tl.where(pivot == num_cut, all_above, 0), 0)
                    above_mass = tl.sum(tl.where(pivot == num_cut, all_mass, 0.0), 0)
                low = tl.sum(tl.where(pivot == num_cut - 1, pivots, 0), 0)
                num_from_low = tl.sum(tl.where(pivot == num_cut - 1, all_above, 0), 0)
                # No key lies beyond these, so that what was counted stays.
                low = tl.maximum(low, lowest.to(tl.int64) - 1)
                high = tl.minimum(high, highest.to(tl.int64))

        # Of the tokens at `high` as many are kept as fit both limits.
        bounded = (top_k > 0) | (top_p < 1.0)
        boundary = tl.where(bounded, high, BELOW_ALL).to(tl.int32)
        fitting = tl.full((), VOCAB_SIZE, tl.int32)
        if top_k > 0:
            fitting = tl.minimum(fitting, top_k - num_above)
        if top_p < 1.0:
            level = _weight(_value(boundary), peak, scale).to(tl.float64)
            room = tl.ceil((top_p * total - above_mass) / level)
            fitting = tl.minimum(fitting, tl.minimum(room, 1.0 * VOCAB_SIZE).to(tl.int32))
        passed = tl.full((), 0, tl.int32)
        if bounded & (fitting < num_from_low - num_above):
            tied_here = tl.zeros([BLOCK], tl.int32)
            for start in range(first, end, BLOCK):
                token = start + lane
                inside = token < end
                logit = adjusted_logits(
                    line, token, inside, words, index, position, last,
                    bias_ids, bias_values, bias_until, counts, VOCAB_SIZE, ADJUSTS,
                )  # fmt: skip
                tied_here += (inside & (_key(logit) == boundary)).to(tl.int32)
            slot = (meeting % 2) * PROGRAMS
            tl.store(winners + slot + program, tl.sum(tied_here, 0))
            _meet(arrivals, team, meeting, members)
            meeting += 1
            theirs = tl.load(winners + slot + team * members + mate, mask=mate < member, other=0, volatile=True)
            passed = tl.sum(theirs, 0)

        min_p = single_field(words, index, MIN_P)
        key_high, key_low = row_key(words, index, position)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        winner = tl.full([BLOCK], VOCAB_SIZE, tl.int32)
        for start in range(first, end, BLOCK):
            token = start + lane
            inside = token < end
            logit = adjusted_logits(
                line, token, inside, words, index, position, last,
                bias_ids, bias_values, bias_until, counts, VOCAB_SIZE, ADJUSTS,
            )  # fmt: skip
            key = tl.where(inside, _key(logit), LOWEST)
            tied = (key == boundary).to(tl.int32)
            is_kept = (key > boundary).to(tl.int32)
            num_tied = tl.sum(tied, 0)
            if num_tied > 0:
                is_kept += tied * (passed + tl.cumsum(tied, 0) <= fitting).to(tl.int32)
                passed += num_tied
            is_kept *= (_weight(logit, peak, scale) >= min_p).to(tl.int32)
            if tl.max(is_kept, 0) > 0:
                noise = log2_noise(tl.load(token_hash + token, mask=inside, other=0), key_high, key_low)
                score = tl.where(is_kept != 0, (logit - peak) * scale - noise, float("-inf"))
                winner = tl.where(score > best, token, winner)
                best = tl.maximum(score, best)
        top = tl.max(best, 0)
        slot = (meeting % 2) * PROGRAMS
        tl.store(scores + slot + program, top)
        tl.store(winners + slot + program, tl.min(tl.where(best == top, winner, VOCAB_SIZE), 0))
        _meet(arrivals, team, meeting, members)
        meeting += 1
        if member == 0:
            mates = slot + team * members + mate
            score = tl.load(scores + mates, mask=is_mate, other=float("-inf"), volatile=True)
            token_of = tl.load(winners + mates, mask=is_mate, other=VOCAB_SIZE, volatile=True)
            chosen = tl.min(tl.where(score == tl.max(score, 0), token_of, VOCAB_SIZE), 0)
            tl.store(tokens + row, chosen.to(tl.int64))


@triton.jit
def _value(key):
    """The float32 whose _key this is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
