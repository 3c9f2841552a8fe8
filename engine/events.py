"""EventLog: what happened to blocks and requests, in a bounded ring that readers poll.

Always on: a step of hundreds of sequences writes a few dozen events, and none may cost it anything that shows. So
the ring keeps plain tuples, and BlockEvent objects are made for whoever reads.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One event of one step. time is in seconds of time.time().

    kind        what count counts
    "allocate"  blocks taken for new tokens
    "hit"       cached or held blocks reused by a request that is admitted
    "share"     those of the hits that another request holds at that moment, so that both now do
    "evict"     cached blocks whose content was lost to make room; owner is whose content it was
    "preempt"   blocks given back by a request that has to wait again
    "copy"      blocks copied because a holder was about to write into a shared one
    "pin"       blocks kept from eviction; "unpin" the same given up, detail says why where nobody asked for it
    "finish"    output tokens of a request that ended; "abort" and "error" likewise
    """

    seq: int
    time: float
    kind: str
    owner: int
    request_id: int
    count: int
    detail: str = ""


class EventLog:
    """Written by the engine thread only; read from any thread (deque operations are atomic)."""

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[tuple[int, float, str, int, int, int, str]] = deque(maxlen=capacity)
        self.last_seq = 0

    def add(self, kind: str, owner: int, request_id: int, count: int, detail: str = "") -> None:
        self.last_seq = seq = self.last_seq + 1
        self._ring.append((seq, time.time(), kind, owner, request_id, count, detail))

    def continue_after(self, seq: int) -> None:
        """Number on from an earlier log's last event, so that whoever polls by number misses nothing."""
        self.last_seq = max(self.last_seq, seq)

    def since(self, seq: int) -> list[BlockEvent]:
        """Events after number `seq`, oldest first; those that left the ring are gone."""
        ring = self._ring.copy()
        # Numbers in the ring are consecutive but for a gap at continue_after, before which nothing was added.
        newer = min(len(ring), max(0, ring[-1][0] - seq)) if ring else 0
        return [BlockEvent(*event) for event in islice(ring, len(ring) - newer, None) if event[0] > seq]
