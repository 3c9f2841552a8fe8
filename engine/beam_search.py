"""Beam search: which continuations of a request's beams live on, and which finished ones are its result.

The same as transformers' _beam_search for one prompt, so that the same settings give the same beams. Every beam is a
Sequence that computes one token a step like any other and, in place of sampling one, reports the log-probabilities of
its likeliest successors. When all beams have reported, the best beam_width continuations of them all become the new
beams: one that goes on in a single way keeps its blocks, one that goes on in several is forked, and its partly filled
last block is copied on write; one that goes on in none gives its place, and its blocks, to a fork.

A beam that loses its blocks takes the whole search back to its prompt: the search is deterministic, the full blocks
are mostly still cached, and a search that runs in part would hold blocks and places while it waits for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from engine.outputs import BeamResult, TokenLogprobs
from engine.sampling_params import BeamSearchParams
from engine.sequence import Sequence

Fork = Callable[[Sequence, Sequence], None]


class _Successor(NamedTuple):
    """One way to go on: the beam's place, the token, and the log-probability of the whole, a float32."""

    place: int
    token: int
    logprob: np.float32


class BeamSearch:
    """The search of one request. lead is the Sequence of its prompt; the other beams are lead.forks until it has
    reported. max_tokens is what the context leaves of the params'."""

    def __init__(self, lead: Sequence, params: BeamSearchParams, eos_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self._eos_ids = eos_ids
        # As many as are sure to contain beam_width that do not end here.
        self._num_kept = max(2, 1 + len(eos_ids)) * params.beam_width
        self.sequences = (lead, *lead.forks)
        for seq in self.sequences:
            seq.beam = self
            seq.num_logprobs = self._num_kept
        self._finished: list[BeamResult] = []
        self._begin()

    def _begin(self) -> None:
        self._finished.clear()
        self._reports: dict[int, TokenLogprobs] = {}
        self._live: list[tuple[Sequence, np.float32]] = [(self.sequences[0], np.float32(0.0))]

    def restart(self) -> Sequence:
        """Go back to the prompt, with all blocks released; returns the lead, which is to be scheduled again."""
        lead = self.sequences[0]
        for seq in self.sequences:
            del seq.token_ids[seq.num_prompt_tokens :]
            # The hashes of the prompt's own blocks stay right; those of a beam's tokens do not.
            seq.block_contents = []
            seq.num_resident_hint = 0
        lead.forks = self.sequences[1:]
        self._begin()
        return lead

    @property
    def num_new_tokens(self) -> int:
        return self._live[0][0].num_output_tokens

    def report(self, seq: Sequence, logprobs: TokenLogprobs) -> bool:
        """Take one beam's successors; True when all have reported and advance() is due."""
        self._reports[seq.seq_id] = logprobs
        return len(self._reports) == len(self._live)

    def advance(self, share: Fork) -> bool:
        """Choose the next beams; share(parent, child) lets child, without blocks, share parent's. False: the search has
        ended, and results() are final."""
        best = self._best_successors()
        length = self.num_new_tokens + 1
        ends = [s.token in self._eos_ids or length >= self.max_tokens for s in best]
        width = self.params.beam_width
        for successor, end in zip(best[:width], ends, strict=False):
            if end:
                self._finish(successor, length)
        goes_on = [s for s, end in zip(best, ends, strict=True) if not end][:width]
        if not goes_on or not self._may_improve(goes_on[0].logprob, length):
            return False
        self._continue(goes_on, share)
        return True

    def results(self) -> list[BeamResult]:
        """Finished beams, best first; where the search was cut short, the live ones count as they stand."""
        length = self.num_new_tokens
        live = [
            BeamResult(seq.token_ids[seq.num_prompt_tokens :], self._score(logprob, length), "length")
            for seq, logprob in self._live
            if length
        ]
        cut_short = len(self._finished) < self.params.beam_width
        return _best(self._finished + live * cut_short, self.params.beam_width)

    def _best_successors(self) -> list[_Successor]:
        """The likeliest continuations of all beams, best first."""
        successors = [
            _Successor(place, token, np.float32(logprob) + total)
            for place, (seq, total) in enumerate(self._live)
            for token, logprob in self._reports[seq.seq_id].top
        ]
        self._reports.clear()
        successors.sort(key=lambda s: -s.logprob)  # stable: of equals the earlier beam's, as transformers' top-k
        return successors[: self._num_kept]

    def _finish(self, successor: _Successor, length: int) -> None:
        seq = self._live[successor.place][0]
        ids = seq.token_ids[seq.num_prompt_tokens :]
        ended = successor.token in self._eos_ids
        result = BeamResult(
            ids if ended else [*ids, successor.token],
            self._score(successor.logprob, length),
            "stop" if ended else "length",
        )
        self._finished = _best([*self._finished, result], self.params.beam_width)

    def _score(self, logprob: np.float32, length: int) -> float:
        return float(logprob / np.float32(length**self.params.length_penalty))

    def _may_improve(self, best_live: np.float32, length: int) -> bool:
        """Whether to search on, with beams of `length` new tokens of which the best has log-probability best_live."""
        if len(self._finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._score(best_live, self.max_tokens if longest else length) > self._finished[-1].score

    def _continue(self, chosen: list[_Successor], share: Fork) -> None:
        """Give each chosen successor a Sequence: a beam's own for its first, one without a successor for the others."""
        heirs: dict[int, list[_Successor]] = {}
        for successor in chosen:
            heirs.setdefault(successor.place, []).append(successor)
        keepers = {self._live[place][0].seq_id for place in heirs}
        spare = [seq for seq in self.sequences if seq.seq_id not in keepers]
        owners: dict[_Successor, Sequence] = {}
        for place, successors in heirs.items():
            parent = self._live[place][0]
            for successor in successors[1:]:
                child = spare.pop()
                child.token_ids = [*parent.token_ids, successor.token]
                share(parent, child)
                owners[successor] = child
        for place, (first, *_) in heirs.items():
            parent = self._live[place][0]
            parent.token_ids.append(first.token)
            owners[first] = parent
        self.sequences[0].forks = ()
        self._live = [(owners[successor], successor.logprob) for successor in chosen]


def _best(results: list[BeamResult], count: int) -> list[BeamResult]:
    return sorted(results, key=lambda r: -r.score)[:count]  # stable: of equals the earlier one
