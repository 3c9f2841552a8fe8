"""BlockManager: who holds which KV block, what stands in it, and which one goes next.

It owns the bookkeeping of the pool, of which BlockRecords, PrefixIndex, IdleBlocks and Pins each keep one book, and
never touches keys or values themselves. The life of a block:

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

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from engine.block_records import FREE, BlockRecords, KVSnapshot
from engine.events import EventLog
from engine.idle_blocks import IdleBlocks
from engine.pins import Pins
from engine.prefix_index import PrefixIndex
from engine.sequence import Sequence


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
        self.pins = Pins(num_blocks, num_blocks // 2 if max_pinned is None else max_pinned)
        self._records = BlockRecords(num_blocks)
        self._index = PrefixIndex(num_blocks, block_size)
        self._idle = IdleBlocks(num_blocks, self.pins)
        self._doubtful: set[int] = set()
        self.doubtful_in_use: list[int] = []
        # {destination: source} of the copies on write that the next step needs first; whoever steps empties it.
        self.pending_copies: dict[int, int] = {}

    # -- counts ---------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks with neither holder nor content."""
        return len(self._idle.empty)

    @property
    def num_cached(self) -> int:
        return len(self._idle.cached) + len(self._idle.kept)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that grow() can hand out: free ones, and cached ones that are not pinned, by evicting them."""
        return len(self._idle.empty) + len(self._idle.cached)

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
        limit = len(seq.token_ids) - 1
        if wanted := seq.unscored_prompt(0, limit):
            limit = wanted.start  # from here on its logits are asked for
        return self._index.match(seq, limit // self.block_size)

    def resident_prefix(self, seq: Sequence) -> int:
        """How many leading blocks of seq are resident, told by their hashes alone: a hint; match_prefix() decides.

        Goes on from what it found last, so that asking at every step costs a look or two, not a walk over the prompt.
        """
        if not self.enable_prefix_caching:
            return 0
        limit = (len(seq.token_ids) - 1) // self.block_size
        seq.num_resident_hint = self._index.count_resident(seq, limit, seq.num_resident_hint)
        return seq.num_resident_hint

    def can_admit(self, seq: Sequence, matched: list[int], reserve: int = 0) -> bool:
        """Whether every token of seq finds a block, `matched` ones reused, with `reserve` blocks to spare."""
        cached = self._idle.cached
        revived = sum(1 for block in matched if block in cached)
        needed = self.blocks_for(len(seq.token_ids)) - len(matched)
        return needed + reserve <= self.num_available - revived

    def admit(self, seq: Sequence, matched: list[int]) -> None:
        """Give seq the matched blocks and new ones for the rest of its tokens. Call can_admit before."""
        if seq.block_table:
            raise ValueError(f"request {seq.request_id} already holds {len(seq.block_table)} blocks")
        unused = self._records.hit(matched)
        self._idle.remove(unused)
        seq.block_table.extend(matched)
        seq.num_indexed_blocks = len(matched)
        seq.num_computed_tokens = seq.num_planned_tokens = len(matched) * self.block_size
        if matched:
            self.events.add("hit", seq.owner, seq.request_id, len(matched))
        if shared := len(matched) - len(unused):
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
        after = seq.block_table[-1] if seq.block_table else -2
        seq.block_table += self._allocate(seq, len(seq.block_table), missing, after)
        self.events.add("allocate", seq.owner, seq.request_id, missing)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let child, which holds no blocks, share all that parent has computed. Whichever of the holders of a block
        that is filled in part writes to it first, gets a copy (see grow); the last one writes in place."""
        if child.block_table:
            raise ValueError(f"{child} already holds {len(child.block_table)} blocks")
        child.block_table = parent.block_table[: self.blocks_for(parent.num_computed_tokens)]
        self._records.refcount[child.block_table] += 1
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
        self._index.add(seq, seq.num_indexed_blocks, full)
        seq.num_indexed_blocks = full
        if seq.owner in self.pins:
            # The whole chain, head first: a pinned block behind an evicted one could not be found, nor one behind what
            # seq holds but is distrusted since, because another request had read it and went wrong.
            held = self._index.contents
            self._pin(seq.owner, list(takewhile(lambda block: held[block] is not None, seq.block_table[:full])))

    def note_contents(self, seq: Sequence, num_tokens: int) -> None:
        """Do the work of index_full_blocks() that can be done before the step is: num_tokens tokens are known."""
        if self.enable_prefix_caching:
            self._index.extend(seq, num_tokens // self.block_size)

    def release(self, seq: Sequence) -> None:
        """Take back every block of seq, tail first; full ones stay findable until they are evicted."""
        if not seq.num_output_tokens:
            self._doubtful.update(seq.block_table)  # nobody has seen logits that tell whether all in there is finite
        unused = self._records.let_go(seq.block_table[::-1])
        contents = self._index.contents
        filled = [block for block in unused if contents[block] is not None]
        if len(filled) < len(unused):
            empty = [block for block in unused if contents[block] is None]
            self._records.state[empty] = FREE
            self._idle.add_empty(empty)
        self._idle.add_filled(filled)
        seq.block_table = []
        seq.num_indexed_blocks = 0
        seq.num_computed_tokens = seq.num_planned_tokens = 0

    def distrust(self, seq: Sequence) -> None:
        """Make all that seq holds unfindable: it read or wrote keys and values that are not finite.

        Whoever is given such a block next finds it in `doubtful_in_use`, and must overwrite its content before the
        step: a slot that attention masks out still enters it as 0 * value, which a NaN survives.
        """
        self._forget(seq.block_table)
        self._doubtful.update(seq.block_table)

    def clear_cache(self, *, pinned_too: bool = False) -> int:
        """Forget every cached block that is not pinned; returns how many.

        pinned_too: all of them, where the memory behind the pool is lost. A pinned conversation then stays pinned in
        what it writes from now on.
        """
        blocks = self._idle.empty_all(kept_too=pinned_too)
        self._forget(blocks)
        self._records.state[blocks] = FREE
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
        self._idle.keep_no_more(sorted(freed, key=lambda block: -int(self._records.position[block])))
        self.events.add("unpin", owner, request_id, len(freed), reason)
        return len(freed)

    def release_pin_for(self, seq: Sequence) -> bool:
        """Unpin the longest pinned conversation with idle blocks so that seq can go on; False where there is none."""
        for owner in self.pins.owners():
            if not self._idle.kept.isdisjoint(self.pins.blocks(owner)):
                self.unpin(owner, request_id=seq.request_id, reason="a request needed the room")
                return True
        return False

    # -- inspection -----------------------------------------------------------------------------------

    def snapshot(self) -> KVSnapshot:
        """Copies of the pool's arrays; may be called from any thread and may then show a step half done."""
        return self._records.snapshot(self.block_size, self.pins.counts > 0)

    def eviction_order(self) -> Iterator[int]:
        """The cached blocks that may be evicted, the next one first."""
        return iter(self._idle.cached)

    def owner_of(self, block: int) -> int:
        return int(self._records.owner[block])

    def continuations(self, parent: bytes, salt: bytes) -> list[tuple[int, list[int]]]:
        """(block, its token ids) of every resident full block that follows the block hashed `parent` (b"": begins a
        prompt) under that salt, the most recently used first. O(pool)."""
        last_use = self._records.last_use
        return sorted(self._index.continuations(parent, salt), key=lambda entry: -last_use[entry[0]])

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise RuntimeError unless the books balance against the tables of all live sequences. O(pool)."""
        for seq in sequences:
            if len(set(seq.block_table)) != len(seq.block_table):
                raise RuntimeError(f"{seq} holds a block twice: {seq.block_table}")
        filled = np.array([content is not None for content in self._index.contents])
        problems = self._records.problems(sequences, filled) + self._idle.problems(self._records.state)
        problems += self.pins.problems(filled) + self._index.problems()
        if problems:
            raise RuntimeError("KV block bookkeeping is broken: " + "; ".join(problems[:5]))

    # -- internals ------------------------------------------------------------------------------------

    def _allocate(self, seq: Sequence, position: int, count: int, after: int) -> list[int]:
        """Blocks for `count` places of seq's table from `position` on, if possible those that follow block `after`."""
        blocks = self._idle.take(count, after)
        contents = self._index.contents
        evicted = [block for block in blocks if contents[block] is not None]
        losers = Counter(self._records.owner[evicted].tolist()) if evicted else {}
        self._index.forget(evicted)
        if self._doubtful:
            doubtful = [block for block in blocks if block in self._doubtful]
            self._doubtful.difference_update(doubtful)
            self.doubtful_in_use += doubtful
        self._records.hand_out(blocks, seq, position)
        for owner, number in losers.items():
            self.events.add("evict", owner, seq.request_id, number)
        return blocks

    def _writes_to_shared(self, seq: Sequence) -> bool:
        position = seq.num_planned_tokens // self.block_size
        return position < len(seq.block_table) and self._records.refcount[seq.block_table[position]] > 1

    def _copy_last_block(self, seq: Sequence) -> None:
        """Give seq its own copy of the block that its next token goes to; only the last can be filled in part."""
        position = seq.num_planned_tokens // self.block_size
        source = seq.block_table[position]
        (copy,) = self._allocate(seq, position, 1, seq.block_table[-1])
        self._records.refcount[source] -= 1
        # A new list, so that whoever keeps the table elsewhere sees that not only its end has changed.
        seq.block_table = [*seq.block_table[:position], copy, *seq.block_table[position + 1 :]]
        self.pending_copies[copy] = source
        self.events.add("copy", seq.owner, seq.request_id, 1)

    def _pin(self, owner: int, blocks: list[int]) -> None:
        new = self.pins.add(owner, blocks)
        if new:
            self._idle.keep(new)
            self.events.add("pin", owner, 0, len(new))

    def _chain_of(self, owner: int) -> list[int]:
        """The full blocks that owner wrote and all that stand before them in their chains, heads first."""
        position = self._records.position
        found: dict[int, None] = {}
        for written in sorted(np.flatnonzero(self._records.owner == owner).tolist(), key=lambda b: int(position[b])):
            chain = list(takewhile(lambda block: block not in found, self._index.chain(written)))
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def _forget(self, blocks: list[int]) -> None:
        """What these blocks hold shall not be found any more."""
        self._index.forget(blocks)
        for block in blocks:
            self.pins.drop(block)
