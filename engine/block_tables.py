"""BlockTables: the block tables of the sequences that run, as rows of one array that grow in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class TableRow:
    """A sequence's row. source: the table it was copied from, of which `filled` blocks are in it. num_sent: leading
    blocks that the row's copy on the device holds (see GraphInputs); -1: the device knows nothing of it."""

    index: int
    seq: Sequence
    source: list[int]
    filled: int = 0
    num_sent: int = -1


def slots_of(table: np.ndarray, start: int, stop: int, block_size: int) -> np.ndarray:
    """int64 [stop - start], where the keys and values of tokens [start, stop) stand: block * block_size + offset.
    table: int32, a row of BlockTables.array. Without a division for each token."""
    first, skipped = divmod(start, block_size)
    blocks = table[first : (stop - 1) // block_size + 1]
    slots = blocks[:, None] * np.int64(block_size) + np.arange(block_size)
    return slots.reshape(-1)[skipped : skipped + stop - start]


class BlockTables:
    """array int32 [max_num_seqs, max_blocks_per_seq]; a row is up to date from row() to the sequence's next block.

    rows: by sequence id. version: another one whenever a row has become another sequence's or another table's; while it
    stays, rows only grow.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.rows: dict[int, TableRow] = {}
        self.version = 0
        self._free = list(range(max_num_seqs))

    def row(self, seq: Sequence) -> TableRow:
        """The persistent row of seq, brought up to date by what was added since the last call."""
        row = self.rows.get(seq.seq_id)
        if row is None:
            row = self.rows[seq.seq_id] = TableRow(self._take_row(), seq, seq.block_table)
            self.version += 1
        if row.source is not seq.block_table:
            # A preempted sequence came back with another table, or a block of it was copied on write.
            row.source, row.filled, row.num_sent = seq.block_table, 0, -1
            self.version += 1
        if row.filled < len(seq.block_table):
            self.array[row.index, row.filled : len(seq.block_table)] = seq.block_table[row.filled :]
            row.filled = len(seq.block_table)
        return row

    def forget(self, seq_id: int) -> None:
        """Take back the row of a sequence; an unknown one is a no-op."""
        row = self.rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row.index)

    def _take_row(self) -> int:
        if not self._free:
            # Only preempted and paused sequences hold a row without running; there are never more running than rows.
            for seq_id in [r for r, row in self.rows.items() if row.seq.status is not SequenceStatus.RUNNING]:
                self._free.append(self.rows.pop(seq_id).index)
        return self._free.pop()
