"""BlockManager: who holds which KV block, what stands in it, and which one goes next.

It owns the bookkeeping of the pool (reference counts, the content index, the order of eviction) and never
touches keys or values themselves. The life of a block:

    free ──allocate──► active (refcount >= 1) ──release──► cached (refcount 0, content indexed)
      ▲                   │        ▲                          │        │
      └─ release, content │        └───────── hit ────────────┘        │
         not indexed ─────┘                                            │
      ▲────────────────────────────── evict ───────────────────────────┘

Blocks without content are handed out first, then cached ones, least recently released first; a sequence
releases its tail before its head, so that a prefix shared by many is the last to go.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash

from engine.events import EventLog
from engine.sequence import Sequence

FREE, CACHED, ACTIVE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds. All of it is compared on a hit, so that a hash collision cannot serve
    another prompt's keys and values."""

    hash: bytes
    parent: bytes
    tokens: bytes
    salt: bytes


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """A copy of the pool's state, arrays of length total. owner and position are those of the sequence that
    wrote the block; last_use is in seconds of time.time(), 0.0 for a block never used."""

    block_size: int
    state: np.ndarray  # uint8: FREE, CACHED, ACTIVE
    refcount: np.ndarray  # int32
    owner: np.ndarray  # int32
    position: np.ndarray  # int32
    hits: np.ndarray  # int32
    last_use: np.ndarray  # float64


