"""EventLog: what happened to blocks and requests, in a bounded ring that readers poll."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One event of one step.

    kind    "allocate" | "hit" | "evict" | "preempt" | "finish" | "abort" | "error"
    owner   the conversation's slot as given to add_request; for "evict" the slot whose content was lost
    count   blocks concerned ("finish": output tokens)
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
        self._ring: deque[BlockEvent] = deque(maxlen=capacity)
        self.last_seq = 0

    def add(self, kind: str, owner: int, request_id: int, count: int, detail: str = "") -> None:
        self.last_seq += 1
        self._ring.append(BlockEvent(self.last_seq, time.time(), kind, owner, request_id, count, detail))

    def continue_after(self, seq: int) -> None:
        """Number on from an earlier log's last event, so that whoever polls by number misses nothing."""
        self.last_seq = max(self.last_seq, seq)

    def since(self, seq: int) -> list[BlockEvent]:
        """Events after number `seq`, oldest first; those that left the ring are gone."""
        newest: list[BlockEvent] = []
        for event in reversed(self._ring.copy()):
            if event.seq <= seq:
                break
            newest.append(event)
        newest.reverse()
        return newest
