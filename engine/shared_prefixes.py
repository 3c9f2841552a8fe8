"""Which decodes of a step have leading blocks in common, for attention to read them once.

The system prompt of many conversations stands in the same blocks, and so does the prompt of a request's continuations.
Decodes are put in the order of their tables, in which those with most in common are neighbours, and cut into tiles of
as many as a program of the kernel takes.
"""

from __future__ import annotations

import numpy as np

# What a tile must save: tokens of the prefix, times members but one. Less than this costs as much as it saves.
LEAST_SAVED = 1024
# What a step's tiles must save together, a decode: to go by them costs every decode a little.
LEAST_SAVED_EACH = 128


def num_tiles(decodes: int, per_tile: int) -> int:
    """Tiles that a step of so many decodes has room for: more than whole ones, as groups differ in size."""
    return -(-decodes // per_tile) + 8


def find(
    tables: np.ndarray, limits: np.ndarray, per_tile: int, most_tiles: int, least_blocks: float
) -> list[tuple[list[int], int]]:
    """Tiles (members, leading blocks that they have in common), at most most_tiles, which save most, each at least
    least_blocks: what its members share, times their number but one.

    tables int32 [N, W]: a row for each decode; limits int [N]: of each, the leading blocks that are full and are no
    longer written to.
    """
    width = int(limits.max(initial=0))
    if not width:
        return []
    rows = np.where(np.arange(width) < limits[:, None], tables[:, :width], -1 - np.arange(len(tables))[:, None])
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    rows = rows[order]
    differ = rows[1:] != rows[:-1]
    common = np.where(differ.any(1), differ.argmax(1), width).tolist()  # of each and the next one
    if max(common, default=0) * (per_tile - 1) < least_blocks:
        return []
    tiles = _cut(common, per_tile)
    saved = {tile: (tile[1] - tile[0] - 1) * tile[2] for tile in tiles}
    best = sorted((tile for tile in tiles if saved[tile] >= least_blocks), key=lambda tile: -saved[tile])
    return [(order[first:end], blocks) for first, end, blocks in best[:most_tiles]]


def _cut(common: list[int], per_tile: int) -> list[tuple[int, int, int]]:
    """Cut a row of decodes, of which each has so many blocks in common with the next, into tiles (first, end, blocks)
    that save most together: each its blocks, times its members but one."""
    if min(common) == max(common):
        count = len(common) + 1
        return [(i, min(i + per_tile, count), common[0]) for i in range(0, count, per_tile)]
    best = [0]  # saved by the first n decodes
    last: list[tuple[int, int, int]] = []  # the last tile of the first n + 1
    for end in range(1, len(common) + 2):
        most, tile, blocks = best[end - 1], (end - 1, end, 0), 0
        for first in range(end - 2, max(end - per_tile, 0) - 1, -1):
            blocks = common[first] if first == end - 2 else min(blocks, common[first])
            if not blocks:
                break
            if (saved := best[first] + (end - first - 1) * blocks) > most:
                most, tile = saved, (first, end, blocks)
        best.append(most)
        last.append(tile)
    tiles, end = [], len(last)
    while end:
        tiles.append(last[end - 1])
        end = tiles[-1][0]
    return tiles


class SharedPrefixFinder:
    """What it has found last. That holds while the decodes and their tables' rows stay the same: blocks that a sequence
    shares are full, and it keeps them.

    members int32 [tiles, n], lens int32 [tiles], skipped int32 [N]: as in models.batch.SharedPrefixes, for at most
    most_decodes of them. pays: to go by that costs less than it saves.
    """

    def __init__(self, per_tile: int, most_decodes: int, block_size: int) -> None:
        self._per_tile, self._block_size = per_tile, block_size
        self._least_blocks, self._least_saved_each = LEAST_SAVED / block_size, LEAST_SAVED_EACH
        tiles = num_tiles(most_decodes, per_tile)
        self.members = np.full((tiles, per_tile), -1, np.int32)
        self.lens = np.zeros(tiles, np.int32)
        self.skipped = np.zeros(most_decodes, np.int32)
        self.pays = False

    def look(self, tables: np.ndarray, limits: np.ndarray) -> None:
        """At other decodes; arguments as find()'s."""
        self.members.fill(-1)
        self.lens.fill(0)
        self.skipped.fill(0)
        most = num_tiles(len(tables), self._per_tile)
        tiles = find(tables, limits, self._per_tile, most, self._least_blocks)
        for i, (members, blocks) in enumerate(tiles):
            self.members[i, : len(members)] = members
            self.lens[i] = self.skipped[members] = blocks * self._block_size
        saved = sum((len(members) - 1) * blocks for members, blocks in tiles)
        self.pays = bool(tiles) and saved * self._block_size >= self._least_saved_each * len(tables)
