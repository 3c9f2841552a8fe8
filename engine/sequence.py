"""Sequence: one request on its way through the engine."""

from __future__ import annotations

from enum import Enum, auto

from engine.outputs import RequestMetrics, RequestPriority
from engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()  # a BACKGROUND request that gave way: it keeps its blocks
    FINISHED = auto()


class Sequence:
    """Token ids, their blocks, and how far the model has come.

    token_ids             prompt, then output
    block_table           physical blocks in logical order; block i holds tokens [i*B, (i+1)*B)
    block_hashes          chained hashes of the full blocks of token_ids, extended as they are needed
    num_computed_tokens   tokens whose keys and values stand in the cache
    num_planned_tokens    the same once the step in flight is done (equal to it between steps)
    num_placeholders      tokens that a step in flight will sample: counted, not yet known
    rank, num_overtaken   its place in the waiting queue, see WaitingQueue
    num_resident_hint     leading blocks that were resident when BlockManager.resident_prefix() last looked
    owner, turn, salt     stamped on the blocks it writes: whose they are, which turn of it, whom they may serve

    A sequence whose planned tokens fall one short of its tokens decodes; otherwise it prefills. After a
    preemption the output so far is part of what is prefilled again.
    """

    __slots__ = (
        "arrival_order",
        "block_hashes",
        "block_table",
        "error",
        "finish_reason",
        "max_tokens",
        "metrics",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_overtaken",
        "num_placeholders",
        "num_planned_tokens",
        "num_prompt_tokens",
        "num_resident_hint",
        "owner",
        "params",
        "priority",
        "rank",
        "request_id",
        "salt",
        "seed",
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
    ) -> None:
        self.request_id = request_id
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
        self.block_hashes: list[bytes] = []
        self.num_indexed_blocks = 0
        self.num_computed_tokens = 0
        self.num_planned_tokens = 0
        self.num_placeholders = 0
        self.num_cached_tokens = 0
        self.num_resident_hint = 0
        self.num_overtaken = 0
        self.rank: tuple[int, int, int] | None = None
        self.was_admitted = False
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
    def is_decode(self) -> bool:
        return self.num_uncomputed_tokens == 1 and self.num_planned_tokens >= self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {len(self.block_table)} blocks)"
        )
