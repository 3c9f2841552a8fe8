"""The stand-in model on a machine where everything goes wrong: the property tests' runner."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch

from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanDecoder, PlanEncoder
from engine.recovery import StepExecutor
from engine.sampler import BAD_TOKEN
from engine.scheduler import StepPlan
from engine.tensor_parallel import RanksLost
from history_model import HistoryRunner, history_engine


class Corrupted(BaseException):
    """The stand-in found what must not be: no Exception, because the engine would take it for a fault of the step,
    and a second try may hide it."""


class PerilousRunner(HistoryRunner):
    """A HistoryRunner that may fail in each of the ways in which a real one does.

    next_fault      what the next launch raises, once; half_run: after it has written its slots
    guilty          ids of requests with which every launch raises a ValueError
    bad             ids of requests whose logits are not finite from now on; what such a step writes poisons whoever
                    finds it anywhere in a block of its own, as a NaN behind a mask does
    memory          tokens for which one launch has memory; None: for any number
    launched        plans of the launches since the caller last emptied it, failed ones too
    wired           plans are also sent as messages, as to ranks, and must arrive as they are
    Beside the token and its position a slot remembers for which salt it was written, and serves no other.
    """

    def __init__(self, num_blocks: int, block_size: int, wired: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.next_fault: BaseException | None = None
        self.half_run = False
        self.guilty: set[int] = set()
        self.bad: set[int] = set()
        self.memory: int | None = None
        self.launched: list[StepPlan] = []
        self.wired = wired
        self.num_rebuilt = 0
        self._salts: dict[int, bytes] = {}  # by slot
        self._poisoned: set[int] = set()  # slots
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()

    def launch(self, plan: StepPlan) -> StepHandle:
        try:
            return self._launch(plan)
        except AssertionError as error:
            raise Corrupted(str(error)) from error

    def _launch(self, plan: StepPlan) -> StepHandle:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items)
        assert all(item.num_tokens == 1 for item in plan.items[: plan.num_decodes])
        self.launched.append(plan)
        if self.wired:
            self._check_wire(plan)
        fault, self.next_fault = self.next_fault, None
        if fault is None and any(item.seq.request_id in self.guilty for item in plan.items):
            raise ValueError("a guilty request")
        if fault is None and self.memory is not None and plan.num_tokens > self.memory:
            raise torch.OutOfMemoryError(f"out of memory: {plan.num_tokens} tokens")
        if fault is not None and not self.half_run:
            raise fault
        handle = super().launch(plan)
        self._check_slots(plan)
        if fault is not None:
            raise fault
        assert handle.token_ids is not None
        broken = self._poison(plan)
        for row, seq in enumerate(handle.sequences):
            if seq.request_id in broken:
                handle.token_ids[row] = BAD_TOKEN
        return handle

    def _check_wire(self, plan: StepPlan) -> None:
        arrived, _ended = self._decoder.decode(pickle.loads(pickle.dumps(self._encoder.encode(plan))))
        for sent, got in zip(plan.items, arrived.items, strict=True):
            assert (got.start, got.num_tokens, got.samples) == (sent.start, sent.num_tokens, sent.samples)
            assert got.seq.token_ids == sent.seq.token_ids
            assert got.seq.block_table == sent.seq.block_table, "a stale row of the block table"

    def _check_slots(self, plan: StepPlan) -> None:
        """What each sequence reads was written for its own salt."""
        for item in plan.items:
            table, end = item.seq.block_table, item.start + item.num_tokens
            for position in range(item.start, end):
                slot = self._slot(table, position)
                self._salts[slot] = item.seq.salt
                self._poisoned.discard(slot)
            for position in range(0, end, self.block_size):
                assert self._salts[self._slot(table, position)] == item.seq.salt, "a block written for another salt"

    def _poison(self, plan: StepPlan) -> set[int]:
        """The requests whose logits are not finite in this step, with what they have written."""
        size, broken = self.block_size, set()
        for item in plan.items:
            if not item.samples:
                continue
            if item.seq.request_id in self.bad:
                ends = range(item.start, item.start + item.num_tokens)
                self._poisoned.update(self._slot(item.seq.block_table, position) for position in ends)
                broken.add(item.seq.request_id)
            elif self._poisoned:
                end = item.start + item.num_tokens
                table = item.seq.block_table[: -(-end // size)]
                slots = [slot for b in table for slot in range(b * size, (b + 1) * size)]
                # Kernels of a runner that leads read nothing behind the end of a sequence.
                if not self._poisoned.isdisjoint(slots[:end] if self.leads else slots):
                    broken.add(item.seq.request_id)
        return broken

    def scrub(self, blocks: list[int]) -> None:
        super().scrub(blocks)
        for block in blocks:
            self._poisoned.difference_update(range(block * self.block_size, (block + 1) * self.block_size))

    def copy_blocks(self, copies: dict[int, int]) -> None:
        super().copy_blocks(copies)
        size, salts, poisoned = self.block_size, self._salts.copy(), self._poisoned.copy()
        for target, source in copies.items():
            for i in range(size):
                to, origin = target * size + i, source * size + i
                self._salts[to] = salts.get(origin, b"")
                (self._poisoned.add if origin in poisoned else self._poisoned.discard)(to)

    def forget(self, seq_id: int) -> None:
        self._encoder.forget(seq_id)

    def loss(self) -> RanksLost | None:
        return None

    def rebuild(self, loss: RanksLost, progress: Callable[[str, float], None]) -> None:
        self.num_rebuilt += 1
        self.slots = [None] * len(self.slots)
        self._salts.clear()
        self._poisoned.clear()
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()


def perilous_engine(
    num_blocks: int, block_size: int, *, wired: bool = False, **settings: int
) -> tuple[LLMEngine, PerilousRunner]:
    """A real LLMEngine over a PerilousRunner that may also be lost, and rebuilt, as ranks are."""
    engine = history_engine(num_blocks, block_size, **settings)
    runner = PerilousRunner(num_blocks, block_size, wired)
    engine.runner = engine.requests.runner = engine.ranks = runner  # type: ignore[assignment]
    engine.executor = StepExecutor(runner)
    return engine, runner
