"""GraphInputs: what a captured step reads, at addresses that never change.

All that changes in every step lies in one buffer and reaches the device in one copy. The block tables live on the
device, in rows that belong to a sequence for as long as it runs; a step is sent the block of its last token and
gathers its rows there, so that only a new or remade table is ever sent as a whole. What a row's draw needs is sent when
the sequence comes (GraphSampling), those of a step's newcomers together: per step and decode the host does little but
look up the last token, and not even that where the token is still on its way from the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.block_tables import BlockTables, TableRow, slots_of
from engine.graph_buffers import BufferLayout, GraphBuffers, halves
from engine.graph_sampling import GraphSampling
from engine.graph_shapes import Shape
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence
from engine.shared_prefixes import SharedPrefixFinder
from models.batch import SharedPrefixes
from models.kernels.row_settings import WORDS

_IN_FLIGHT = 2  # steps whose inputs stand in host memory at a time


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """A row of which the device does not know the first num_blocks blocks; is_new: nor anything else."""

    row: TableRow
    num_blocks: int
    is_new: bool


class GraphInputs:
    """Inputs of steps of the given shapes. tables int32 [max_num_seqs + 1, max_blocks_per_seq], on the device; the last
    row is the padding's. step_tables has those of a step's sequences.

    per_tile: of a number of decodes, how many that share a prefix are taken together (see AttentionBackend).
    drawn: by sequence id, the row in which the last step that was sent draws that sequence's token.
    """

    def __init__(
        self,
        tables: BlockTables,
        vocab_size: int,
        block_size: int,
        shapes: list[Shape],
        device: torch.device,
        per_tile: Callable[[int], int] = lambda decodes: 0,
    ) -> None:
        num_rows, self._width = tables.array.shape
        self._host_tables = tables
        self._block_size = block_size
        self._padding_row = num_rows
        self._sampling = GraphSampling(num_rows, vocab_size, device)
        self.settings = self._sampling.settings
        self.tables = torch.zeros(num_rows + 1, self._width, dtype=torch.int32, device=device)
        most = max(shape.sequences for shape in shapes)
        self.step_tables = torch.zeros(most, self._width, dtype=torch.int32, device=device)
        tiles = {shape.decodes: per_tile(shape.decodes) for shape in shapes}
        self._layout = BufferLayout(tiles)
        widest = max(tiles.values())
        self._prefixes = SharedPrefixFinder(widest, max(tiles), block_size) if widest else None
        self._looked_at = -1, np.empty(0, np.int64)  # by _prefixes: the tables' version, and the decodes' rows
        self._storage = torch.zeros(max(map(self._layout.num_words, shapes)), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._pinned = [torch.zeros_like(self._storage, device="cpu", pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        # Words of each newcomer: its row, its settings, its table.
        self._news = torch.zeros(num_rows * (1 + WORDS + halves(self._width)), dtype=torch.int64, device=device)
        self._pinned_news = [torch.zeros_like(self._news, device="cpu", pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self._host: dict[tuple[Shape, int], dict[str, np.ndarray]] = {}
        self.drawn: dict[int, int] = {}

    def buffers(self, shape: Shape) -> GraphBuffers:
        """The device's buffers for steps of a shape; those of all shapes lie in the same memory."""
        return self._layout.cut(self._storage, shape)

    @property
    def shares(self) -> bool:
        """Whether going by what decodes have in common pays, for the last step sent whose shape asks for that."""
        return self._prefixes is not None and self._prefixes.pays

    def send(self, items: list[ScheduledSequence], num_decodes: int, shape: Shape, turn: int) -> bool:
        """Send the inputs of a step of these items, decodes first, padded to a shape, through host buffer 0 or 1, which
        the device must have read. Returns whether the captured draw is all that the step needs."""
        host = self._host.get((shape, turn)) or self._host_buffer(shape, turn)
        n, chunks = num_decodes, items[num_decodes:]
        newcomers: list[_Newcomer] = []
        row_list, last_list, ids, source_list, drawn = self._look_up_decodes(items[:n], newcomers)
        samples = True
        for place, item in enumerate(chunks, start=shape.decodes):
            seq, at = item.seq, (item.start + item.num_tokens - 1) // self._block_size
            row_list.append(self._row(seq, at, newcomers, whole=True).index)
            last_list.append(seq.block_table[at])
            source_list.append(-1)
            if item.samples:
                drawn[seq.seq_id] = place
                samples = samples and not seq.forks
        self.drawn = drawn
        rows, last_blocks = np.array(row_list, np.int64), np.array(last_list, np.int64)
        ends = np.array([item.start + item.num_tokens for item in items], np.int64)
        self._fill_rows(host, shape, items, n, rows, ends, last_blocks, np.array(source_list, np.int32))
        host["input_ids"][:n] = ids
        host["positions"][:n] = ends[:n] - 1
        host["slots"][:n] = last_blocks[:n] * self._block_size + (ends[:n] - 1) % self._block_size
        host["input_ids"][n : shape.decodes] = host["positions"][n : shape.decodes] = 0
        host["slots"][n : shape.decodes] = -1
        if "lens" in host:
            self._fill_shared(host, items[:n], rows[:n], ends[:n])
        if shape.tokens:
            self._fill_chunks(host, shape, chunks, rows[n:])
        if newcomers:
            self._introduce(newcomers, turn)
        used = self._layout.num_words(shape)
        self._storage[:used].copy_(self._pinned[turn][:used], non_blocking=True)
        if not all(item.samples for item in chunks):
            sampled = [i for i, item in enumerate(items) if item.samples]
            items, rows, ends = [items[i] for i in sampled], rows[sampled], ends[sampled]
        if not (self._sampling.prepare(items, rows, ends) and samples):
            self.drawn = {}  # what the graph draws is not what is taken
            return False
        return True

    # -- internals ------------------------------------------------------------------------------------

    def _look_up_decodes(
        self, decodes: list[ScheduledSequence], newcomers: list[_Newcomer]
    ) -> tuple[list[int], list[int], list[int], list[int], dict[int, int]]:
        """By decode: its row, its last block, its last token (0 where that is not known), where the last step draws it
        (-1 where it is known); and by sequence id the place at which this step draws. One pass, as short as can be."""
        block_size, known, drawn_before = self._block_size, self._host_tables.rows, self.drawn
        rows, blocks, ids, sources, seq_ids = [], [], [], [], []
        for item in decodes:
            seq, last = item.seq, item.start
            seq_id, table, tokens, at = seq.seq_id, seq.block_table, seq.token_ids, last // block_size
            row = known.get(seq_id)
            if row is None or row.num_sent <= at or row.source is not table:
                row = self._row(seq, at, newcomers, whole=False)
            rows.append(row.index)
            blocks.append(table[at])
            seq_ids.append(seq_id)
            if last < len(tokens):
                ids.append(tokens[last])
                sources.append(-1)
            else:
                ids.append(0)
                sources.append(drawn_before[seq_id])
        return rows, blocks, ids, sources, dict(zip(seq_ids, range(len(seq_ids)), strict=True))

    def _row(self, seq: Sequence, at: int, newcomers: list[_Newcomer], whole: bool) -> TableRow:
        """The sequence's row on the device, complete but for the block at index `at` once newcomers are introduced."""
        row = self._host_tables.rows.get(seq.seq_id)
        if row is None or row.num_sent < at or row.source is not seq.block_table:
            row = self._host_tables.row(seq)
            newcomers.append(_Newcomer(row, at, is_new=row.num_sent < 0))
        row.num_sent = max(row.num_sent, at + 1)
        if whole and row.filled <= at:
            row = self._host_tables.row(seq)  # whose array the chunk's slots are looked up in
        return row

    def _introduce(self, newcomers: list[_Newcomer], turn: int) -> None:
        """Send the tables that the device does not know, and what those sequences' draws need: one copy for all."""
        count, blocks = len(newcomers), max(newcomer.num_blocks for newcomer in newcomers)
        edges = count, count * WORDS, count * halves(blocks)
        pinned, there = (side[: sum(edges)] for side in (self._pinned_news[turn], self._news))
        index, words, tables = (part.numpy() for part in pinned.split(edges))
        index[:] = [newcomer.row.index for newcomer in newcomers]
        for row in (newcomer.row for newcomer in newcomers if newcomer.is_new):
            self._sampling.introduce(row.index, row.seq)
        words.reshape(count, WORDS)[:] = self._sampling.words[index]
        width = 2 * halves(blocks)
        tables.view(np.int32).reshape(count, width)[:, :blocks] = self._host_tables.array[index, :blocks]
        there.copy_(pinned, non_blocking=True)
        index_there, words_there, tables_there = there.split(edges)
        self.settings.words.index_copy_(0, index_there, words_there.view(count, WORDS))
        if blocks:
            known = tables_there.view(torch.int32).view(count, width)[:, :blocks]
            self.tables[:, :blocks].index_copy_(0, index_there, known)

    def _fill_rows(
        self,
        host: dict[str, np.ndarray],
        shape: Shape,
        items: list[ScheduledSequence],
        n: int,
        rows: np.ndarray,
        ends: np.ndarray,
        last_blocks: np.ndarray,
        sources: np.ndarray,
    ) -> None:
        """The columns of a place for each sequence: decodes from 0, chunks from shape.decodes on, padding between."""
        for first, stop, values in ((0, shape.decodes, slice(0, n)), (shape.decodes, shape.sequences, slice(n, None))):
            if first == stop:
                continue
            count = len(rows[values])
            here, rest = slice(first, first + count), slice(first + count, stop)
            host["table_rows"][here] = rows[values]
            host["draw_rows"][here] = rows[values]
            host["drawn_positions"][here] = host["context_lens"][here] = ends[values]
            host["blocks"][here] = last_blocks[values]
            host["sources"][here] = sources[values]
            host["table_rows"][rest] = host["draw_rows"][rest] = self._padding_row
            host["drawn_positions"][rest] = host["context_lens"][rest] = host["blocks"][rest] = 0
            host["sources"][rest] = -1
        for place, item in enumerate(items[n:], start=shape.decodes):
            if not item.samples:
                # What this draws is nobody's: as a padding row it costs the least, and counts no token.
                host["draw_rows"][place] = self._padding_row
        host["last_tokens"][: shape.decodes] = np.arange(shape.decodes)
        host["query_start"][: shape.decodes + 1] = np.arange(shape.decodes + 1)

    def _fill_chunks(
        self, host: dict[str, np.ndarray], shape: Shape, chunks: list[ScheduledSequence], rows: np.ndarray
    ) -> None:
        offset = shape.decodes
        starts, last = host["query_start"], host["last_tokens"]
        for i, item in enumerate(chunks):
            stop = offset + item.num_tokens
            end = item.start + item.num_tokens
            host["input_ids"][offset:stop] = item.seq.ids(item.start, end)
            host["positions"][offset:stop] = np.arange(item.start, end)
            table = self._host_tables.array[rows[i]]
            host["slots"][offset:stop] = slots_of(table, item.start, end, self._block_size)
            starts[shape.decodes + i], last[shape.decodes + i] = offset, stop - 1
            offset = stop
        starts[shape.decodes + len(chunks) :] = offset
        last[shape.decodes + len(chunks) :] = shape.decodes
        host["input_ids"][offset:] = host["positions"][offset:] = 0
        host["slots"][offset:] = -1

    def _fill_shared(
        self,
        host: dict[str, np.ndarray],
        decodes: list[ScheduledSequence],
        rows: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        prefixes, version = self._prefixes, self._host_tables.version
        assert prefixes is not None
        if version != self._looked_at[0] or not np.array_equal(rows, self._looked_at[1]):
            self._looked_at = version, rows.copy()
            filled = [self._host_tables.rows[item.seq.seq_id].filled for item in decodes]
            limits = np.minimum(filled, (ends - 1) // self._block_size)
            prefixes.look(self._host_tables.array[rows], limits)
        tiles = len(host["lens"])
        host["members"][:], host["lens"][:] = prefixes.members[:tiles], prefixes.lens[:tiles]
        host["skipped"][:] = prefixes.skipped[: len(host["skipped"])]

    def _host_buffer(self, shape: Shape, turn: int) -> dict[str, np.ndarray]:
        cut = self._layout.cut(self._pinned[turn], shape)
        columns = {name: getattr(cut, name) for name in GraphBuffers.__slots__ if name != "shared"}
        if cut.shared is not None:
            columns |= {name: getattr(cut.shared, name) for name in SharedPrefixes.__slots__}
        views = self._host[shape, turn] = {name: column.numpy() for name, column in columns.items()}
        return views
