"""Penalties on tokens that a request has already seen: repetition, presence, frequency.

The only state is one row of token ids per request, prompt first and then output, on the sampler's device.
Penalties then touch the few thousand ids that occur rather than the whole vocabulary, and counts are derived
from that row in the step that needs them, so nothing can drift when a request is preempted and recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class PenaltyRows:
    """What one batch asks of the penalties: P of its rows, in the batch's order.

    rows               int64 [P]    which rows of the logits
    slots              int64 [P]    which rows of the history
    repetition, presence, frequency  float32 [P, 1]
    counts_needed      whether presence or frequency is active in any row
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts_needed: bool


@dataclass(slots=True)
class _Slot:
    index: int
    prompt_len: int
    length: int


class PenaltyHistory:
    """Token ids of the requests that have penalties: int64 [slots, capacity], grown by doubling.

    A row is padded with its own first token. Applying a penalty computes one value per entry from the
    untouched logits, so entries that repeat an id write the same value and need no mask.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, request_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """The request's row, written in full on first sight."""
        known = self._slots.get(request_id)
        if known is None:
            known = self._write(request_id, prompt_ids, output_ids)
        return known.index

    def extend(self, requests: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Fold in what each (request id, prompt ids, output ids) has gained since the last call.

        All new tokens go to the device in one copy. A history that is longer than its request is written anew.
        """
        slots: list[int] = []
        columns: list[int] = []
        ids: list[int] = []
        for request_id, prompt_ids, output_ids in requests:
            entry = self._slots[request_id]
            length = len(prompt_ids) + len(output_ids)
            if length == entry.length:
                continue
            if length < entry.length:
                self._write(request_id, prompt_ids, output_ids)
                continue
            self._reserve(0, length)
            for column in range(entry.length, length):
                slots.append(entry.index)
                columns.append(column)
                ids.append(output_ids[column - entry.prompt_len])
            entry.length = length
        if ids:
            slot, column, token = torch.tensor([slots, columns, ids], dtype=torch.int64, device=self._device)
            self._ids[slot, column] = token

    def apply(self, logits: Tensor, batch: PenaltyRows, request_ids: Sequence[int]) -> Tensor:
        """A copy of logits float32 [R, V] with the penalties in place; request_ids names batch's P rows."""
        entries = [self._slots[request_id] for request_id in request_ids]
        ids = self._ids[batch.slots, : max(entry.length for entry in entries)]
        rows = batch.rows[:, None]
        values = logits[rows, ids]
        values = torch.where(values < 0, values * batch.repetition, values / batch.repetition)
        if batch.counts_needed:
            counts = self._output_counts(ids, entries, logits.shape[1])
            values -= batch.presence * (counts > 0) + batch.frequency * counts
        penalized = logits.clone()
        penalized[rows, ids] = values
        return penalized

    def forget(self, request_id: int) -> None:
        """Give the request's row back; an unknown id is a no-op."""
        entry = self._slots.pop(request_id, None)
        if entry is not None:
            self._free.append(entry.index)

    def _output_counts(self, ids: Tensor, entries: list[_Slot], vocab_size: int) -> Tensor:
        """float32 [P, L]: how often each id of `ids` stands in its request's output."""
        bounds = torch.tensor([[e.prompt_len, e.length] for e in entries], device=self._device)
        column = torch.arange(ids.shape[1], device=self._device)
        is_output = ((column >= bounds[:, :1]) & (column < bounds[:, 1:])).to(torch.float32)
        # Sums of ones are exact in float32, so the order of additions does not matter.
        counts = torch.zeros((len(entries), vocab_size), device=self._device).scatter_add_(1, ids, is_output)
        return counts.gather(1, ids)

    def _write(self, request_id: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> _Slot:
        tokens = [*prompt_ids, *output_ids]
        entry = self._slots.get(request_id)
        if entry is None:
            self._reserve(len(self._slots) + 1, len(tokens))
            entry = self._slots[request_id] = _Slot(self._free.pop(), 0, 0)
        entry.prompt_len, entry.length = len(prompt_ids), len(tokens)
        row = self._ids[entry.index]
        row.fill_(tokens[0])
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        return entry

    def _reserve(self, slots: int, columns: int) -> None:
        """Grow to hold `slots` rows of `columns` ids; new columns repeat each row's first token."""
        have_slots, have_columns = self._ids.shape
        if slots > have_slots:
            grown = max(4, slots, 2 * have_slots)
            more = torch.zeros((grown - have_slots, have_columns), dtype=torch.int64, device=self._device)
            self._ids = torch.cat([self._ids, more])
            self._free.extend(range(grown - 1, have_slots - 1, -1))
        if columns > have_columns:
            grown = max(256, columns, 2 * have_columns)
            first = self._ids[:, :1] if have_columns else self._ids.new_zeros((self._ids.shape[0], 1))
            self._ids = torch.cat([self._ids, first.expand(-1, grown - have_columns)], dim=1)
