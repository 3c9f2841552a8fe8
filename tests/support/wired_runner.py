"""The stand-in model behind the wire: plans reach it only as messages, as they reach a rank, and it can be lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable

from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanDecoder, PlanEncoder
from engine.recovery import StepExecutor
from engine.scheduler import StepPlan
from engine.tensor_parallel import RanksLost
from history_model import HistoryRunner, history_engine


class WiredRunner(HistoryRunner):
    """A HistoryRunner that sees nothing of the engine's own sequences. sizes: bytes of each message.

    The launches (or, with in_collect, the collects) numbered in losses raise RanksLost, counted from 0; a rebuilt
    one has empty slots.
    """

    def __init__(self, num_blocks: int, block_size: int, losses: Iterable[int] = (), in_collect: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.sizes: list[int] = []
        self.num_rebuilt = 0
        self._shape = num_blocks, block_size
        self._losses, self._in_collect = set(losses), in_collect
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()

    def launch(self, plan: StepPlan) -> StepHandle:
        message = pickle.dumps(self._encoder.encode(plan))
        self.sizes.append(len(message))
        lost = len(self.sizes) - 1 in self._losses
        if lost and not self._in_collect:
            raise RanksLost("a rank died")
        arrived, _ended = self._decoder.decode(pickle.loads(message))
        assert [i.seq.token_ids for i in arrived.items] == [i.seq.token_ids for i in plan.items]
        return super().launch(arrived)

    def collect(self, handle: StepHandle) -> list[int]:
        if len(self.sizes) - 1 in self._losses:
            raise RanksLost("a rank died")
        return super().collect(handle)

    def forget(self, request_id: int) -> None:
        self._encoder.forget(request_id)

    def loss(self) -> RanksLost | None:
        return None

    def rebuild(self, loss: RanksLost, progress: Callable[[str, float], None]) -> None:
        self.num_rebuilt += 1
        HistoryRunner.__init__(self, *self._shape)
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()


def wired_engine(
    num_blocks: int, block_size: int, losses: Iterable[int] = (), in_collect: bool = False, **settings: int
) -> tuple[LLMEngine, WiredRunner]:
    """A real LLMEngine over a WiredRunner."""
    engine = history_engine(num_blocks, block_size, **settings)
    runner = WiredRunner(num_blocks, block_size, losses, in_collect)
    engine.runner = engine.ranks = runner  # type: ignore[assignment]
    engine.executor = StepExecutor(runner)
    return engine, runner