class BlockManager:
    """The pool of `num_blocks` blocks of `block_size` tokens each. Used by one thread only, but for snapshot()."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, events: EventLog | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events = events or EventLog()
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: list[BlockContent | None] = [None] * num_blocks
        self._index: dict[bytes, list[int]] = {}
        self._state = np.zeros(num_blocks, np.uint8)
        self._refcount = np.zeros(num_blocks, np.int32)
        self._owner = np.zeros(num_blocks, np.int32)
        self._position = np.zeros(num_blocks, np.int32)
        self._hits = np.zeros(num_blocks, np.int32)
        self._last_use = np.zeros(num_blocks, np.float64)

    # -- counts ---------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks with neither holder nor content."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can hand out: free ones, and cached ones by evicting them."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    # -- prefix ---------------------------------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The longest chain of resident blocks that holds a prefix of seq; changes nothing in the pool.

        At least one token is left over, because its logits are needed to go on.
        """
        if not self.enable_prefix_caching:
            return []
        matched: list[int] = []
        limit = (len(seq.token_ids) - 1) // self.block_size
        self._extend_hashes(seq, limit)
        for position in range(limit):
            block = self._lookup(seq, position)
            if block is None:
                break
            matched.append(block)
        return matched

    def can_admit(self, seq: Sequence, matched: list[int], reserve: int = 0) -> bool:
        """Whether every token of seq finds a block, `matched` ones reused, with `reserve` blocks to spare."""
        revived = sum(1 for b in matched if self._state[b] == CACHED)
        needed = self.blocks_for(len(seq.token_ids)) - len(matched)
        return needed + reserve <= self.num_available - revived

    def admit(self, seq: Sequence, matched: list[int]) -> None:
        """Give seq the matched blocks and new ones for the rest of its tokens. Call can_admit before."""
        if seq.block_table:
            raise ValueError(f"request {seq.request_id} already holds {len(seq.block_table)} blocks")
        now = time.time()
        for block in matched:
            if self._refcount[block] == 0:
                del self._cached[block]
                self._state[block] = ACTIVE
            self._refcount[block] += 1
            self._hits[block] += 1
            self._last_use[block] = now
        seq.block_table.extend(matched)
        seq.num_indexed_blocks = len(matched)
        seq.num_computed_tokens = seq.num_planned_tokens = len(matched) * self.block_size
        if matched:
            self.events.add("hit", seq.owner, seq.request_id, len(matched))
        self.grow(seq, len(seq.token_ids))

    # -- allocation -----------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend seq's table to hold num_tokens tokens; False, and nothing done, where blocks are lacking."""
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        now, evicted = time.time(), {}
        for _ in range(missing):
            block = self._take(seq.block_table[-1] + 1 if seq.block_table else -1)
            if self._content[block] is not None:
                evicted[int(self._owner[block])] = evicted.get(int(self._owner[block]), 0) + 1
                self._forget(block)
            self._state[block] = ACTIVE
            self._refcount[block] = 1
            self._owner[block] = seq.owner
            self._position[block] = len(seq.block_table)
            self._hits[block] = 0
            self._last_use[block] = now
            seq.block_table.append(block)
        for owner, count in evicted.items():
            self.events.add("evict", owner, seq.request_id, count)
        self.events.add("allocate", seq.owner, seq.request_id, missing)
        return True

    def index_full_blocks(self, seq: Sequence) -> None:
        """Make the blocks that seq has filled since the last call findable. Call it after their step is done."""
        if not self.enable_prefix_caching:
            return
        full = seq.num_computed_tokens // self.block_size
        if full <= seq.num_indexed_blocks:
            return
        self._extend_hashes(seq, full)
        for position in range(seq.num_indexed_blocks, full):
            block = seq.block_table[position]
            content = self._content_of(seq, position)
            self._content[block] = content
            self._index.setdefault(content.hash, []).append(block)
        seq.num_indexed_blocks = full

    def release(self, seq: Sequence) -> None:
        """Take back every block of seq, tail first; full ones stay findable until they are evicted."""
        now = time.time()
        for block in reversed(seq.block_table):
            self._refcount[block] -= 1
            if self._refcount[block] > 0:
                continue
            self._last_use[block] = now
            if self._content[block] is None:
                self._state[block] = FREE
                self._empty[block] = None
                self._empty.move_to_end(block, last=False)
            else:
                self._state[block] = CACHED
                self._cached[block] = None
        seq.block_table = []
        seq.num_indexed_blocks = 0
        seq.num_computed_tokens = seq.num_planned_tokens = 0

    def clear_cache(self) -> int:
        """Forget every cached block that nobody holds; returns how many."""
        count = len(self._cached)
        for block in list(self._cached):
            del self._cached[block]
            self._forget(block)
            self._state[block] = FREE
            self._empty[block] = None
        return count

    # -- inspection -----------------------------------------------------------------------------------

    def snapshot(self) -> KVSnapshot:
        """Copies of the pool's arrays; may be called from any thread and may then show a step half done."""
        return KVSnapshot(
            self.block_size,
            self._state.copy(),
            self._refcount.copy(),
            self._owner.copy(),
            self._position.copy(),
            self._hits.copy(),
            self._last_use.copy(),
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise RuntimeError unless the books balance against the tables of all live sequences. O(pool)."""
        held = np.zeros(self.num_blocks, np.int32)
        for seq in sequences:
            if len(set(seq.block_table)) != len(seq.block_table):
                raise RuntimeError(f"{seq} holds a block twice: {seq.block_table}")
            held[seq.block_table] += 1
        filled = np.array([content is not None for content in self._content])
        state = np.where(held > 0, ACTIVE, np.where(filled, CACHED, FREE))
        problems = []
        for block in np.flatnonzero(held != self._refcount)[:3]:
            problems.append(f"block {block} has refcount {self._refcount[block]} but {held[block]} holders")
        for block in np.flatnonzero(state != self._state)[:3]:
            problems.append(f"block {block} is in state {self._state[block]}, expected {state[block]}")
        for listed, expected in ((self._empty, FREE), (self._cached, CACHED)):
            if set(listed) != set(np.flatnonzero(state == expected).tolist()):
                problems.append(f"the list of blocks in state {expected} differs from the blocks in that state")
        counted = self.num_free + self.num_cached + int((held > 0).sum())
        if counted != self.num_blocks:
            problems.append(f"free + cached + active is {counted}, not {self.num_blocks}")
        indexed = {block: key for key, blocks in self._index.items() for block in blocks}
        for block, content in enumerate(self._content):
            if indexed.get(block) != (content.hash if content else None):
                problems.append(f"block {block} is not indexed under what it holds")
        if problems:
            raise RuntimeError("KV block bookkeeping is broken: " + "; ".join(problems[:5]))

    # -- internals ------------------------------------------------------------------------------------

    def _take(self, preferred: int) -> int:
        """Remove one block from the free list. `preferred` (the neighbour of the sequence's last block) keeps
        a sequence contiguous where nobody else wants the place, which lets attention read it without a copy."""
        if preferred in self._empty:
            del self._empty[preferred]
            return preferred
        if self._empty:
            return self._empty.popitem(last=False)[0]
        return self._cached.popitem(last=False)[0]

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is None:
            return
        copies = self._index[content.hash]
        copies.remove(block)
        if not copies:
            del self._index[content.hash]
        self._content[block] = None

    def _lookup(self, seq: Sequence, position: int) -> int | None:
        copies = self._index.get(seq.block_hashes[position])
        if not copies:
            return None
        wanted = self._content_of(seq, position)
        for block in copies:
            if self._content[block] == wanted:
                return block
        return None

    def _content_of(self, seq: Sequence, position: int) -> BlockContent:
        parent = seq.block_hashes[position - 1] if position else b""
        return BlockContent(seq.block_hashes[position], parent, self._token_bytes(seq, position), seq.salt)

    def _token_bytes(self, seq: Sequence, position: int) -> bytes:
        start = position * self.block_size
        return array("i", seq.token_ids[start : start + self.block_size]).tobytes()

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        for position in range(len(seq.block_hashes), count):
            parent = seq.block_hashes[position - 1] if position else b""
            digest = xxhash.xxh3_128(parent)
            digest.update(self._token_bytes(seq, position))
            digest.update(seq.salt)
            seq.block_hashes.append(digest.digest())
