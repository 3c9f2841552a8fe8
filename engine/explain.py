"""explain(): what a prompt would find in the cache, told without changing anything."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from engine.block_manager import BlockManager
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen if the prompt were admitted now.

    num_prompt_tokens  of the prompt
    num_hit_tokens     of them, whose keys and values would come out of the cache
    hit_blocks         the blocks that hold them, in logical order
    num_new_blocks     blocks that the rest of the prompt needs
    num_missing        of those, how many neither free nor evictable blocks can give: above 0, it would have to wait
    evicted            (block, owner) of every block that would lose its content, in order of eviction; owner is the
                       conversation that wrote it
    first_difference   index in the prompt of its first token that differs from the longest cached chain; None where
                       the chain ends before it differs, or the prompt does
    found_instead      the token ids that stand in the chain from there to the end of their block; () without a
                       difference
    found_in           the block that holds them; None without a difference
    """

    num_prompt_tokens: int
    num_hit_tokens: int
    hit_blocks: tuple[int, ...]
    num_new_blocks: int
    num_missing: int
    evicted: tuple[tuple[int, int], ...]
    first_difference: int | None
    found_instead: tuple[int, ...]
    found_in: int | None


def explain(blocks: BlockManager, prompt: Sequence) -> Explanation:
    """`prompt` is a sequence that was never queued. O(pool + prompt)."""
    hits = blocks.match_prefix(prompt)
    num_new = blocks.blocks_for(len(prompt.token_ids)) - len(hits)
    reused = set(hits)
    candidates = [block for block in blocks.eviction_order() if block not in reused]
    wanted = max(0, num_new - blocks.num_free)
    evicted = tuple((block, blocks.owner_of(block)) for block in islice(candidates, wanted))
    first, instead, where = _difference(blocks, prompt, len(hits))
    return Explanation(
        num_prompt_tokens=len(prompt.token_ids),
        num_hit_tokens=len(hits) * blocks.block_size,
        hit_blocks=tuple(hits),
        num_new_blocks=num_new,
        num_missing=wanted - len(evicted),
        evicted=evicted,
        first_difference=first,
        found_instead=instead,
        found_in=where,
    )


def _difference(
    blocks: BlockManager, prompt: Sequence, num_hits: int
) -> tuple[int | None, tuple[int, ...], int | None]:
    """Among the blocks that continue the chain of hits, the one that agrees with the prompt for longest, and from
    where on it does not. Of equals the most recently used one."""
    start = num_hits * blocks.block_size
    rest = prompt.token_ids[start : start + blocks.block_size]
    parent = prompt.block_contents[num_hits - 1].hash if num_hits else b""
    found = [(_common(rest, tokens), tokens, block) for block, tokens in blocks.continuations(parent, prompt.salt)]
    if not found:
        return None, (), None
    same, tokens, block = max(found, key=lambda entry: entry[0])
    if same == len(rest):
        return None, (), None
    return start + same, tuple(tokens[same:]), block


def _common(a: list[int], b: list[int]) -> int:
    """How many leading elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
