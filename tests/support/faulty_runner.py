"""The stand-in model's runner with faults that the test writes as a function of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.recovery import StepExecutor
from engine.sampler import BAD_TOKEN
from engine.scheduler import StepPlan
from history_model import HistoryRunner, history_engine


class FaultyRunner(HistoryRunner):
    """`fault(plan)` returns what the launch of that plan raises, or None. half_run: its slots are written first.

    bad: request ids whose logits are not finite. launched: (request ids, tokens) of every launch, failed ones too.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.fault: Callable[[StepPlan], BaseException | None] = lambda plan: None
        self.half_run = False
        self.bad: set[int] = set()
        self.device_answers = True
        self.launched: list[tuple[list[int], int]] = []
        self.scrubbed: list[int] = []
        self.buffers_released = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items)
        assert all(item.num_tokens == 1 for item in plan.items[: plan.num_decodes])
        self.launched.append(([item.seq.request_id for item in plan.items], plan.num_tokens))
        error = self.fault(plan)
        if error is not None and not self.half_run:
            raise error
        handle = super().launch(plan)
        if error is not None:
            raise error
        return handle

    def collect(self, handle: StepHandle) -> list[int]:
        tokens = super().collect(handle)
        return [
            BAD_TOKEN if seq.request_id in self.bad else token
            for seq, token in zip(handle.sequences, tokens, strict=True)
        ]

    def check_device(self) -> None:
        if not self.device_answers:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def release_buffers(self) -> None:
        self.buffers_released += 1

    def scrub(self, blocks: list[int]) -> None:
        super().scrub(blocks)
        self.scrubbed += blocks


def faulty_engine(num_blocks: int = 64, block_size: int = 4, **settings: Any) -> tuple[LLMEngine, FaultyRunner]:
    """A real LLMEngine over a FaultyRunner."""
    engine = history_engine(num_blocks, block_size, **settings)
    runner = FaultyRunner(num_blocks, block_size)
    engine.runner = engine.requests.runner = runner
    engine.executor = StepExecutor(runner)
    return engine, runner
