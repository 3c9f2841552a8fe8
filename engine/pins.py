"""Pins: which blocks are kept from eviction, and for which conversation.

Bookkeeping only: BlockManager decides what a conversation's blocks are and keeps idle pinned ones out of the order
of eviction. A block may be pinned for several conversations (a shared system prompt) and stays pinned until the
last of them lets go.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Pins:
    """At most `limit` blocks of a pool of num_blocks."""

    def __init__(self, num_blocks: int, limit: int) -> None:
        self.limit = limit
        self.counts = np.zeros(num_blocks, np.int32)  # int32 [num_blocks]: for how many owners a block is pinned
        self.num_blocks = 0  # pinned blocks
        self._owners: dict[int, set[int]] = {}  # the longest pinned owner first

    def __contains__(self, owner: int) -> bool:
        return owner in self._owners

    def owners(self) -> list[int]:
        """The owners whose blocks are pinned, the longest pinned first."""
        return list(self._owners)

    def blocks(self, owner: int) -> frozenset[int]:
        """The blocks pinned for owner."""
        return frozenset(self._owners.get(owner, ()))

    def missing(self, owner: int, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks`, in their order, that are not pinned for owner."""
        own = self._owners.get(owner, set())
        return [block for block in blocks if block not in own]

    def add(self, owner: int, blocks: Iterable[int]) -> list[int]:
        """Pin `blocks` for owner (also none: what it writes later is then pinned) as far as the limit allows, in
        their order; returns those that nobody had pinned before."""
        own = self._owners.setdefault(owner, set())
        new = []
        for block in blocks:
            if block in own:
                continue
            if not self.counts[block]:
                if self.num_blocks >= self.limit:
                    break
                self.num_blocks += 1
                new.append(block)
            self.counts[block] += 1
            own.add(block)
        return new

    def remove(self, owner: int) -> list[int]:
        """Let go of owner's blocks; returns those that nobody has pinned now. An owner without pins is a no-op."""
        freed = []
        for block in self._owners.pop(owner, ()):
            self.counts[block] -= 1
            if not self.counts[block]:
                self.num_blocks -= 1
                freed.append(block)
        return freed

    def drop(self, block: int) -> None:
        """Let go of one block for every owner, because it no longer holds what was pinned."""
        if self.counts[block]:
            self.num_blocks -= 1
            self.counts[block] = 0
            for blocks in self._owners.values():
                blocks.discard(block)

    def problems(self, holds_content: np.ndarray) -> list[str]:
        """What is wrong with the books; holds_content is bool [num_blocks]."""
        counts = np.zeros_like(self.counts)
        for blocks in self._owners.values():
            counts[list(blocks)] += 1
        found = [
            f"block {block} is pinned {self.counts[block]} times but by {counts[block]} owners"
            for block in np.flatnonzero(counts != self.counts)[:3]
        ]
        empty = np.flatnonzero((counts > 0) & ~holds_content)
        found += [f"block {block} is pinned but holds nothing" for block in empty[:3]]
        pinned = int((counts > 0).sum())
        if pinned != self.num_blocks or pinned > self.limit:
            found.append(f"{pinned} blocks are pinned, {self.num_blocks} are counted, the limit is {self.limit}")
        return found
