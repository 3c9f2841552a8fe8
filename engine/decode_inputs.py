"""DecodeInputs: what a captured decode step reads, at addresses that never change.

All that changes in every step lies in one buffer and reaches the device in one copy. The block tables live on the
device, in rows that belong to a sequence for as long as it runs; a step writes the block of its own token there and
then gathers its rows, so that only a new or remade table is ever sent as a whole. What a row's draw needs is looked
up in arrays that are filled when the sequence comes: per step and row the host does little but read the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.block_tables import BlockTables, TableRow
from engine.graph_sampling import GraphSampling
from engine.sampler import Sampler
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence

# The columns of a step's buffer, each of as many 64-bit words as there are rows; the last two hold 32-bit values.
_IDS, _POSITIONS, _SLOTS, _DRAWN, _TABLE_ROWS, _ENTRIES, _CONTEXTS, _BLOCKS = range(8)
_COLUMNS = 8
_IN_FLIGHT = 2  # steps whose inputs stand in host memory at a time


@dataclass(slots=True)
class DecodeBuffers:
    """The device's buffers for steps of B rows. Padding rows have token 0, slot -1, context 0 and a table of their own.

    input_ids, positions, slots   int64 [B]    as in ForwardBatch
    context_lens                  int32 [B]
    drawn_positions               int64 [B]    of the draw, see models.kernels.sampling
    table_rows                    int64 [B]    rows of the device's block tables, and of what the draw looks up
    entries, blocks               int64, int32 [B]  places in the flat tables, and what is to stand there: the block
                                               of the step's own token
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    drawn_positions: Tensor
    table_rows: Tensor
    entries: Tensor
    blocks: Tensor


@dataclass(slots=True)
class _HostBuffer:
    """Host memory of one step of B rows: words int64 [columns, B] and the same memory's 32-bit columns, and the pair
    of tensors of the copy to the device."""

    words: np.ndarray
    contexts: np.ndarray
    blocks: np.ndarray
    source: Tensor
    target: Tensor


class DecodeInputs:
    """Inputs of decode steps of up to max_rows sequences. tables int32 [max_num_seqs + 1, max_blocks_per_seq], on the
    device; its last row is the padding's."""

    def __init__(
        self, tables: BlockTables, sampler: Sampler, block_size: int, max_rows: int, device: torch.device
    ) -> None:
        num_rows, self._width = tables.array.shape
        self._host_tables = tables
        self._block_size = block_size
        self._padding_row = num_rows
        self.tables = torch.zeros(num_rows + 1, self._width, dtype=torch.int32, device=device)
        self._storage = torch.zeros(_COLUMNS * _padded(max_rows), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._pinned = [torch.zeros_like(self._storage, device="cpu", pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self._host: dict[tuple[int, int], _HostBuffer] = {}
        self._sampling = GraphSampling(num_rows, sampler.vocab_size, device)
        self.settings = self._sampling.settings

    def buffers(self, size: int) -> DecodeBuffers:
        """The buffers of steps of `size` rows; those of all sizes lie in the same memory."""
        words = self._storage[: _COLUMNS * _padded(size)].view(_COLUMNS, -1)

        def column(index: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return words[index].view(dtype)[:size]

        return DecodeBuffers(
            input_ids=column(_IDS),
            positions=column(_POSITIONS),
            slots=column(_SLOTS),
            context_lens=column(_CONTEXTS, torch.int32),
            drawn_positions=column(_DRAWN),
            table_rows=column(_TABLE_ROWS),
            entries=column(_ENTRIES),
            blocks=column(_BLOCKS, torch.int32),
        )

    def send(self, items: list[ScheduledSequence], size: int, turn: int) -> bool:
        """Send the inputs of a step of decodes `items`, padded to `size` rows, through host buffer 0 or 1, which the
        device must have read. Returns whether the captured draw is all that the rows need."""
        block_size, known = self._block_size, self._host_tables.rows
        rows: list[int] = []
        ids: list[int] = []
        starts: list[int] = []
        new_blocks: list[int] = []
        for item in items:
            seq, start = item.seq, item.start
            table, at = seq.block_table, start // block_size
            row = known.get(seq.seq_id)
            if row is None or row.num_sent < at or row.source is not table:
                row = self._introduce(seq, at)
            row.num_sent = at + 1
            rows.append(row.index)
            ids.append(seq.token_ids[start])
            starts.append(start)
            new_blocks.append(table[at])
        count = len(rows)
        host = self._host.get((size, turn)) or self._host_buffer(size, turn)
        index, positions, blocks = (np.array(column, np.int64) for column in (rows, starts, new_blocks))
        lengths = positions + 1
        words = host.words
        words[_IDS, :count] = ids
        words[_POSITIONS, :count] = positions
        words[_SLOTS, :count] = blocks * block_size + positions % block_size
        words[_DRAWN, :count] = lengths
        words[_TABLE_ROWS, :count] = index
        words[_ENTRIES, :count] = index * self._width + positions // block_size
        host.contexts[:count] = lengths
        host.blocks[:count] = blocks
        if count < size:
            self._pad(host, count)
        host.target.copy_(host.source, non_blocking=True)
        return self._sampling.prepare(items, index, lengths)

    # -- internals ------------------------------------------------------------------------------------

    def _introduce(self, seq: Sequence, num_blocks: int) -> TableRow:
        """Send the first blocks of a table that the device does not know, and note what the sequence's draw needs."""
        row = self._host_tables.row(seq)
        index = row.index
        if num_blocks:
            # Not from pinned memory: the copy has left the host's when the call returns.
            known = torch.from_numpy(self._host_tables.array[index, :num_blocks])
            self.tables[index, :num_blocks].copy_(known, non_blocking=True)
        self._sampling.introduce(index, seq)
        return row

    def _pad(self, host: _HostBuffer, count: int) -> None:
        words = host.words
        words[:_CONTEXTS, count:] = 0
        words[_SLOTS, count:] = -1
        words[_TABLE_ROWS, count:] = self._padding_row
        words[_ENTRIES, count:] = self._padding_row * self._width
        for column in (host.contexts, host.blocks):
            column[count:] = 0

    def _host_buffer(self, size: int, turn: int) -> _HostBuffer:
        used = _COLUMNS * _padded(size)
        source = self._pinned[turn][:used]
        words = source.numpy().reshape(_COLUMNS, -1)
        host = self._host[size, turn] = _HostBuffer(
            words[:, :size],
            words[_CONTEXTS].view(np.int32)[:size],
            words[_BLOCKS].view(np.int32)[:size],
            source,
            self._storage[:used],
        )
        return host


def _padded(size: int) -> int:
    """Columns start at multiples of 16 bytes, which kernels load from as a whole."""
    return size + size % 2
