"""Sampler: the next token of every row of a step, from logits.

The order is that of transformers' logits processors, so that the same settings mean the same here:

    logit bias and the ids that min_tokens rules out
    -> repetition penalty (prompt + output), presence and frequency (output only)
    -> temperature -> top_k -> top_p over what top_k left -> min_p

Bias and penalties act on raw logits because their scale is defined there. Temperature comes before the truncations,
so top_p and min_p see the distribution that is drawn from. min_p is relative to the most likely token and
hence indifferent to the renormalisations before it.

Drawing is an exponential race: the winner of argmax(p_i / E_i) with E_i ~ Exp(1) is distributed as p (the
Gumbel-max trick without its second logarithm); E comes from engine.noise. The race decides the truncations
too, without sorting a vocabulary: the best placed token that is kept is the winner of the race among the kept
ones. So take the best placed, add up what ranks before it, and if it turns out to be cut off, strike out it
and all that rank after it and take the next. The result is exactly that of masking first. A few rounds do,
since each strikes out about half of the excess by mass; a small top_k, whose excess is large, is cut at the
k-th largest logit beforehand.

So it goes on a CPU, rows without truncations in C where there is a decoder (models/native). A card has kernels for it,
which take the step's settings from device arrays and never wait for the host: models.kernels.sampling. Captured steps
apply bias and penalties there too, see engine.graph_sampling.

Equal logits rank by token id, lowest first, everywhere: greedy, top_k and top_p are exact and repeatable. All
decisions are per row, so a row's token never depends on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.logit_bias import BiasRequest, BiasRows, LogitBias
from engine.logprobs import ScoredRows
from engine.noise import TokenNoise, mix64, row_key
from engine.penalties import PenaltyHistory, PenaltyRows
from engine.sampling_params import SamplingParams
from models import kernels
from models.kernels.row_settings import WORDS, RowSettings, pack

BAD_TOKEN = -1  # stands where a row's logits are unusable: NaN, +inf, or nothing but -inf
_SMALL_TOP_K = 1024  # up to here finding the k-th largest logit is cheaper than further rounds
_CPU_BLOCK = 2**19  # logits drawn from at once on a CPU: temporaries of 2 MiB stay in its cache
_MIN_TEMPERATURE = 1e-6  # keeps a positive temperature positive in float32; the draw is greedy long before


class SamplingRow(NamedTuple):
    """One row of logits: whose it is, and the index in the sequence of the token to be chosen.

    request_id keys all per-request state. params, seed and prompt_ids are fixed for its lifetime, output_ids
    grows. seed is 0 <= seed < 2**63. banned are ids that may not be chosen: the same at every step, until there
    are none. num_logprobs: how many alternatives' log-probabilities are wanted; None: not even the chosen token's.
    """

    request_id: int
    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned: Collection[int] = ()
    num_logprobs: int | None = None


@dataclass(slots=True)
class _Group:
    """N rows that are drawn in one pass. rows int64 [N]; None: every row of the batch.

    temperature, min_p float32 [N, 1]; top_p float64 [N, 1]; top_k int64 [N, 1]. A truncation that is off is
    written so that it keeps everything: top_p inf, top_k the vocabulary, min_p 0. truncates, has_min_p: whether
    any row has one that is on. num_largest: how many of each row's largest logits to look at first, for the
    rows with a small top_k and for those whose top_p refers to what top_k left.
    """

    rows: Tensor | None
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    truncates: bool
    has_min_p: bool
    num_largest: int

    def select(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows]


@dataclass(slots=True)
class _Race:
    """The settings of R rows, their indices int64 [R], and this step's positions int64 [R], all on the device.
    truncates: whether any row is."""

    settings: RowSettings
    rows: Tensor
    positions: Tensor
    truncates: bool


@dataclass(slots=True)
class SamplingBatch:
    """One step's settings on the device, from Sampler.prepare.

    request_ids  of the R rows
    streams      of the R seeds, for the row keys
    keys         int32 [R, 2], this step's noise; None where every row is greedy
    drawn        blocks of rows to draw, those without and those with truncations apart; the rest is greedy
    race         for the kernel that draws all rows at once; None where there is none
    penalized    rows with penalties; their request ids; their indices
    biased       what is added to the logits; restricted: indices of the rows that have banned ids
    scored       rows whose log-probabilities are wanted
    """

    request_ids: tuple[int, ...]
    streams: list[int]
    keys: Tensor | None
    drawn: list[_Group]
    penalized: PenaltyRows | None
    penalized_ids: list[int]
    penalized_index: list[int]
    race: _Race | None
    biased: BiasRows | None
    restricted: list[int]
    scored: ScoredRows | None

    @property
    def all_greedy(self) -> bool:
        return not self.drawn


class Sampler:
    """Chooses tokens for a model of `vocab_size` on `device`; holds per-request state until `forget`.

    draw_whole: what draws rows without truncations in place of the operators here; see models.native.decoder.Draw.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        draw_whole: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._ids = torch.arange(vocab_size, dtype=torch.float32, device=self.device)  # exact below 2**24
        self._noise = TokenNoise(vocab_size, self.device)
        self._history = PenaltyHistory(self.device)
        self._bias = LogitBias(self.device)
        self._last: SamplingBatch | None = None
        self._kernel = kernels.load("sampling", self.device)
        self._draw_whole = draw_whole

    @torch.inference_mode()
    def prepare(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        """Settings of this step. While the requests stay the same only noise keys and new tokens are sent."""
        request_ids = tuple([row.request_id for row in rows])
        batch = self._last
        if batch is None or batch.request_ids != request_ids or not all(rows[i].banned for i in batch.restricted):
            batch = self._last = self._build(rows, request_ids)
        if batch.race is not None:
            positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=self.device)
            batch.race.positions = positions
        elif not batch.all_greedy:
            keys = [row_key(stream, row.position) for stream, row in zip(batch.streams, rows, strict=True)]
            batch.keys = torch.tensor(keys, dtype=torch.int32, device=self.device)
        if batch.penalized is not None:
            self._history.extend(
                [(rows[i].request_id, rows[i].prompt_ids, rows[i].output_ids) for i in batch.penalized_index]
            )
        return batch

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """int64 [R] token ids for logits float32 [R, V], BAD_TOKEN where a row has no usable maximum.

        The logits are left as they are. Without the kernel truncated rows cost a host synchronisation a round on a
        CUDA device.
        """
        if logits.shape != (len(batch.request_ids), self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit {len(batch.request_ids)} rows "
                f"of a vocabulary of {self.vocab_size}"
            )
        if batch.biased is not None:
            logits = self._bias.apply(logits, batch.biased)
        if batch.penalized is not None:
            logits = self._history.apply(logits, batch.penalized, batch.penalized_ids)
        if batch.race is not None:
            race = batch.race
            return self._kernel.sample(
                logits, race.settings, race.rows, race.positions, self._noise.token_hash, truncates=race.truncates
            )
        best, tokens = logits.max(dim=1, keepdim=True)
        usable = best.isfinite().squeeze(1)
        tokens = tokens.squeeze(1)
        for group in batch.drawn:
            assert batch.keys is not None
            chosen = self._draw(group.select(logits), group.select(best), group.select(batch.keys), group)
            if group.rows is None:
                tokens = chosen
            else:
                tokens[group.rows] = chosen
        return tokens.masked_fill_(~usable, BAD_TOKEN)

    @property
    def has_kernel(self) -> bool:
        """Whether draw() works on this device."""
        return self._kernel is not None

    def draw(
        self, logits: Tensor, settings: RowSettings, rows: Tensor, positions: Tensor, input_ids: Tensor, *, out: Tensor
    ) -> None:
        """Fills out int64 [R]: see models.kernels.sampling. Reads nothing but these tensors, so that it can be
        captured. logits of any floating type; bias and penalties are those of the settings."""
        assert self._kernel is not None
        self._kernel.sample(logits, settings, rows, positions, self._noise.token_hash, input_ids=input_ids, out=out)

    def warm_up(self) -> None:
        """Draw from even logits, so that the first request does not wait for kernels to be compiled."""
        for params in (SamplingParams(), SamplingParams(top_p=0.5)):
            row = SamplingRow(-1, params, 0, 0, (), ())
            self(torch.zeros(1, self.vocab_size, device=self.device), self.prepare([row]))
            self.forget(-1)

    def forget(self, request_id: int) -> None:
        """Drop the state of a request that has ended; an unknown id is a no-op."""
        self._history.forget(request_id)
        self._bias.forget(request_id)
        if self._last is not None and request_id in self._last.request_ids:
            self._last = None

    def _draw(self, logits: Tensor, best: Tensor, keys: Tensor, group: _Group) -> Tensor:
        """int64 [N] drawn from logits float32 [N, V] whose row maxima are best [N, 1]."""
        if self._draw_whole is not None and not group.truncates:
            return self._draw_whole(logits, best, group.temperature, self._noise.token_hash, keys)
        weights = _weights(logits, best, group)
        scores = weights / self._noise.exponential(keys)
        if group.truncates:
            return self._first_kept(logits, best, weights, scores, group)
        return scores.max(dim=1).indices  # max, not argmax: the same index in a third of the time on a CPU

    def _first_kept(self, logits: Tensor, best: Tensor, weights: Tensor, scores: Tensor, group: _Group) -> Tensor:
        """int64 [N]: of the tokens that top_k, top_p and min_p keep, the one with the highest score.

        logits, weights, scores float32 [N, V]; a struck-out token's score becomes 0, which is below all others.
        The most likely token is never cut off, so every row ends. A row of broken logits ends at once: the
        conditions are reasons to cut off, of which NaN fulfils none, and its rank is not looked at.
        """
        top_k = group.top_k.masked_fill(~best.isfinite(), self.vocab_size + 1)
        # Masses in float64: how a sum is split among threads depends on the batch, and must not show.
        mass = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        if group.num_largest:
            largest = logits.topk(group.num_largest, dim=1).values
            seen = top_k <= group.num_largest
            kth = largest.gather(1, top_k.clamp(max=group.num_largest) - 1).masked_fill_(~seen, -math.inf)
            scores *= _holds(torch.ge, logits, kth, logits.shape)
            inside = torch.arange(group.num_largest, device=self.device) < top_k
            within_top_k = (_weights(largest, best, group) * inside).sum(dim=1, keepdim=True, dtype=torch.float64)
            mass = torch.where(seen, within_top_k, mass)
        limit = group.top_p * mass
        if group.has_min_p:
            scores *= _holds(torch.ge, weights, group.min_p, weights.shape)
        row, candidate = None, scores.max(dim=1, keepdim=True).indices
        tokens = candidate.squeeze(1).clone()
        while True:
            level = logits.gather(1, candidate)
            shape = logits.shape
            tied_before = _holds(torch.eq, logits, level, shape).mul_(_holds(torch.lt, self._ids, candidate, shape))
            before = _holds(torch.gt, logits, level, shape).add_(tied_before)
            cut = (weights * before).sum(dim=1, keepdim=True, dtype=torch.float64) >= limit
            cut |= before.sum(dim=1, keepdim=True) >= top_k
            again = cut.squeeze(1).nonzero().squeeze(1)
            if not len(again):
                return tokens
            row = again if row is None else row[again]
            logits, weights, limit, top_k = logits[again], weights[again], limit[again], top_k[again]
            scores = scores[again] * before[again]
            candidate = scores.max(dim=1, keepdim=True).indices
            tokens[row] = candidate.squeeze(1)

    def _build(self, rows: Sequence[SamplingRow], request_ids: tuple[int, ...]) -> SamplingBatch:
        whole: list[int] = []
        truncated: list[int] = []
        penalized: list[int] = []
        biased: list[BiasRequest] = []
        for i, row in enumerate(rows):
            params = row.params
            if not params.greedy:
                (truncated if self._truncates(params) else whole).append(i)
            if params.has_penalties:
                penalized.append(i)
            if params.logit_bias or row.banned:
                biased.append(BiasRequest(i, row.request_id, params.logit_bias, row.banned))
        streams = [mix64(row.seed) for row in rows]
        return SamplingBatch(
            request_ids=request_ids,
            streams=streams,
            keys=None,
            drawn=self._groups(rows, whole) + self._groups(rows, truncated),
            penalized=self._penalty_rows(rows, penalized),
            penalized_ids=[rows[i].request_id for i in penalized],
            penalized_index=penalized,
            race=None if self._kernel is None else self._race(rows, streams),
            biased=self._bias.rows(biased) if biased else None,
            restricted=[b.row for b in biased if b.banned],
            scored=self._scored_rows(rows),
        )

    def _race(self, rows: Sequence[SamplingRow], streams: list[int]) -> _Race:
        """SamplingBatch.race, the positions still to come. Bias and penalties are in the logits by then."""
        words = np.zeros((len(rows), WORDS), np.int64)
        for i, row in enumerate(rows):
            pack(words[i], stream=streams[i], **draw_settings(row.params, self.vocab_size))
        index = torch.arange(len(rows), device=self.device)
        truncates = any(self._truncates(row.params) for row in rows if not row.params.greedy)
        return _Race(RowSettings(torch.from_numpy(words).to(self.device)), index, index, truncates)

    def _truncates(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0 or 0 < params.top_k < self.vocab_size or params.min_p > 0.0

    def _num_largest(self, params: SamplingParams) -> int:
        useful = params.top_k <= _SMALL_TOP_K or params.top_p < 1.0
        return params.top_k if useful and params.top_k < self.vocab_size else 0

    def _groups(self, rows: Sequence[SamplingRow], index: list[int]) -> list[_Group]:
        block = max(1, _CPU_BLOCK // self.vocab_size if self.device.type == "cpu" else len(index))
        return [self._group(rows, index[start : start + block]) for start in range(0, len(index), block)]

    def _group(self, rows: Sequence[SamplingRow], index: list[int]) -> _Group:
        params = [rows[i].params for i in index]
        return _Group(
            rows=None if len(index) == len(rows) else torch.tensor(index, device=self.device),
            temperature=self._column([max(p.temperature, _MIN_TEMPERATURE) for p in params]),
            top_k=self._column([min(p.top_k, self.vocab_size) or self.vocab_size for p in params], torch.int64),
            top_p=self._column([p.top_p if p.top_p < 1.0 else math.inf for p in params], torch.float64),
            min_p=self._column([p.min_p for p in params]),
            truncates=any(map(self._truncates, params)),
            has_min_p=any(p.min_p > 0.0 for p in params),
            num_largest=max(map(self._num_largest, params)),
        )

    def _penalty_rows(self, rows: Sequence[SamplingRow], index: list[int]) -> PenaltyRows | None:
        if not index:
            return None
        params = [rows[i].params for i in index]
        slots = [self._history.slot(rows[i].request_id, rows[i].prompt_ids, rows[i].output_ids) for i in index]
        return PenaltyRows(
            rows=torch.tensor(index, device=self.device),
            slots=torch.tensor(slots, device=self.device),
            repetition=self._column([p.repetition_penalty for p in params]),
            presence=self._column([p.presence_penalty for p in params]),
            frequency=self._column([p.frequency_penalty for p in params]),
            counts_needed=any(p.presence_penalty or p.frequency_penalty for p in params),
        )

    def _scored_rows(self, rows: Sequence[SamplingRow]) -> ScoredRows | None:
        index = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
        if not index:
            return None
        whole = len(index) == len(rows)
        counts = [rows[i].num_logprobs or 0 for i in index]
        return ScoredRows(index, None if whole else torch.tensor(index, device=self.device), counts)

    def _column(self, values: list, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None]


def draw_settings(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Temperature and truncations as pack() of models.kernels.row_settings takes them."""
    return {
        "temperature": 0.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE),
        "top_k": params.top_k if params.top_k < vocab_size else 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }


def _weights(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    """Probabilities in units of the most likely token's, float32 [N, K] for logits [N, K] and maxima [N, 1].

    The floor e**-80 stands for all that is smaller, -inf included: it loses every race, as noise spans 2**-32
    to 17, and float32 denormals, which cost a CPU fifty times a normal exp, never occur.
    """
    return (logits - best).div_(group.temperature).clamp_(min=-80.0).exp_()


def _holds(compare: Callable[..., Tensor], a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """float32, 1 where a compares so with b and 0 elsewhere; both broadcast to `shape`. A CPU takes five times as long
    to write bools. (To work the shape out, torch would import sympy.)"""
    return compare(a, b, out=torch.empty(shape, dtype=torch.float32, device=a.device))
