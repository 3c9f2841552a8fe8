"""StepExecutor: runs a step's plan, and when that fails finds out for whom.

A fault in a batch says nothing about which sequence it comes from. So the batch is split, and split again, until
what fails is one sequence alone; all others have run by then. Running a sequence's step a second time is harmless:
it writes the same keys and values to the same slots, and noise is keyed by seed and position.

    the device answers no more        DeviceLost, at once; likewise RanksLost, after which the engine starts over
    no memory                         caches freed, the batch halved (a lone chunk: its tokens); what does not run
                                      even so waits for the next step, but the newest of it is given up
    anything else                     split; a sequence that fails alone, twice, is given up
    ... in every part of the split    EngineBroken: it is not the sequences

A step that was launched behind another one is not split: its tokens are planned again, and its faults met then.

Every fault that is not an Exception (KeyboardInterrupt, SystemExit) passes through.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.faults import DeviceLost, EngineBroken, is_out_of_memory, root_cause
from engine.rank_group import RanksLost
from engine.scheduler import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    from engine.loading import Runner
    from engine.model_runner import StepHandle
    from engine.sequence import Sequence

logger = logging.getLogger("pageturn.engine")

# Parts that may fail before the first one runs. Parts are tried largest first, so that this many failures in a row
# would need a culprit in each sixteenth of the batch.
_MAX_FUTILE_TRIES = 48
# So many that find no memory for one token each, while nobody runs, speak for all.
_MAX_STARVED = 3
# A lone sequence that fails does not tell whether it or the engine is at fault; this many in a row do.
_MAX_BARREN_STEPS = 3
# After a fault of memory launches keep to half the size that failed; after so many good steps any size is tried.
_GOOD_STEPS_TO_RELAX = 64
# What took the memory may give it back: another process, or a buffer that is still being freed.
_PAUSE_BEFORE_SHEDDING = 0.25  # seconds


@dataclass(slots=True)
class StepOutcome:
    """What became of a plan.

    done       the parts that ran, each with the sampled ids and the collected handle
    failed     sequences to end, each with its cause
    postponed  planned, but not run: to be planned again
    calm       nothing went wrong
    """

    done: list[tuple[StepPlan, list[int], StepHandle]] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    postponed: list[ScheduledSequence] = field(default_factory=list)
    calm: bool = False


@dataclass(slots=True)
class Flight:
    """A step that was launched, by StepExecutor.begin(); began: then, time.perf_counter() seconds."""

    plan: StepPlan
    handle: StepHandle
    began: float


@dataclass(slots=True)
class _Part:
    plan: StepPlan
    alone_before: bool = False  # it is one sequence, and has failed alone once


class StepExecutor:
    """The one caller of runner.launch and runner.collect. Others may read its figures from any thread.

    launches          launches begun, over all steps
    tokens_in_flight  tokens of the launches that run now, 0 between launches
    longest           (seconds, tokens) of the launch that took longest so far
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.launches = 0
        self.tokens_in_flight = 0
        self.longest = (0.0, 1)
        self._max_tokens: int | None = None  # of one launch, after a fault of memory
        self._good_steps = 0
        self._barren_steps = 0
        self._caches_freed = False  # in this step
        self._last_end = 0.0  # of a launch

    def begin(self, plan: StepPlan) -> Flight:
        """Launch the plan; run() or drop() is to follow."""
        began = time.perf_counter()
        self.launches += 1
        self.tokens_in_flight += plan.num_tokens
        try:
            return Flight(plan, self._runner.launch(plan), began)
        except BaseException:
            self._end(plan, broken=True)
            raise

    def drop(self, flight: Flight) -> None:
        """Leave a launched step uncollected: what it samples is not wanted."""
        self._end(flight.plan)

    @property
    def is_calm(self) -> bool:
        """No fault of the last steps is still being dealt with."""
        return self._max_tokens is None and not self._barren_steps

    def run(
        self, plan: StepPlan, flight: Flight | None = None, meanwhile: Callable[[], None] | None = None
    ) -> StepOutcome:
        """Run every item of the plan that can be run. Raises EngineBroken or DeviceLost where none can.

        flight: the plan has been launched. meanwhile: called once while all of the plan runs.
        """
        if flight is not None:
            return self._land(flight, meanwhile)
        outcome = StepOutcome()
        starved: list[ScheduledSequence] = []
        parts, first, futile = deque([_Part(plan)]), None, 0
        self._caches_freed = False
        while parts:
            part = parts.popleft()
            if self._max_tokens is not None and part.plan.num_tokens > self._max_tokens:
                smaller = _parts_within(part.plan, self._max_tokens, outcome.postponed)
                parts.extendleft(reversed([_Part(p) for p in smaller]))
                continue
            whole = part.plan is plan and not part.alone_before
            error = self._try(part.plan, meanwhile if whole else None, outcome)
            if error is not None:
                if first is None:
                    logger.warning("a step of %d sequences failed: %s", len(plan.items), root_cause(error))
                first = first or error
                futile += not is_out_of_memory(error)
                if futile == _MAX_FUTILE_TRIES and not outcome.done:
                    raise EngineBroken(f"every part of the step failed: {root_cause(first)}") from first
                self._divide(part, error, parts, outcome, starved)
                if len(starved) == _MAX_STARVED and not outcome.done:
                    while parts:
                        starved.extend(parts.popleft().plan.items)
        if first is None:
            outcome.calm = True
            self._note_good_step()
            return outcome
        if outcome.done:
            self._barren_steps = 0
        if starved:
            self._shed(starved, outcome)
        elif outcome.failed and not outcome.done:
            self._barren_steps += 1
            if len(outcome.failed) > 1 or self._barren_steps == _MAX_BARREN_STEPS:
                raise EngineBroken(f"every part of the step failed: {root_cause(first)}") from first
        for seq, cause in outcome.failed:
            logger.error("request %d is given up: %s", seq.request_id, cause)
        return outcome

    # -- internals ------------------------------------------------------------------------------------

    def _try(self, plan: StepPlan, meanwhile: Callable[[], None] | None, outcome: StepOutcome) -> Exception | None:
        """Run a part; returns what it failed with."""
        try:
            flight = self.begin(plan)
        except Exception as error:
            return error
        return self._collect(flight, meanwhile, outcome)

    def _land(self, flight: Flight, meanwhile: Callable[[], None] | None) -> StepOutcome:
        outcome = StepOutcome()
        error = self._collect(flight, meanwhile, outcome)
        if error is None:
            outcome.calm = True
            self._note_good_step()
        else:
            self._check_device(error)
            logger.warning("a step launched ahead failed, and is planned again: %s", root_cause(error))
            outcome.postponed.extend(flight.plan.items)
        return outcome

    def _collect(self, flight: Flight, meanwhile: Callable[[], None] | None, outcome: StepOutcome) -> Exception | None:
        try:
            if meanwhile is not None:
                meanwhile()
        except BaseException:
            self.drop(flight)
            raise
        try:
            token_ids = self._runner.collect(flight.handle)
        except BaseException as error:
            self._end(flight.plan, broken=True)
            if isinstance(error, Exception):
                return error
            raise
        self._end(flight.plan)
        now = time.perf_counter()
        seconds, self._last_end = now - max(flight.began, self._last_end), now
        if seconds > self.longest[0]:
            self.longest = (seconds, flight.plan.num_tokens)
        outcome.done.append((flight.plan, token_ids, flight.handle))
        return None

    def _end(self, plan: StepPlan, *, broken: bool = False) -> None:
        self.tokens_in_flight -= plan.num_tokens
        if broken:
            # What a step that broke off has left in the runner may be half written: it is built anew.
            for item in plan.items:
                for seq in item.seq.drawn:
                    self._runner.forget(seq.seq_id)

    def _note_good_step(self) -> None:
        self._barren_steps = 0
        if self._max_tokens is not None:
            self._good_steps += 1
            if self._good_steps == _GOOD_STEPS_TO_RELAX:
                self._max_tokens = None

    def _divide(
        self,
        part: _Part,
        error: Exception,
        parts: deque[_Part],
        outcome: StepOutcome,
        starved: list[ScheduledSequence],
    ) -> None:
        """Decide what is tried next in place of a part that failed."""
        self._check_device(error)
        items = part.plan.items
        memory = is_out_of_memory(error)
        if memory:
            self._make_room(part.plan.num_tokens)
        if len(items) > 1:
            middle = len(items) // 2
            parts.append(_Part(_subplan(part.plan, 0, items[:middle])))
            parts.append(_Part(_subplan(part.plan, middle, items[middle:])))
        elif memory and items[0].num_tokens > 1:
            head = _shortened(items[0], items[0].num_tokens // 2, outcome.postponed)
            parts.append(_Part(_subplan(part.plan, 0, [head])))
        elif not part.alone_before:
            parts.append(_Part(part.plan, alone_before=True))
        elif memory:
            starved.extend(items)
        else:
            outcome.failed.append((items[0].seq, root_cause(error)))
            logger.error("what the runner raised for request %d:", items[0].seq.request_id, exc_info=error)

    def _check_device(self, error: Exception) -> None:
        """Raise where there is no use in going on: the ranks or the device are gone, or the runner says so itself."""
        if isinstance(error, (EngineBroken, RanksLost)):
            raise error
        try:
            self._runner.check_device()
        except Exception as still:
            if not is_out_of_memory(still):
                raise DeviceLost(f"the device answers no more: {root_cause(error)}") from error

    def _make_room(self, tokens: int) -> None:
        """Give back what is only kept for speed, and keep launches to half of what failed."""
        if not self._caches_freed:
            self._caches_freed = True
            self._runner.release_buffers()
            gc.collect()
        self._max_tokens = min(self._max_tokens or tokens, max(1, tokens // 2))
        self._good_steps = 0

    def _shed(self, starved: list[ScheduledSequence], outcome: StepOutcome) -> None:
        """Give up the newest of those for which there is no memory; the others are tried again in the next step."""
        time.sleep(_PAUSE_BEFORE_SHEDDING)
        self._max_tokens = None  # that one token had no room says nothing of how many have
        newest = max(starved, key=lambda item: item.seq.arrival_order)
        for item in starved:
            if item is not newest:
                outcome.postponed.append(item)
        outcome.failed.append(
            (newest.seq, "out of memory: not even one token of this request could be computed after caches were freed")
        )


def _subplan(plan: StepPlan, start: int, items: list[ScheduledSequence]) -> StepPlan:
    """A plan of `items`, which stand in `plan` from index `start` on; its decodes are in front here too."""
    decodes = max(0, min(start + len(items), plan.num_decodes) - start)
    return replace(plan, items=items, num_decodes=decodes, num_tokens=sum(item.num_tokens for item in items))


def _shortened(item: ScheduledSequence, count: int, postponed: list[ScheduledSequence]) -> ScheduledSequence:
    """The first `count` tokens of the item; the rest, and the token it would have sampled, are postponed."""
    postponed.append(replace(item, start=item.start + count, num_tokens=item.num_tokens - count))
    return replace(item, num_tokens=count, samples=False)


def _parts_within(plan: StepPlan, limit: int, postponed: list[ScheduledSequence]) -> Iterator[StepPlan]:
    """Parts of the plan, in its order, of at most `limit` tokens each; what is too long for one is shortened."""
    items: list[ScheduledSequence] = []
    start, room = 0, limit
    for item in plan.items:
        fitting = item if item.num_tokens <= limit else _shortened(item, limit, postponed)
        if fitting.num_tokens > room:
            yield _subplan(plan, start, items)
            start, items, room = start + len(items), [], limit
        items.append(fitting)
        room -= fitting.num_tokens
    if items:
        yield _subplan(plan, start, items)
