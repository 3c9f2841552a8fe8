"""Sequence: one request on its way through the engine."""

from __future__ import annotations

import itertools
import struct
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from engine.outputs import RequestMetrics, RequestPriority, TokenLogprobs
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.beam_search import BeamSearch
    from engine.prefix_index import BlockContent

_ids = itertools.count()


def as_array(ids: list[int]) -> np.ndarray:
    """int32 [T], in a third of the time that numpy takes. struct.error for what is no integer of 32 bits."""
    return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)


class SequenceStatus(Enum):
    UNBORN = auto()  # a fork whose prompt is another's to compute
    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()  # a BACKGROUND request that gave way: it keeps its blocks
    FINISHED = auto()


class Sequence:
    """Token ids, their blocks, and how far the model has come.

    token_ids             prompt, then output
    block_table           physical blocks in logical order; block i holds tokens [i*B, (i+1)*B)
    block_contents        what the full blocks of token_ids hold, with chained hashes; extended as they are needed
    may_write_to_shared   since a fork it has not been made sure of that its next token goes to a block of its own
    num_computed_tokens   tokens whose keys and values stand in the cache
    num_planned_tokens    the same once the steps in flight are done (equal to it while there are none)
    num_placeholders      tokens that steps in flight will sample: counted, not yet known
    life                  counts preemptions: what was planned in an earlier life counts for nothing
    queue_key             its place in the waiting queue, see WaitingQueue
    num_overtaken         how many were admitted from behind it
    num_resident_hint     leading blocks that were resident when BlockManager.resident_prefix() last looked
    owner, turn, salt     stamped on the blocks it writes: whose they are, which turn of it, whom they may serve
    seq_id                unique among all sequences; a request's n continuations have one each, and an index
    forks                 continuations that come into being when this one's prompt is computed; () afterwards
    beam                  the search that this sequence is a beam of
    prompt_logprobs       entries of the prompt's first tokens, where asked for; the first is None
    num_logprobs          alternatives to report per output token; None: no log-probabilities

    A sequence whose planned tokens fall one short of its tokens decodes; otherwise it prefills. After a
    preemption the output so far is part of what is prefilled again.
    """

    __slots__ = (
        "_prompt",
        "arrival_order",
        "beam",
        "block_contents",
        "block_table",
        "drawn_from",
        "error",
        "finish_reason",
        "forks",
        "index",
        "life",
        "max_tokens",
        "may_write_to_shared",
        "metrics",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_logprobs",
        "num_overtaken",
        "num_placeholders",
        "num_planned_tokens",
        "num_prompt_tokens",
        "num_resident_hint",
        "owner",
        "params",
        "priority",
        "prompt_logprobs",
        "queue_key",
        "request_id",
        "salt",
        "seed",
        "seq_id",
        "status",
        "stop_ids",
        "token_ids",
        "turn",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        priority: RequestPriority = RequestPriority.NORMAL,
        arrival_order: int = 0,
        owner: int = 0,
        turn: int = 0,
        salt: bytes = b"",
        prompt_array: np.ndarray | None = None,
    ) -> None:
        """prompt_array: prompt_ids as int32 [T], where somebody has them already."""
        self.seq_id = next(_ids)
        self._prompt = prompt_array
        self.request_id = request_id
        self.index = 0
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.priority = priority
        self.arrival_order = arrival_order
        self.owner = owner
        self.turn = turn
        self.salt = salt
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.block_table: list[int] = []
        self.block_contents: list[BlockContent] = []
        self.may_write_to_shared = False
        self.num_indexed_blocks = 0
        self.num_computed_tokens = 0
        self.num_planned_tokens = 0
        self.num_placeholders = 0
        self.life = 0
        self.num_cached_tokens = 0
        self.num_resident_hint = 0
        self.num_overtaken = 0
        self.queue_key: tuple[int, int, int] | None = None
        self.was_admitted = False
        self.forks: tuple[Sequence, ...] = ()
        self.drawn_from: int | None = None  # noted by graph_sampling
        self.beam: BeamSearch | None = None
        self.num_logprobs = params.logprobs
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.metrics = RequestMetrics()

    @property
    def num_tokens(self) -> int:
        """Tokens known or promised."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next plan may compute."""
        return self.num_tokens - self.num_planned_tokens

    @property
    def is_scored(self) -> bool:
        """Log-probabilities of its tokens are wanted, by whoever asked or by its beam search."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def drawn(self) -> tuple[Sequence, ...]:
        """Whose next token is drawn from the logits of this one's last token."""
        return (self, *self.forks) if self.beam is None else (self,)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start], the token ids at these positions, which must be known; not to be written to."""
        if stop > self.num_prompt_tokens:
            return np.array(self.token_ids[start:stop], np.int32)
        if self._prompt is None:
            self._prompt = as_array(self.token_ids[: self.num_prompt_tokens])
        return self._prompt[start:stop]

    def make_forks(self, seeds: list[int]) -> None:
        """Give this sequence continuations 1, 2, ... of the same prompt, one per seed. Their places in the order of
        arrival are the next ones after its own."""
        forks = []
        for index, seed in enumerate(seeds, start=1):
            fork = Sequence(
                self.request_id,
                self.token_ids,
                self.params,
                seed=seed,
                max_tokens=self.max_tokens,
                stop_ids=self.stop_ids,
                priority=self.priority,
                arrival_order=self.arrival_order + index,
                owner=self.owner,
                turn=self.turn,
                salt=self.salt,
                prompt_array=self._prompt,
            )
            fork.index = index
            fork.status = SequenceStatus.UNBORN
            fork.prompt_logprobs = None
            fork.metrics.arrival = self.metrics.arrival
            forks.append(fork)
        self.forks = tuple(forks)

    def unscored_prompt(self, start: int, stop: int) -> range:
        """Those of the positions [start, stop) whose logits are still wanted for prompt_logprobs."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(stop, self.num_prompt_tokens - 1))

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )
