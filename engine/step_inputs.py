"""StepInputs: from a plan to the tensors of an eager step, through host buffers that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.block_tables import BlockTables, slots_of
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence
from models.batch import ForwardBatch


@dataclass(slots=True)
class HiddenRows:
    """What the hidden states [R, hidden] that a step keeps are for.

    sampled        sequences that sample; sampled_rows their rows: forks share one
    prompts        chunks whose prompt's log-probabilities are wanted, each with the first of its rows
    """

    sampled: list[Sequence]
    sampled_rows: list[int]
    prompts: list[tuple[int, ScheduledSequence]]


class StepInputs:
    """device_lengths: whether batches carry query_start and context_lens_tensor. A step must have read its inputs
    before those of the next are built: they share the buffers."""

    def __init__(
        self,
        tables: BlockTables,
        block_size: int,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        device_lengths: bool,
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        self._device = device
        self._wants_lengths = device_lengths
        self._input_ids = self._host_buffer(max_num_tokens, torch.int64)
        self._positions = self._host_buffer(max_num_tokens, torch.int64)
        self._slots = self._host_buffer(max_num_tokens, torch.int64)
        self._query_start = self._host_buffer(max_num_seqs + 1, torch.int32)
        self._context_lens = self._host_buffer(max_num_seqs, torch.int32)

    def build(self, plan: StepPlan) -> tuple[ForwardBatch, HiddenRows]:
        """The plan's batch, and what the rows of its result are for."""
        ids, positions, slots = self._input_ids.numpy(), self._positions.numpy(), self._slots.numpy()
        block_size, offset = self._block_size, 0
        logits_indices: list[int] = []
        hidden_rows = HiddenRows([], [], [])
        rows: list[int] = []
        for item in plan.items:
            seq, start, count = item.seq, item.start, item.num_tokens
            row = self._tables.row(seq).index
            rows.append(row)
            if count == 1:
                ids[offset] = seq.token_ids[start]
                positions[offset] = start
                slots[offset] = seq.block_table[start // block_size] * block_size + start % block_size
            else:
                end, stop = start + count, offset + count
                ids[offset:stop] = seq.ids(start, end)
                positions[offset:stop] = np.arange(start, end)
                slots[offset:stop] = slots_of(self._tables.array[row], start, end, block_size)
            if seq.prompt_logprobs is not None and (wanted := seq.unscored_prompt(start, start + count)):
                hidden_rows.prompts.append((len(logits_indices), item))
                logits_indices.extend(range(offset + wanted.start - start, offset + wanted.stop - start))
            offset += count
            if item.samples:
                hidden_rows.sampled.extend(seq.drawn)
                hidden_rows.sampled_rows.extend([len(logits_indices)] * len(seq.drawn))
                logits_indices.append(offset - 1)
        width = max(len(item.seq.block_table) for item in plan.items)
        batch = ForwardBatch(
            input_ids=self.to_device(self._input_ids[:offset]),
            positions=self.to_device(self._positions[:offset]),
            slot_mapping=self.to_device(self._slots[:offset]),
            query_lens=[item.num_tokens for item in plan.items],
            context_lens=[item.start + item.num_tokens for item in plan.items],
            block_tables=self.to_device(torch.from_numpy(self._tables.array[rows, :width])),
            block_lists=[item.seq.block_table for item in plan.items],
            num_decodes=plan.num_decodes,
            block_size=block_size,
            logits_indices=self.to_device(torch.tensor(logits_indices, dtype=torch.int64)),
            scratch={},
        )
        if self._wants_lengths:
            self._add_device_lengths(batch)
        return batch, hidden_rows

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)

    def _add_device_lengths(self, batch: ForwardBatch) -> None:
        count = len(batch.query_lens)
        query_start, context_lens = self._query_start[: count + 1], self._context_lens[:count]
        np.cumsum(batch.query_lens, dtype=np.int32, out=query_start.numpy()[1:])
        context_lens.numpy()[:] = batch.context_lens
        batch.query_start = self.to_device(query_start)
        batch.context_lens_tensor = self.to_device(context_lens)

    def _host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")
