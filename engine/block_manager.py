"""BlockManager: who holds which KV block, what stands in it, and which one goes next.

It owns the bookkeeping of the pool (reference counts, the content index, the order of eviction) and never
touches keys or values themselves. The life of a block:

    free ──allocate──► active (refcount >= 1) ──release──► cached (refcount 0, content indexed)
      ▲                   │        ▲                          │        │
      └─ release, content │        └───────── hit ────────────┘        │
         not indexed ─────┘                                            │
      ▲────────────────────────────── evict ───────────────────────────┘

Blocks without content are handed out first, then cached ones, least recently released first; a sequence
releases its tail before its head, so that a prefix shared by many is the last to go. Pinned blocks that nobody
holds count as cached but stand outside this order.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import xxhash

from engine.events import EventLog
from engine.pins import Pins
from engine.sequence import Sequence

FREE, CACHED, ACTIVE = 0, 1, 2


class BlockContent(NamedTuple):
    """What a full block holds. All of it is compared on a hit, so that a hash collision cannot serve
    another prompt's keys and values."""

    hash: bytes
    parent: bytes
    tokens: bytes
    salt: bytes


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


class BlockManager:
    """The pool of `num_blocks` blocks of `block_size` tokens each. Used by one thread only, but for snapshot().

    At most max_pinned blocks may be pinned (None: half of the pool).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        events: EventLog | None = None,
        max_pinned: int | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events = events or EventLog()
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # evictable
        self._kept: set[int] = set()  # cached and pinned
        self.pins = Pins(num_blocks, num_blocks // 2 if max_pinned is None else max_pinned)
        self._content: list[BlockContent | None] = [None] * num_blocks
        self._index: dict[bytes, list[int]] = {}
        self._doubtful: set[int] = set()
        self.doubtful_in_use: list[int] = []
        self._state = np.zeros(num_blocks, np.uint8)
        self._refcount = np.zeros(num_blocks, np.int32)
        self._owner = np.zeros(num_blocks, np.int32)
        self._position = np.zeros(num_blocks, np.int32)
        self._hits = np.zeros(num_blocks, np.int32)
        self._last_use = np.zeros(num_blocks, np.float64)
        self._turn = np.zeros(num_blocks, np.int32)
        self._request = np.zeros(num_blocks, np.int64)
        self._last_hit = np.zeros(num_blocks, np.float64)
        # {destination: source} of the copies on write that the next step needs first; whoever steps empties it.
        self.pending_copies: dict[int, int] = {}

    # -- counts ---------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks with neither holder nor content."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that grow() can hand out: free ones, and cached ones that are not pinned, by evicting them."""
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
        limit = len(seq.token_ids) - 1
        if wanted := seq.unscored_prompt(0, limit):
            limit = wanted.start  # from here on its logits are asked for
        count = limit // self.block_size
        self._extend_contents(seq, count)
        held, index = self._content, self._index
        for content in islice(seq.block_contents, count):
            for block in index.get(content.hash, ()):
                if held[block] == content:
                    matched.append(block)
                    break
            else:
                break
        return matched

    def resident_prefix(self, seq: Sequence) -> int:
        """How many leading blocks of seq are resident, told by their hashes alone: a hint; match_prefix() decides.

        Goes on from what it found last, so that asking at every step costs a look or two, not a walk over the prompt.
        """
        if not self.enable_prefix_caching:
            return 0
        limit = (len(seq.token_ids) - 1) // self.block_size
        self._extend_contents(seq, limit)
        count = min(seq.num_resident_hint, limit)
        while count and seq.block_contents[count - 1].hash not in self._index:
            count -= 1
        while count < limit and seq.block_contents[count].hash in self._index:
            count += 1
        seq.num_resident_hint = count
        return count

    def can_admit(self, seq: Sequence, matched: list[int], reserve: int = 0) -> bool:
        """Whether every token of seq finds a block, `matched` ones reused, with `reserve` blocks to spare."""
        revived = sum(1 for block in matched if block in self._cached)
        needed = self.blocks_for(len(seq.token_ids)) - len(matched)
        return needed + reserve <= self.num_available - revived

    def admit(self, seq: Sequence, matched: list[int]) -> None:
        """Give seq the matched blocks and new ones for the rest of its tokens. Call can_admit before."""
        if seq.block_table:
            raise ValueError(f"request {seq.request_id} already holds {len(seq.block_table)} blocks")
        at = np.array(matched, np.int64)
        unused = at[self._state[at] != ACTIVE].tolist()
        for block in unused:
            if block in self._cached:
                del self._cached[block]
            else:
                self._kept.discard(block)
        shared = len(matched) - len(unused)
        self._state[at] = ACTIVE
        self._refcount[at] += 1
        self._hits[at] += 1
        self._last_use[at] = self._last_hit[at] = time.time()
        seq.block_table.extend(matched)
        seq.num_indexed_blocks = len(matched)
        seq.num_computed_tokens = seq.num_planned_tokens = len(matched) * self.block_size
        if matched:
            self.events.add("hit", seq.owner, seq.request_id, len(matched))
        if shared:
            self.events.add("share", seq.owner, seq.request_id, shared)
        self.grow(seq, len(seq.token_ids))

    # -- allocation -----------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend seq's table to hold num_tokens tokens, with the block that it writes to next for itself alone; False,
        and nothing done, where blocks are lacking."""
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if seq.may_write_to_shared:
            shared = self._writes_to_shared(seq)
            if max(missing, 0) + shared > self.num_available:
                return False
            if shared:
                self._copy_last_block(seq)
            seq.may_write_to_shared = False
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        now, evicted = time.time(), {}
        for _ in range(missing):
            block = self._allocate(seq, len(seq.block_table), now, evicted)
            seq.block_table.append(block)
        for owner, count in evicted.items():
            self.events.add("evict", owner, seq.request_id, count)
        self.events.add("allocate", seq.owner, seq.request_id, missing)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let child, which holds no blocks, share all that parent has computed. Whichever of the holders of a block
        that is filled in part writes to it first, gets a copy (see grow); the last one writes in place."""
        if child.block_table:
            raise ValueError(f"{child} already holds {len(child.block_table)} blocks")
        child.block_table = parent.block_table[: self.blocks_for(parent.num_computed_tokens)]
        self._refcount[child.block_table] += 1
        parent.may_write_to_shared = child.may_write_to_shared = True
        child.block_contents = parent.block_contents[: parent.num_indexed_blocks]
        child.num_resident_hint = 0
        child.num_indexed_blocks = parent.num_indexed_blocks
        child.num_computed_tokens = child.num_planned_tokens = parent.num_computed_tokens

    def index_full_blocks(self, seq: Sequence) -> None:
        """Make the blocks that seq has filled since the last call findable. Call it after their step is done."""
        if not self.enable_prefix_caching:
            return
        full = seq.num_computed_tokens // self.block_size
        if full <= seq.num_indexed_blocks:
            return
        self._extend_contents(seq, full)
        for position in range(seq.num_indexed_blocks, full):
            block, content = seq.block_table[position], seq.block_contents[position]
            self._content[block] = content
            self._index.setdefault(content.hash, []).append(block)
        seq.num_indexed_blocks = full
        if seq.owner in self.pins:
            # The whole chain, head first: a pinned block behind an evicted one could not be found.
            self._pin(seq.owner, seq.block_table[:full])

    def release(self, seq: Sequence) -> None:
        """Take back every block of seq, tail first; full ones stay findable until they are evicted."""
        at = np.array(seq.block_table[::-1], np.int64)
        self._refcount[at] -= 1
        unused = at[self._refcount[at] == 0]
        self._last_use[unused] = time.time()
        self._state[unused] = CACHED
        for block in unused.tolist():
            if self._content[block] is None:
                self._state[block] = FREE
                self._empty[block] = None
                self._empty.move_to_end(block, last=False)
            else:
                self._set_aside(block)
        seq.block_table = []
        seq.num_indexed_blocks = 0
        seq.num_computed_tokens = seq.num_planned_tokens = 0

    def distrust(self, seq: Sequence) -> None:
        """Make all that seq holds unfindable: it read or wrote keys and values that are not finite.

        Whoever is given such a block next finds it in `doubtful_in_use`, and must overwrite its content before the
        step: a slot that attention masks out still enters it as 0 * value, which a NaN survives.
        """
        for block in seq.block_table:
            self._forget(block)
        self._doubtful.update(seq.block_table)

    def clear_cache(self, *, pinned_too: bool = False) -> int:
        """Forget every cached block that is not pinned; returns how many.

        pinned_too: all of them, where the memory behind the pool is lost. A pinned conversation then stays pinned in
        what it writes from now on.
        """
        blocks = [*self._cached, *self._kept] if pinned_too else list(self._cached)
        for block in blocks:
            self._cached.pop(block, None)
            self._kept.discard(block)
            self._forget(block)
            self._state[block] = FREE
            self._empty[block] = None
        return len(blocks)

    # -- pins -----------------------------------------------------------------------------------------

    def pin(self, owner: int) -> int:
        """Keep owner's conversation from eviction: every full block that it wrote, every block before those in their
        chains whoever wrote it, and, as far as the limit allows, what it will write. Returns the blocks now pinned
        for it; a second call adds what has become resident since.

        Raises ValueError, and pins nothing, for owner 0 (nobody's) and where the pool's limit would be passed.

        A pin outranks other conversations' cached blocks, never a request: where a request could otherwise not go
        on, alone in the pool, the longest pinned conversation loses its pin (release_pin_for()).
        """
        if owner < 1:
            raise ValueError(f"owner={owner} cannot be pinned; blocks of nobody in particular carry 0, give 1 or more")
        chain = self._chain_of(owner)
        missing = [block for block in self.pins.missing(owner, chain) if not self.pins.counts[block]]
        room = self.pins.limit - self.pins.num_blocks
        if len(missing) > room:
            raise ValueError(
                f"pinning conversation {owner} takes {len(missing)} more blocks; {room} are left of the "
                f"{self.pins.limit} that may be pinned in this pool of {self.num_blocks}: unpin another one first"
            )
        self._pin(owner, chain)
        return len(self.pins.blocks(owner))

    def unpin(self, owner: int, *, request_id: int = 0, reason: str = "") -> int:
        """Let owner's blocks be evicted again, as if they had been released now; returns how many nobody else has
        pinned. An owner without pins is a no-op. request_id and reason are for the event log."""
        if owner not in self.pins:
            return 0
        freed = self.pins.remove(owner)
        for block in sorted(freed, key=lambda b: -int(self._position[b])):
            if block in self._kept:
                self._kept.remove(block)
                self._cached[block] = None
        self.events.add("unpin", owner, request_id, len(freed), reason)
        return len(freed)

    def release_pin_for(self, seq: Sequence) -> bool:
        """Unpin the longest pinned conversation with idle blocks so that seq can go on; False where there is none."""
        for owner in self.pins.owners():
            if not self._kept.isdisjoint(self.pins.blocks(owner)):
                self.unpin(owner, request_id=seq.request_id, reason="a request needed the room")
                return True
        return False

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
            self._turn.copy(),
            self._request.copy(),
            self._last_hit.copy(),
            self.pins.counts > 0,
        )

    def eviction_order(self) -> Iterator[int]:
        """The cached blocks that may be evicted, the next one first."""
        return iter(self._cached)

    def owner_of(self, block: int) -> int:
        return int(self._owner[block])

    def continuations(self, parent: bytes, salt: bytes) -> list[tuple[int, list[int]]]:
        """(block, its token ids) of every resident full block that follows the block hashed `parent` (b"": begins a
        prompt) under that salt, the most recently used first. O(pool)."""
        found = [
            (block, list(array("i", content.tokens)))
            for block, content in enumerate(self._content)
            if content is not None and content.parent == parent and content.salt == salt
        ]
        return sorted(found, key=lambda entry: -self._last_use[entry[0]])

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
        if not self._kept.isdisjoint(self._cached):
            problems.append(f"blocks {sorted(self._kept & set(self._cached))} are both kept and evictable")
        for listed, pinned in ((self._cached, False), (self._kept, True)):
            for block in [b for b in listed if (self.pins.counts[b] > 0) != pinned]:
                problems.append(f"block {block} is on the wrong list for being pinned {self.pins.counts[block]} times")
        problems += self.pins.problems(filled)
        for listed, expected in ((set(self._empty), FREE), (self._kept.union(self._cached), CACHED)):
            if listed != set(np.flatnonzero(state == expected).tolist()):
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

    def _allocate(self, seq: Sequence, position: int, now: float, evicted: dict[int, int]) -> int:
        """A block for `position` of seq's table; counts in `evicted`, by owner, the content that it costs."""
        block = self._take(seq.block_table[-1] + 1 if seq.block_table else -1)
        if self._content[block] is not None:
            evicted[int(self._owner[block])] = evicted.get(int(self._owner[block]), 0) + 1
            self._forget(block)
        if block in self._doubtful:
            self._doubtful.remove(block)
            self.doubtful_in_use.append(block)
        self._state[block] = ACTIVE
        self._refcount[block] = 1
        self._owner[block] = seq.owner
        self._turn[block] = seq.turn
        self._request[block] = seq.request_id
        self._position[block] = position
        self._hits[block] = 0
        self._last_use[block] = now
        self._last_hit[block] = 0.0
        return block

    def _writes_to_shared(self, seq: Sequence) -> bool:
        position = seq.num_planned_tokens // self.block_size
        return position < len(seq.block_table) and self._refcount[seq.block_table[position]] > 1

    def _copy_last_block(self, seq: Sequence) -> None:
        """Give seq its own copy of the block that its next token goes to; only the last can be filled in part."""
        position = seq.num_planned_tokens // self.block_size
        source = seq.block_table[position]
        evicted: dict[int, int] = {}
        copy = self._allocate(seq, position, time.time(), evicted)
        self._refcount[source] -= 1
        # A new list, so that whoever keeps the table elsewhere sees that not only its end has changed.
        seq.block_table = [*seq.block_table[:position], copy, *seq.block_table[position + 1 :]]
        self.pending_copies[copy] = source
        for owner, count in evicted.items():
            self.events.add("evict", owner, seq.request_id, count)
        self.events.add("copy", seq.owner, seq.request_id, 1)

    def _take(self, preferred: int) -> int:
        """Remove one block from the free list. `preferred` (the neighbour of the sequence's last block) keeps
        a sequence contiguous where nobody else wants the place, which lets attention read it without a copy."""
        if preferred in self._empty:
            del self._empty[preferred]
            return preferred
        if self._empty:
            return self._empty.popitem(last=False)[0]
        return self._cached.popitem(last=False)[0]

    def _set_aside(self, block: int) -> None:
        """Put a block that has content and no holder where it belongs."""
        if self.pins.counts[block]:
            self._kept.add(block)
        else:
            self._cached[block] = None

    def _pin(self, owner: int, blocks: list[int]) -> None:
        new = self.pins.add(owner, blocks)
        for block in new:
            if block in self._cached:
                del self._cached[block]
                self._kept.add(block)
        if new:
            self.events.add("pin", owner, 0, len(new))

    def _chain_of(self, owner: int) -> list[int]:
        """The full blocks that owner wrote and all that stand before them in their chains, heads first."""
        found: dict[int, None] = {}
        for block in sorted(np.flatnonzero(self._owner == owner).tolist(), key=lambda b: int(self._position[b])):
            chain: list[int] = []
            content = self._content[block]
            while content is not None and block not in found:
                chain.append(block)
                parents = [b for b in self._index.get(content.parent, ()) if self._is(b, content.parent, content.salt)]
                if not parents:
                    break
                block = parents[0]
                content = self._content[block]
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def _is(self, block: int, key: bytes, salt: bytes) -> bool:
        content = self._content[block]
        return content is not None and content.hash == key and content.salt == salt

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is None:
            return
        copies = self._index[content.hash]
        copies.remove(block)
        if not copies:
            del self._index[content.hash]
        self._content[block] = None
        self.pins.drop(block)

    def _extend_contents(self, seq: Sequence, count: int) -> None:
        """Bring seq.block_contents to `count` blocks, whose tokens are known."""
        contents = seq.block_contents
        done, width = len(contents), 4 * self.block_size
        if done >= count:
            return
        tokens = array("i", seq.token_ids[done * self.block_size : count * self.block_size]).tobytes()
        parent = contents[-1].hash if contents else b""
        for start in range(0, len(tokens), width):
            own = tokens[start : start + width]
            key = xxhash.xxh3_128_digest(parent + own + seq.salt)
            contents.append(BlockContent(key, parent, own, seq.salt))
            parent = key
