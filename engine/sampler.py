"""Sampler: the next token of every row of a step, from logits.

The order is that of transformers' logits processors, so that the same settings mean the same here:

    repetition penalty (prompt + output), presence and frequency (output only)
    -> temperature -> top_k -> top_p over what top_k left -> min_p

Penalties act on raw logits because their scale is defined there. Temperature comes before the truncations,
so top_p and min_p see the distribution that is drawn from. min_p is relative to the most likely token and
hence indifferent to the renormalisations before it.

Drawing is an exponential race, argmax(p_i / E_i) with E_i ~ Exp(1), equal in law to sampling from p (the
Gumbel-max trick without its second logarithm); E comes from engine.noise. Rows fall into three groups, each
one vectorised pass: greedy rows, rows over the whole vocabulary, and truncated rows, which work on their top
candidates and climb to more of them only where the kept set may reach past the last. Which group and how far
is decided per row, so a row's token never depends on its neighbours.

Equal logits rank by token id, lowest first, everywhere: greedy, top_k and top_p are exact and repeatable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.noise import TokenNoise, mix64
from engine.penalties import PenaltyHistory, PenaltyRows
from engine.sampling_params import SamplingParams

BAD_TOKEN = -1  # stands where a row's logits are unusable: NaN, +inf, or nothing but -inf
_CANDIDATES = (256, 4096)  # rungs before the whole vocabulary
_CPU_BLOCK = 2**19  # logits drawn from at once on a CPU: temporaries of 2 MiB stay in its cache
_MIN_TEMPERATURE = 1e-6  # keeps a positive temperature positive in float32; the draw is greedy long before


class SamplingRow(NamedTuple):
    """One row of logits: whose it is, and the index in the sequence of the token to be chosen.

    request_id keys all per-request state. params, seed and prompt_ids are fixed for its lifetime, output_ids
    grows. seed is 0 <= seed < 2**63.
    """

    request_id: int
    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(slots=True)
class _Group:
    """N rows that are drawn the same way. rows int64 [N]; None: every row of the batch.

    stream int64 [N] is the mixed seed; temperature, top_p, min_p float32 [N, 1]; top_k int64 [N, 1]. A
    truncation that is off is written so that it keeps everything: top_p inf, top_k the vocabulary, min_p 0.
    """

    rows: Tensor | None
    stream: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def select(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows]

    def subset(self, index: Tensor) -> _Group:
        """The rows at `index` int64 [M] of this group."""
        rows = index if self.rows is None else self.rows[index]
        return _Group(
            rows, self.stream[index], self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )


@dataclass(slots=True)
class SamplingBatch:
    """One step's settings on the device, from Sampler.prepare.

    request_ids  of the R rows
    position     int64 [R], or None where every row is greedy
    drawn        blocks of rows over the whole vocabulary
    truncated    blocks of rows with top_k, top_p or min_p; what is in neither is greedy
    penalized    rows with penalties, and their request ids
    """

    request_ids: tuple[int, ...]
    position: Tensor | None
    drawn: list[_Group]
    truncated: list[_Group]
    penalized: PenaltyRows | None
    penalized_ids: list[int]
    penalized_index: list[int]

    @property
    def all_greedy(self) -> bool:
        return not self.drawn and not self.truncated

    @property
    def needs_penalties(self) -> bool:
        return self.penalized is not None

    @property
    def needs_truncation(self) -> bool:
        return bool(self.truncated)


class Sampler:
    """Chooses tokens for a model of `vocab_size` on `device`; holds per-request state until `forget`."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._noise = TokenNoise(vocab_size, self.device)
        self._history = PenaltyHistory(self.device)
        self._last: SamplingBatch | None = None

    @torch.inference_mode()
    def prepare(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        """Settings of this step. While the requests stay the same only positions and new tokens are sent."""
        request_ids = tuple([row.request_id for row in rows])
        batch = self._last
        if batch is None or batch.request_ids != request_ids:
            batch = self._last = self._build(rows, request_ids)
        if not batch.all_greedy:
            batch.position = torch.tensor([row.position for row in rows], dtype=torch.int64, device=self.device)
        if batch.penalized is not None:
            self._history.extend(
                [(rows[i].request_id, rows[i].prompt_ids, rows[i].output_ids) for i in batch.penalized_index]
            )
        return batch

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """int64 [R] token ids for logits float32 [R, V], BAD_TOKEN where a row has no usable maximum.

        The logits are left as they are. Truncated rows cost one host synchronisation on a CUDA device.
        """
        if logits.shape != (len(batch.request_ids), self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit {len(batch.request_ids)} rows "
                f"of a vocabulary of {self.vocab_size}"
            )
        if batch.penalized is not None:
            logits = self._history.apply(logits, batch.penalized, batch.penalized_ids)
        best, tokens = logits.max(dim=1, keepdim=True)
        usable = best.isfinite().squeeze(1)
        tokens = tokens.squeeze(1)
        for groups, draw in ((batch.drawn, self._draw), (batch.truncated, self._draw_truncated)):
            for group in groups:
                assert batch.position is not None
                chosen = draw(group.select(logits), group.select(best), group.select(batch.position), group)
                if group.rows is None:
                    tokens = chosen
                else:
                    tokens[group.rows] = chosen
        return tokens.masked_fill_(~usable, BAD_TOKEN)

    def forget(self, request_id: int) -> None:
        """Drop the state of a request that has ended; an unknown id is a no-op."""
        self._history.forget(request_id)
        if self._last is not None and request_id in self._last.request_ids:
            self._last = None

    def _draw(self, logits: Tensor, best: Tensor, position: Tensor, group: _Group) -> Tensor:
        """int64 [N] drawn over the whole vocabulary from logits [N, V] with row maxima best [N, 1]."""
        weights = _weights(logits, best, group)
        # max, not argmax: it finds the same index three times as fast on a CPU.
        return weights.div_(self._noise.exponential(group.stream, position)).max(dim=1).indices

    def _draw_truncated(self, logits: Tensor, best: Tensor, position: Tensor, group: _Group) -> Tensor:
        """int64 [N] drawn from what top_k, top_p and min_p leave; rows climb rungs of candidates as needed."""
        total = _weights(logits, best, group).sum(dim=1, keepdim=True, dtype=torch.float64)
        tokens = torch.empty_like(position)
        left = None
        for num_candidates in (*(k for k in _CANDIDATES if k < self.vocab_size), self.vocab_size):
            if left is None:
                chosen, settled = self._draw_among(num_candidates, logits, best, total, position, group)
                tokens = chosen
            else:
                chosen, settled = self._draw_among(
                    num_candidates, logits[left], best[left], total[left], position[left], group.subset(left)
                )
                tokens[left] = chosen
            if bool(settled.all()):
                break
            unsettled = (~settled).nonzero().squeeze(1)
            left = unsettled if left is None else left[unsettled]
        return tokens

    def _draw_among(
        self, num_candidates: int, logits: Tensor, best: Tensor, total: Tensor, position: Tensor, group: _Group
    ) -> tuple[Tensor, Tensor]:
        """Draw from the `num_candidates` most likely tokens: (int64 [N] tokens, bool [N] settled).

        total float64 [N, 1] is the mass of the whole vocabulary in units of the most likely token's. A row is
        settled where the kept set, ties with its last member included, provably lies within the candidates.
        """
        whole = num_candidates == self.vocab_size
        values, ids = _most_likely(logits, num_candidates)
        weights = _weights(values, best, group)
        rank = torch.arange(num_candidates, device=self.device)
        keep = rank < group.top_k
        inside = weights * keep
        mass = inside.cumsum(dim=1, dtype=torch.float64)
        has_top_k = group.top_k < self.vocab_size
        total = torch.where(has_top_k, mass[:, -1:], total)
        mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        keep &= mass_before < group.top_p * total
        keep &= weights >= group.min_p
        keep[:, 0] = True
        kept = weights * keep
        winner = (kept / self._noise.exponential(group.stream, position, ids)).argmax(dim=1, keepdim=True)
        if whole:
            settled = torch.ones_like(position, dtype=torch.bool)
        else:
            last_kept = values.gather(1, keep.sum(dim=1, keepdim=True) - 1)
            mass_known = ~has_top_k | (group.top_k <= num_candidates) | group.top_p.isinf()
            settled = ((last_kept > values[:, -1:]) & mass_known).squeeze(1)
        return ids.gather(1, winner).squeeze(1), settled

    def _build(self, rows: Sequence[SamplingRow], request_ids: tuple[int, ...]) -> SamplingBatch:
        drawn: list[int] = []
        truncated: list[int] = []
        penalized: list[int] = []
        for i, row in enumerate(rows):
            params = row.params
            if not params.greedy:
                (truncated if self._truncates(params) else drawn).append(i)
            if params.has_penalties:
                penalized.append(i)
        return SamplingBatch(
            request_ids=request_ids,
            position=None,
            drawn=self._groups(rows, drawn),
            truncated=self._groups(rows, truncated),
            penalized=self._penalty_rows(rows, penalized),
            penalized_ids=[rows[i].request_id for i in penalized],
            penalized_index=penalized,
        )

    def _truncates(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0 or 0 < params.top_k < self.vocab_size or params.min_p > 0.0

    def _groups(self, rows: Sequence[SamplingRow], index: list[int]) -> list[_Group]:
        block = max(1, _CPU_BLOCK // self.vocab_size if self.device.type == "cpu" else len(index))
        return [self._group(rows, index[start : start + block]) for start in range(0, len(index), block)]

    def _group(self, rows: Sequence[SamplingRow], index: list[int]) -> _Group:
        params = [rows[i].params for i in index]
        return _Group(
            rows=None if len(index) == len(rows) else torch.tensor(index, device=self.device),
            stream=mix64(torch.tensor([rows[i].seed for i in index], dtype=torch.int64, device=self.device)),
            temperature=self._column([max(p.temperature, _MIN_TEMPERATURE) for p in params]),
            top_k=self._column([min(p.top_k, self.vocab_size) or self.vocab_size for p in params], torch.int64),
            top_p=self._column([p.top_p if p.top_p < 1.0 else float("inf") for p in params]),
            min_p=self._column([p.min_p for p in params]),
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

    def _column(self, values: list, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None]


def _weights(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    """Probabilities in units of the most likely token's, float32 of logits' shape, after temperature.

    The floor e**-80 stands for all that is smaller, -inf included: it loses every race (noise spans 2**-32 to
    17), and float32 denormals, which cost a CPU fifty times a normal exp, never occur.
    """
    return (logits - best).div_(group.temperature).clamp_(min=-80.0).exp_()


def _most_likely(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of [N, V] as (values, ids) [N, k], descending, equal values by ascending id.

    Below k = V, which of the tokens tied with the last value are among them is topk's choice.
    """
    if k == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
    values, ids = logits.topk(k, dim=1, sorted=False)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
