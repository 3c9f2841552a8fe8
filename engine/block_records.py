"""BlockRecords: what is known of each block of the pool, in arrays, and KVSnapshot, the copy of them for others.

Invariant: refcount is the number of tables that hold the block; state is ACTIVE where that is above 0, else CACHED
where the block's content is indexed, else FREE.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from engine.sequence import Sequence

FREE, CACHED, ACTIVE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """A copy of the pool's state, arrays of length total.

    owner, turn and request are those of the sequence that wrote the block (or is about to fill it), position is the
    block's place in it. last_use (taken, hit or released) and last_hit are in seconds of time.time(), 0.0 for never.
    """

    block_size: int
    state: np.ndarray  # uint8: FREE, CACHED, ACTIVE
    refcount: np.ndarray  # int32
    owner: np.ndarray  # int32
    position: np.ndarray  # int32
    hits: np.ndarray  # int32
    last_use: np.ndarray  # float64
    turn: np.ndarray  # int32
    request: np.ndarray  # int64
    last_hit: np.ndarray  # float64
    pinned: np.ndarray  # bool


class BlockRecords:
    """Arrays [num_blocks], as KVSnapshot has them. Whole tables are written at a time: an array costs what one of its
    elements does."""

    def __init__(self, num_blocks: int) -> None:
        self.state = np.zeros(num_blocks, np.uint8)
        self.refcount = np.zeros(num_blocks, np.int32)
        self.owner = np.zeros(num_blocks, np.int32)
        self.position = np.zeros(num_blocks, np.int32)
        self.hits = np.zeros(num_blocks, np.int32)
        self.last_use = np.zeros(num_blocks, np.float64)
        self.turn = np.zeros(num_blocks, np.int32)
        self.request = np.zeros(num_blocks, np.int64)
        self.last_hit = np.zeros(num_blocks, np.float64)

    def hand_out(self, blocks: list[int], seq: Sequence, position: int) -> None:
        """seq has got these blocks, for the places of its table from `position` on."""
        # One block at a time is the rule while decoding, and cheaper by its number than by an array of it.
        count = len(blocks)
        at = blocks[0] if count == 1 else np.array(blocks)
        self.state[at] = ACTIVE
        self.refcount[at] = 1
        self.owner[at] = seq.owner
        self.turn[at] = seq.turn
        self.request[at] = seq.request_id
        self.position[at] = position if count == 1 else np.arange(position, position + count)
        self.hits[at] = 0
        self.last_use[at] = time.time()
        self.last_hit[at] = 0.0

    def hit(self, blocks: list[int]) -> list[int]:
        """One more holds these blocks, each of which is active or cached; returns those that nobody held before."""
        at = np.array(blocks, np.int64)
        unused = at[self.state[at] != ACTIVE].tolist()
        self.state[at] = ACTIVE
        self.refcount[at] += 1
        self.hits[at] += 1
        self.last_use[at] = self.last_hit[at] = time.time()
        return unused

    def let_go(self, blocks: list[int]) -> list[int]:
        """One less holds these blocks; returns, in their order, those that nobody holds now. They count as cached."""
        at = np.array(blocks, np.int64)
        self.refcount[at] -= 1
        unused = at[self.refcount[at] == 0]
        self.last_use[unused] = time.time()
        self.state[unused] = CACHED
        return unused.tolist()

    def snapshot(self, block_size: int, pinned: np.ndarray) -> KVSnapshot:
        """Copies; `pinned`, bool, is taken as it is."""
        return KVSnapshot(
            block_size,
            self.state.copy(),
            self.refcount.copy(),
            self.owner.copy(),
            self.position.copy(),
            self.hits.copy(),
            self.last_use.copy(),
            self.turn.copy(),
            self.request.copy(),
            self.last_hit.copy(),
            pinned,
        )

    def problems(self, sequences: list[Sequence], filled: np.ndarray) -> list[str]:
        """What is wrong with the books; sequences are all that hold blocks, filled is bool [num_blocks]."""
        held = np.zeros_like(self.refcount)
        for seq in sequences:
            held[seq.block_table] += 1
        state = np.where(held > 0, ACTIVE, np.where(filled, CACHED, FREE))
        found = [
            f"block {block} has refcount {self.refcount[block]} but {held[block]} holders"
            for block in np.flatnonzero(held != self.refcount)[:3]
        ]
        found += [
            f"block {block} is in state {self.state[block]}, expected {state[block]}"
            for block in np.flatnonzero(state != self.state)[:3]
        ]
        return found
