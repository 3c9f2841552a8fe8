"""WaitingQueue: who is admitted next.

Three rules, in this order:

1. BACKGROUND comes last, whatever its age: by its definition it runs only while nothing else is there.
2. Above it, each level of priority is worth AGING_STEPS steps of waiting. A request that has waited that much longer
   than one of the next level goes first, so that none starves: it yields only to what arrived before it, or within
   AGING_STEPS * (levels between them) steps after it. The difference of two ages never changes, so the order of two
   requests is fixed when the later one arrives, nothing is sorted anew, and the same order says who is preempted.
3. Cache-aware: among the first WINDOW requests the one with the longest resident prefix may overtake, so that it
   finds its blocks before they are evicted. It never overtakes a request of higher priority, nor one that was
   preempted in mid-stream, and any one request is overtaken at most MAX_OVERTAKEN times in its life; after that
   nothing behind it is looked at.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import overload

from engine.outputs import RequestPriority
from engine.sequence import Sequence

AGING_STEPS = 100
WINDOW = 16
MAX_OVERTAKEN = 8


def queue_key_of(seq: Sequence, step: int) -> tuple[int, int, int]:
    """The key of a request that arrives at `step`; smaller is served first. Kept over preemptions."""
    is_background = seq.priority == RequestPriority.BACKGROUND
    return (is_background, step - AGING_STEPS * seq.priority, seq.arrival_order)


def by_queue_key(seq: Sequence) -> tuple[int, int, int]:
    assert seq.queue_key is not None, f"{seq} was never queued"
    return seq.queue_key


class WaitingQueue:
    """The waiting sequences in order of their keys."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...
    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._queue[index]

    def add(self, seq: Sequence, step: int) -> None:
        """Queue seq, which arrives at `step` or comes back from a preemption to its old place."""
        if seq.queue_key is None:
            seq.queue_key = queue_key_of(seq, step)
        bisect.insort(self._queue, seq, key=by_queue_key)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def favourite(self, resident: Callable[[Sequence], int], before: Sequence | None = None) -> Sequence:
        """The head, or the one that may overtake it: `resident` tells how many leading blocks of a request are in
        the cache. With `before`, only requests served before that one are looked at."""
        best = head = self._queue[0]
        if len(self._queue) == 1:
            return head
        most, highest = resident(head), head.priority
        for i in range(1, min(len(self._queue), WINDOW)):
            ahead, seq = self._queue[i - 1], self._queue[i]
            if ahead.num_overtaken >= MAX_OVERTAKEN or ahead.was_admitted:
                break
            if by_queue_key(seq)[0] != by_queue_key(head)[0]:
                break
            if before is not None and by_queue_key(seq) > by_queue_key(before):
                break
            if seq.priority >= highest and (blocks := resident(seq)) > most:
                best, most = seq, blocks
            highest = max(highest, seq.priority)
        return best

    def take(self, seq: Sequence) -> None:
        """Remove seq because it is admitted; those that it overtakes remember it."""
        for i, ahead in enumerate(self._queue):
            if ahead is seq:
                del self._queue[i]
                return
            ahead.num_overtaken += 1
        raise ValueError(f"{seq} is not waiting")
