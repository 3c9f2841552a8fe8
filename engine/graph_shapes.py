"""The sizes of steps that are captured as CUDA graphs, and which of them a step runs in.

A graph computes all of its rows, so a step is padded to the cheapest shape that holds it. Decodes alone come in many
sizes, because that is what most steps are. Steps with prompt tokens come in a grid: alone in fine steps, because
padding computes; beside decodes in coarser ones, because there the launches that a graph saves outweigh it.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_DECODES = 512  # of a graph; beyond, launches are a small share of a step
MOST_TOKENS = 8192  # of prompts in a graph, likewise
_FEWEST_TOKENS = 64
_COARSE = 1024  # prompt tokens up to which there are only powers of two beside decodes


class Shape(NamedTuple):
    """Rows of a captured step: `decodes` of one token each, then `tokens` of at most `chunks` prompts. The chunks' last
    tokens are sampled from, and so are the decodes."""

    decodes: int
    tokens: int = 0
    chunks: int = 0

    @property
    def total(self) -> int:
        """Rows that are computed."""
        return self.decodes + self.tokens

    @property
    def sequences(self) -> int:
        return self.decodes + self.chunks

    def holds(self, decodes: int, tokens: int, chunks: int) -> bool:
        return decodes <= self.decodes and tokens <= self.tokens and chunks <= self.chunks


def all_shapes(max_num_seqs: int, max_num_tokens: int) -> list[Shape]:
    """What to capture for an engine with these limits, cheapest first."""
    decodes = decode_sizes(max_num_seqs)
    beside = sorted({min(size, decodes[-1]) for size in (8, 32, 128, decodes[-1])})
    most = min(max_num_tokens, MOST_TOKENS)  # the step of a long prompt's chunks
    tokens = [*(size for size in _token_sizes(4) if size < most), most]
    shapes = [Shape(size) for size in decodes]
    shapes += [Shape(0, size, _chunks(size, max_num_seqs)) for size in tokens]
    coarse = [size for size in tokens if size in _token_sizes(1) or size == most]
    coarse += [size for size in tokens if size in _token_sizes(2) and size > _COARSE and size not in coarse]
    shapes += [Shape(d, size, _chunks(size, max_num_seqs)) for d in beside for size in coarse]
    return sorted(shapes, key=lambda shape: (shape.total, shape))


def capture_order(shapes: list[Shape]) -> list[Shape]:
    """The largest first, so that the others find memory in the pool; then decodes at powers of two, prompts at powers
    of two, and the rest, which refine those; each from large to small."""

    def rank(shape: Shape) -> int:
        is_power = (shape.tokens or shape.decodes) & ((shape.tokens or shape.decodes) - 1) == 0
        if shape.tokens == 0:
            return 1 if is_power else 3
        return 2 if is_power else 4

    largest = {max(shapes, key=lambda shape: shape.total), max(shapes, key=lambda shape: shape.sequences)}
    return sorted(shapes, key=lambda shape: (0 if shape in largest else rank(shape), -shape.total))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: steps of 8 up to 256, then of 16, and few rows exactly."""
    most = min(max_num_seqs, MOST_DECODES)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MOST_DECODES + 1, 16), most}
    return sorted(size for size in sizes if size <= most)


def _token_sizes(steps: int) -> list[int]:
    """Powers of two, and between two of them as many more sizes as make `steps` of them, ascending."""
    sizes, power = [], _FEWEST_TOKENS
    while power < MOST_TOKENS:
        sizes += [power + power * i // steps for i in range(steps)]
        power *= 2
    return [*sizes, MOST_TOKENS]


def _chunks(tokens: int, max_num_seqs: int) -> int:
    """Prompts that a step of so many of their tokens has room for: few, or many of which each brings 16 and more."""
    return min(max_num_seqs, max(8, tokens // 16), 128)
