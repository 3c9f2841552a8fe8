"""IdleBlocks: the blocks that nobody holds, and which of them goes next.

    empty    without content: handed out first
    cached   their content can be found; evicted in this order, the least recently released first
    kept     likewise, but pinned: outside the order

Invariant: an idle block is in exactly one of these, in kept if and only if it is pinned; a block that a table holds is
in none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from engine.block_records import CACHED, FREE
from engine.pins import Pins


class IdleBlocks:
    """Of a pool of num_blocks, all of them empty; pins, which others change, tells which are to be kept."""

    def __init__(self, num_blocks: int, pins: Pins) -> None:
        self.empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.kept: set[int] = set()
        self._pins = pins

    def take(self, count: int, after: int) -> list[int]:
        """Remove `count` blocks, of which so many must be empty or cached.

        If possible each is the neighbour of the one before, the first of block `after`: that keeps a sequence
        contiguous where nobody else wants the place, which lets attention read it without a copy.
        """
        empty, taken = self.empty, []
        for _ in range(count):
            after += 1
            if after in empty:
                del empty[after]
            else:
                after, _ = (empty or self.cached).popitem(last=False)
            taken.append(after)
        return taken

    def remove(self, blocks: Iterable[int]) -> None:
        """Cached or kept blocks that have been hit."""
        cached = self.cached
        for block in blocks:
            if block in cached:
                del cached[block]
            else:
                self.kept.remove(block)

    def add_empty(self, blocks: Iterable[int]) -> None:
        """Blocks that go next, the last of them first."""
        for block in blocks:
            self.empty[block] = None
            self.empty.move_to_end(block, last=False)

    def add_filled(self, blocks: list[int]) -> None:
        """Blocks with content that go, unless they are pinned, after all that are here, in this order."""
        if self._pins.num_blocks:
            pinned = {block for block in blocks if self._pins.counts[block]}
            self.kept |= pinned
            blocks = [block for block in blocks if block not in pinned]
        cached = self.cached
        for block in blocks:  # update() takes thrice the time
            cached[block] = None

    def keep(self, blocks: Iterable[int]) -> None:
        """Of these, which are pinned from now on, those that are cached."""
        for block in blocks:
            if block in self.cached:
                del self.cached[block]
                self.kept.add(block)

    def keep_no_more(self, blocks: Iterable[int]) -> None:
        """Of these, which nobody has pinned any more, those that are kept: they go last, in this order."""
        for block in blocks:
            if block in self.kept:
                self.kept.remove(block)
                self.cached[block] = None

    def empty_all(self, *, kept_too: bool) -> list[int]:
        """Let the cached blocks count as empty; returns which."""
        blocks = [*self.cached, *self.kept] if kept_too else list(self.cached)
        self.cached.clear()
        if kept_too:
            self.kept.clear()
        self.empty.update(dict.fromkeys(blocks))
        return blocks

    def problems(self, state: np.ndarray) -> list[str]:
        """What is wrong with the books; state as BlockRecords has it."""
        found = []
        if not self.kept.isdisjoint(self.cached):
            found.append(f"blocks {sorted(self.kept & set(self.cached))} are both kept and evictable")
        for listed, pinned in ((self.cached, False), (self.kept, True)):
            for block in [b for b in listed if (self._pins.counts[b] > 0) != pinned]:
                found.append(f"block {block} is on the wrong list for being pinned {self._pins.counts[block]} times")
        for listed, expected in ((set(self.empty), FREE), (self.kept.union(self.cached), CACHED)):
            if listed != set(np.flatnonzero(state == expected).tolist()):
                found.append(f"the list of blocks in state {expected} differs from the blocks in that state")
        return found
