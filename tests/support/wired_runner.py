"""The stand-in model behind the wire: plans reach it only as messages, as they reach a rank, and it can be lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanDecoder, PlanEncoder
from engine.recovery import StepExecutor
from engine.scheduler import ScheduledSequence, StepPlan
from engine.step_answer import awaited, fill, to_answer
from engine.tensor_parallel import RanksLost
from history_model import HistoryRunner, history_engine


class WiredRunner(HistoryRunner):
    """A HistoryRunner that sees nothing of the engine's own sequences. sizes: bytes of each message. Its answers
    travel back as those of rank 0.

    The launches (or, with in_collect, the collects) numbered in losses raise RanksLost, counted from 0; a rebuilt
    one has empty slots. Those numbered in faults raise ZeroDivisionError, as a step does that has failed on every rank.
    """

    def __init__(self, num_blocks: int, block_size: int, losses: Iterable[int] = (), in_collect: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.sizes: list[int] = []
        self.num_rebuilt = 0
        self._shape = num_blocks, block_size
        self._losses, self._in_collect = set(losses), in_collect
        self.faults: set[int] = set()
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()

    def launch(self, plan: StepPlan) -> StepHandle:
        message = pickle.dumps(self._encoder.encode(plan))
        self.sizes.append(len(message))
        lost = len(self.sizes) - 1 in self._losses
        if lost and not self._in_collect:
            raise RanksLost("a rank died")
        arrived, _ended = self._decoder.decode(pickle.loads(message))
        there, here = [_state(i) for i in arrived.items], [_state(i) for i in plan.items]
        if there != here:
            # No Exception: the step would be run again, of sequences told anew, and come out right.
            pytest.fail(f"planned: {here}\nhas arrived: {there}")
        if len(self.sizes) - 1 in self.faults:
            raise ZeroDivisionError("in the model")
        self._there = super().launch(arrived)
        return awaited(plan)

    def collect(self, handle: StepHandle) -> list[int]:
        if len(self.sizes) - 1 in self._losses:
            raise RanksLost("a rank died")
        answer = to_answer(self._there, super().collect(self._there))
        return fill(handle, pickle.loads(pickle.dumps(answer)))

    def forget(self, seq_id: int) -> None:
        self._encoder.forget(seq_id)

    def loss(self) -> RanksLost | None:
        return None

    def rebuild(self, loss: RanksLost, progress: Callable[[str, float], None]) -> None:
        self.num_rebuilt += 1
        HistoryRunner.__init__(self, *self._shape)
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()


def _state(item: ScheduledSequence) -> tuple[object, ...]:
    """All that a runner reads of a planned sequence."""
    seq = item.seq
    drawn = [(one.seq_id, one.index, one.seed, one.num_logprobs) for one in seq.drawn] if item.samples else None
    unscored = seq.unscored_prompt(item.start, item.start + item.num_tokens)
    return seq.token_ids, seq.num_prompt_tokens, seq.block_table, seq.params, seq.stop_ids, drawn, unscored


def wired_engine(
    num_blocks: int, block_size: int, losses: Iterable[int] = (), in_collect: bool = False, **settings: Any
) -> tuple[LLMEngine, WiredRunner]:
    """A real LLMEngine over a WiredRunner."""
    engine = history_engine(num_blocks, block_size, **settings)
    runner = WiredRunner(num_blocks, block_size, losses, in_collect)
    engine.runner = engine.requests.runner = engine.ranks = runner  # type: ignore[assignment]
    engine.executor = StepExecutor(runner)
    return engine, runner
