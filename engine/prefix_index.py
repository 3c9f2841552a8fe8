"""PrefixIndex: what stands in which block, and which blocks hold the beginning of a prompt.

A full block is indexed under a hash of its tokens, its salt and the hash of the block before it, so that equal hashes
mean equal prefixes. On a hit all of these are compared, too.

Invariant: a block is listed under the hash of what it holds, once; a block that holds nothing is not listed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from engine.sequence import Sequence


class BlockContent(NamedTuple):
    """What a full block holds. All of it is compared on a hit, so that a hash collision cannot serve
    another prompt's keys and values."""

    hash: bytes
    parent: bytes
    tokens: bytes
    salt: bytes


class PrefixIndex:
    """Of num_blocks blocks of block_size tokens. contents: by block, None where it holds nothing that is indexed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.contents: list[BlockContent | None] = [None] * num_blocks
        self._block_size = block_size
        self._blocks: dict[bytes, list[int]] = {}  # by hash; several where it was computed at the same time

    def match(self, seq: Sequence, limit: int) -> list[int]:
        """The longest chain of blocks that hold the first ones of seq, at most `limit`."""
        matched: list[int] = []
        held, index = self.contents, self._blocks
        for content in self._contents(seq, limit):
            for block in index.get(content.hash, ()):
                if held[block] == content:
                    matched.append(block)
                    break
            else:
                break
        return matched

    def count_resident(self, seq: Sequence, limit: int, count: int) -> int:
        """The length of that chain, told by hashes alone, if it was `count` when last asked for."""
        count = min(count, limit)
        while count and seq.block_contents[count - 1].hash not in self._blocks:
            count -= 1
        for content in self._contents(seq, limit, count):
            if content.hash not in self._blocks:
                break
            count += 1
        return count

    def add(self, seq: Sequence, first: int, stop: int) -> None:
        """Places [first, stop) of seq's table have been filled."""
        self.extend(seq, stop)
        held, index = self.contents, self._blocks
        for block, content in zip(seq.block_table[first:stop], seq.block_contents[first:stop], strict=True):
            held[block] = content
            copies = index.get(content.hash)
            if copies is None:
                index[content.hash] = [block]
            else:
                copies.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks hold nothing any more; those that held nothing are no-ops."""
        for block in blocks:
            content = self.contents[block]
            if content is None:
                continue
            copies = self._blocks[content.hash]
            copies.remove(block)
            if not copies:
                del self._blocks[content.hash]
            self.contents[block] = None

    def chain(self, block: int) -> Iterator[int]:
        """The block, if it holds something, and what stands before it, up to the beginning or to what is not there."""
        content = self.contents[block]
        while content is not None:
            yield block
            before = [b for b in self._blocks.get(content.parent, ()) if self._salt(b) == content.salt]
            if not before:
                return
            block = before[0]
            content = self.contents[block]

    def continuations(self, parent: bytes, salt: bytes) -> list[tuple[int, list[int]]]:
        """(block, its token ids) of every block that follows the one hashed `parent` (b"": begins a prompt) under that
        salt. O(pool)."""
        return [
            (block, list(array("i", content.tokens)))
            for block, content in enumerate(self.contents)
            if content is not None and content.parent == parent and content.salt == salt
        ]

    def extend(self, seq: Sequence, count: int) -> None:
        """Bring seq.block_contents to `count` blocks, whose tokens are known."""
        contents, salt = seq.block_contents, seq.salt
        done, width = len(contents), 4 * self._block_size
        if done >= count:
            return
        tokens = seq.ids(done * self._block_size, count * self._block_size).tobytes()
        parent = contents[-1].hash if contents else b""
        digest, new = xxhash.xxh3_128_digest, tuple.__new__  # BlockContent's own constructor takes twice the time
        for start in range(0, len(tokens), width):
            own = tokens[start : start + width]
            key = digest(parent + own + salt)
            contents.append(new(BlockContent, (key, parent, own, salt)))
            parent = key

    def problems(self) -> list[str]:
        """What is wrong with the books."""
        indexed = {block: key for key, blocks in self._blocks.items() for block in blocks}
        return [
            f"block {block} is not indexed under what it holds"
            for block, content in enumerate(self.contents)
            if indexed.get(block) != (content.hash if content else None)
        ]

    def _contents(self, seq: Sequence, count: int, first: int = 0) -> Iterator[BlockContent]:
        """Of seq's blocks from `first` to before `count`. They are hashed a few at a time, then more: whoever asks may
        stop early."""
        contents = seq.block_contents
        while first < count:
            self.extend(seq, min(count, 2 * first + 4))
            few = contents[first : min(count, len(contents))]
            yield from few
            first += len(few)

    def _salt(self, block: int) -> bytes | None:
        content = self.contents[block]
        return None if content is None else content.salt
