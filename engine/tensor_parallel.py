"""Tensor parallelism from the engine's side: TensorParallelRunner is to LLMEngine what a ModelRunner is.

Behind it every rank, 0 included, is a child process (rank.py; their group: rank_group.py), so that one which dies or
hangs takes nothing with it but itself. A step that is not answered in a time that grows with its work has hung. Either
way the group is in no known state, and RanksLost says so: it is to be rebuilt, and all that stood in its KV pool
computed again.

Where the ranks have captured a step as a graph, every rank holds the tokens that it draws, and the next step may be
sent before they have come back (see launch_ahead.py). The ranks answer in the order of launches.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.device import DevicePlan
from engine.launch_ahead import can_follow, drawn_by, shape_of
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanEncoder
from engine.rank import Chores, RankSetup, Ready
from engine.rank_group import Progress, RankGroup, RanksLost, in_words
from engine.scheduler import StepPlan
from engine.step_answer import awaited, fill
from models.config import ModelConfig

__all__ = ["RanksLost", "TensorParallelRunner"]

logger = logging.getLogger("pageturn.engine")

# A step may take so many times what the warm-up took for the same number of tokens, and PATIENCE on top.
_SLOWNESS = 20.0
PATIENCE = 10.0  # seconds
_PAIRS_PER_TOKEN = 1024  # attending to so many keys is reckoned as a token more
_LONGEST_STEP = 3600.0  # seconds; no step is waited for longer, whatever the reckoning says


class TensorParallelRunner:
    """Runs plans on tensor_parallel_size ranks; LLMEngine's Runner. num_blocks: the KV pool's, on every rank.

    Raises ValueError where the model cannot be served so. patience: seconds on top of what a step's work may take.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        model_config: ModelConfig,
        device: DevicePlan,
        *,
        limits: dict[str, int],
        progress: Progress,
    ) -> None:
        if sys.platform == "win32":
            raise ValueError("tensor_parallel_size above 1 needs Linux or macOS")
        self.patience = PATIENCE
        setup = RankSetup(
            rank=0,
            size=config.tensor_parallel_size,
            folder=Path(),
            config=config,
            path=path,
            model_config=model_config,
            device=device.device.type,
            dtype=str(device.dtype).removeprefix("torch."),
            attention_backend=device.attention_backend,
            block_size=device.block_size,
            limits=limits,
        )
        self._start = lambda: RankGroup(setup.size, lambda rank, folder: replace(setup, rank=rank, folder=folder))
        self._group = self._start()
        self._reset()
        self.num_blocks, ready = self._group.load(progress)
        self._take(ready)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Send the step of `plan` to every rank. RanksLost as collect().

        Behind a step in flight it is launched before that has ended, where can_follow() holds.
        """
        if self._sending:
            raise RanksLost("a command to the ranks was interrupted half-way")
        ahead, self._following = plan is self._following, None
        handle = awaited(plan)
        seconds = self.patience + _SLOWNESS * self._seconds_per_token * _work(plan)
        self._sending = True
        self._group.send((self._encoder.encode(plan), self._chores, ahead))
        self._in_flight.append((handle, min(seconds, _LONGEST_STEP)))
        self._drawn = drawn_by(plan) if shape_of(plan, self._shapes) is not None else frozenset()
        self._chores = Chores()
        self._sending = False
        return handle

    def collect(self, handle: StepHandle) -> list[int]:
        """Wait for the step; fills the handle and returns the sampled ids as ModelRunner.collect does.

        Raises the exception that the step ended with, where all ranks are still in step; else RanksLost.
        """
        assert any(handle is other for other, _ in self._in_flight), "collect() comes after launch()"
        while True:
            launched, seconds = self._in_flight[0]
            answers = self._group.answers(seconds)
            self._in_flight.popleft()
            error = next((answer[1] for answer in answers if answer[0] == "failed"), None)
            counts = {num_calls for _, _, num_calls in answers}
            if error is not None and (len(counts) > 1 or None in counts):
                raise RanksLost(f"the ranks cannot go on: {in_words(error)}") from error
            if launched is handle:
                break  # those before were dropped, or ^C came before their answers
        if error is not None:
            raise error
        return fill(handle, answers[0][1])

    def forget(self, seq_id: int) -> None:
        """Drop what the ranks keep for a sequence that has ended."""
        self._encoder.forget(seq_id)

    @property
    def leads(self) -> bool:
        """The last step that was launched leaves its tokens on every rank; see can_follow()."""
        return bool(self._drawn)

    def can_follow(self, plan: StepPlan) -> bool:
        """Whether the plan's step can be launched behind the last one before that is collected."""
        if shape_of(plan, self._shapes) is None or not can_follow(plan.items, self._drawn):
            return False
        self._following = plan
        return True

    def check_device(self) -> None:
        """A no-op: a rank whose device is lost says so with its answer, which is RanksLost."""

    def release_buffers(self) -> None:
        """Let the ranks give back memory that is only kept to save time, before the next step."""
        self._chores.release_buffers = True

    def scrub(self, blocks: list[int]) -> None:
        """Let the ranks overwrite the content of these blocks with zeros before the next step."""
        self._chores.scrub += blocks

    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Let the ranks copy blocks, {destination: source}, before the next step."""
        self._chores.copies |= copies

    def loss(self) -> RanksLost | None:
        """A rank that died while nothing ran."""
        return self._group.loss()

    def rebuild(self, loss: RanksLost, progress: Progress) -> None:
        """Replace the whole group; every KV block's content is gone, their number stays. Raises as __init__ does."""
        logger.error("%s; the ranks are started again, and all requests computed again", loss)
        started = time.monotonic()
        self._group.kill()
        self._group = self._start()
        self._reset()
        _, ready = self._group.load(progress, self.num_blocks)
        self._take(ready)
        progress("ready", 100.0)
        logger.info("the ranks are back after %.1f s", time.monotonic() - started)

    def exit(self) -> None:
        """End the ranks; a second call is a no-op."""
        self._group.end()

    def _take(self, ready: Ready) -> None:
        self._seconds_per_token, self._shapes = ready.seconds_per_token, ready.shapes
        self.prefill_rate = ready.prefill_rate

    def _reset(self) -> None:
        """The ranks are new, and know of nothing."""
        self._encoder = PlanEncoder()
        self._chores = Chores()
        self._sending = False
        self._in_flight: deque[tuple[StepHandle, float]] = deque()  # by age, with the seconds that each may take
        self._following: StepPlan | None = None  # which can follow the last step
        self._drawn: frozenset[int] = frozenset()  # the sequences whose tokens the last step leaves on the ranks


def _work(plan: StepPlan) -> float:
    """A step's work in tokens; attention over long contexts counts beside them."""
    pairs = sum(item.num_tokens * (item.start + item.num_tokens) for item in plan.items)
    return plan.num_tokens + pairs / _PAIRS_PER_TOKEN
