"""GraphBuffers: the columns of a captured step's inputs, and how they lie in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.graph_shapes import Shape
from engine.shared_prefixes import num_tiles
from models.batch import SharedPrefixes

# The buffer's columns: of 64-bit words one for each token, then one for each sequence; then 32-bit ones, likewise one
# for each sequence, the last with one more place. What decodes share comes behind them, also of 32 bits.
_TOKEN_COLUMNS = _IDS, _POSITIONS, _SLOTS = range(3)
_ROW_COLUMNS = _TABLE_ROWS, _DRAW_ROWS, _DRAWN, _LAST = range(4)
_SHORT_COLUMNS = _CONTEXTS, _BLOCKS, _SOURCES, _STARTS = range(4)


@dataclass(slots=True)
class GraphBuffers:
    """What steps of one shape, of T rows and S sequences, read on the device. Padding rows have slot -1; padding
    sequences have context 0, and no rows unless they are decodes.

    input_ids, positions, slots   int64 [T]      as in ForwardBatch
    table_rows                    int64 [S]      rows of the device's block tables
    draw_rows, drawn_positions    int64 [S]      whose settings the draw goes by, and the place of the token it draws
    last_tokens                   int64 [S]      rows of each sequence's last token: those that are sampled from
    context_lens                  int32 [S]
    blocks                        int32 [S]      the block of each sequence's last token
    sources                       int32 [S]      see models.kernels.step_rows
    query_start                   int32 [S + 1]
    shared                        what its decodes have in common; None where such steps do not ask
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    table_rows: Tensor
    draw_rows: Tensor
    drawn_positions: Tensor
    last_tokens: Tensor
    context_lens: Tensor
    blocks: Tensor
    sources: Tensor
    query_start: Tensor
    shared: SharedPrefixes | None


class BufferLayout:
    """Of the inputs of every shape, in host memory and on the device. per_tile: by a shape's number of decodes, how
    many of those that share a prefix make a tile; 0: none are asked for."""

    def __init__(self, per_tile: dict[int, int]) -> None:
        self._per_tile = per_tile

    def _edges(self, shape: Shape) -> list[int]:
        """Words of 64 bits that the parts of a step's inputs take: by token, by sequence, by sequence in 32 bits, and
        what decodes share."""
        tokens, rows, short = _padded(shape.total), _padded(shape.sequences), _padded(shape.sequences // 2 + 1)
        per_tile = self._per_tile[shape.decodes]
        shared = num_tiles(shape.decodes, per_tile) * (per_tile + 1) + shape.decodes if per_tile else 0
        sizes = len(_TOKEN_COLUMNS) * tokens, len(_ROW_COLUMNS) * rows, len(_SHORT_COLUMNS) * short
        return [*sizes, _padded(halves(shared))]

    def num_words(self, shape: Shape) -> int:
        return sum(self._edges(shape))

    def cut(self, storage: Tensor, shape: Shape) -> GraphBuffers:
        """A step's columns in the words of `storage`."""
        edges = self._edges(shape)
        by_token, by_row, by_half, for_shared = storage[: sum(edges)].split(edges)
        ids, positions, slots = by_token.view(len(_TOKEN_COLUMNS), -1)[:, : shape.total]
        table_rows, draw_rows, drawn_positions, last_tokens = by_row.view(len(_ROW_COLUMNS), -1)[:, : shape.sequences]
        halves = by_half.view(torch.int32).view(len(_SHORT_COLUMNS), -1)
        contexts, blocks, sources = halves[:_STARTS, : shape.sequences]
        starts = halves[_STARTS, : shape.sequences + 1]
        shared, per_tile = None, self._per_tile[shape.decodes]
        if per_tile:
            tiles = num_tiles(shape.decodes, per_tile)
            sizes = tiles * per_tile, tiles, shape.decodes
            members, lens, skipped = for_shared.view(torch.int32)[: sum(sizes)].split(sizes)
            shared = SharedPrefixes(members.view(tiles, per_tile), lens, skipped)
        return GraphBuffers(
            ids, positions, slots, table_rows, draw_rows, drawn_positions, last_tokens, contexts, blocks, sources,
            starts, shared,
        )  # fmt: skip


def _padded(size: int) -> int:
    """Columns start at multiples of 16 bytes, which kernels load from as a whole."""
    return size + size % 2


def halves(size: int) -> int:
    """Words that so many 32-bit values take."""
    return (size + 1) // 2
