"""ModelRunner: input buffers, the forward pass, the KV pool's memory. plan ► launch ► collect.

It owns the tensors and never decides what runs: launch() takes the scheduler's plan, starts the step and
returns a handle; collect() waits for it and brings the sampled ids to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.device import DevicePlan
from engine.logprobs import Scores, score, score_prompt
from engine.outputs import TokenLogprobs
from engine.sampler import Sampler, SamplingRow
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers.attention import attention_layers
from models.loader import load_model

Progress = Callable[[str, float], None]

# Tokens of the dummy steps. On a card each count of few rows has a kernel of its own, compiled at its first use.
_WARM_UP_TOKENS = {"cpu": (1, 16, 256), "cuda": (1, 2, 3, 4, 16, 256)}


@dataclass(slots=True)
class StepHandle:
    """A step in flight. token_ids int64 [R], of R sequences, stays on the device until collect(), and so do the scores.

    collect() fills logprobs, by sequence, and prompt_logprobs, the next ones of each sequence's prompt.
    """

    sequences: list[Sequence]
    token_ids: torch.Tensor | None
    scores: Scores | None = None
    scored: list[int] = field(default_factory=list)
    prompt_scores: list[tuple[Sequence, Scores]] = field(default_factory=list)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)


class ModelRunner:
    """Runs one model, or one rank's shard of it, on one device. num_blocks and max_model_len are fixed when it is
    built. Of several ranks every one runs every step, and rank 0 samples."""

    def __init__(
        self,
        path: Path,
        model_config: ModelConfig,
        device: DevicePlan,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        progress: Progress,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.device = device
        self.model_config = model_config
        self.block_size = device.block_size
        self.max_blocks_per_seq = -(-max_model_len // self.block_size)
        self._max_num_tokens = max_num_tokens
        self._tp_size = tp_size
        progress("loading weights", 0.0)
        self.model: Any = load_model(
            path,
            model_config,
            device=device.device,
            dtype=device.dtype,
            attention_backend=device.attention_backend,
            progress=progress,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        self.sampler = Sampler(model_config.vocab_size, device.device)
        self.kv_cache: torch.Tensor | None = None
        self._input_ids = self._host_buffer(max_num_tokens, torch.int64)
        self._positions = self._host_buffer(max_num_tokens, torch.int64)
        self._slots = self._host_buffer(max_num_tokens, torch.int64)
        self._wants_lengths = attention_layers(self.model)[0].backend.wants_device_lengths
        self._query_start = self._host_buffer(max_num_seqs + 1, torch.int32)
        self._context_lens = self._host_buffer(max_num_seqs, torch.int32)
        self._tables = np.zeros((max_num_seqs, self.max_blocks_per_seq), np.int32)
        self._rows: dict[int, _TableRow] = {}
        self._free_rows = list(range(max_num_seqs))

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        size = torch.empty((), dtype=self.device.dtype).element_size()
        return self.model_config.kv_bytes_per_token(size, self._tp_size) * self.block_size

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Take the pool's memory: [layers, 2, num_blocks, block_size, this rank's kv_heads, head_dim].

        Zeroed, because a masked-out slot still enters attention as 0 * value, which NaN would survive; on a
        CPU the zero pages cost nothing before they are written.
        """
        c = self.model_config
        self.kv_cache = torch.zeros(
            (c.num_hidden_layers, 2, num_blocks, self.block_size, c.kv_heads_per_rank(self._tp_size), c.head_dim),
            dtype=self.device.dtype,
            device=self.device.device,
        )
        self.model.bind_kv_cache(self.kv_cache)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the step of `plan`; every planned sequence has its blocks already."""
        batch, rows = self._prepare(plan)
        hidden = self.model(batch)
        sampled = rows.sampled
        prompt_scores = [(item.seq, self._score_prompt(hidden, first, item)) for first, item in rows.prompts]
        if not sampled:
            return StepHandle([], None, prompt_scores=prompt_scores)
        if rows.prompts or len(sampled) > len(hidden):
            hidden = hidden.index_select(0, self._to_device(torch.tensor(rows.sampled_rows)))
        logits = self.model.compute_logits(hidden)
        if logits is None:
            return StepHandle([], None)
        settings = self.sampler.prepare([_sampling_row(seq) for seq in sampled])
        token_ids = self.sampler(logits, settings)
        handle = StepHandle(sampled, token_ids, prompt_scores=prompt_scores)
        if settings.scored is not None:
            handle.scores, handle.scored = score(logits, token_ids, settings.scored), settings.scored.index
        return handle

    def collect(self, handle: StepHandle) -> list[int]:
        """Wait for the step; returns the sampled id of each of handle.sequences, BAD_TOKEN where the logits
        were not finite. On a rank other than 0 there are none."""
        handle.prompt_logprobs = [(seq, scores.read()) for seq, scores in handle.prompt_scores]
        if handle.scores is not None:
            found = zip(handle.scored, handle.scores.read(), strict=True)
            handle.logprobs = {handle.sequences[i]: logprobs for i, logprobs in found}
        if handle.token_ids is None:
            if self.device.device.type == "cuda":
                # The host buffers are filled anew for the next step; this one must have read them.
                torch.cuda.current_stream().synchronize()
            return []
        return handle.token_ids.tolist()

    @torch.inference_mode()
    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Copy whole blocks, {destination: source}, in every layer, as if all at once; before the step that writes."""
        assert self.kv_cache is not None
        device = self.device.device
        targets, sources = (torch.tensor(list(ids), device=device) for ids in (copies, copies.values()))
        self.kv_cache[:, :, targets] = self.kv_cache[:, :, sources]

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> int:
        """Run dummy steps of the shapes that serving meets first, against block 0, whose content is then
        overwritten by whoever allocates it. Returns how many tokens they were."""
        layer = attention_layers(self.model)[0]
        assert layer.k_cache is not None and layer.v_cache is not None, "allocate_kv_cache comes before warm_up"
        layer.backend.warm_up(layer.num_heads, layer.k_cache, layer.v_cache)
        self.sampler.warm_up()
        wanted = _WARM_UP_TOKENS[self.device.device.type]
        sizes = [n for n in wanted if n <= min(self._max_num_tokens, self.block_size * self.max_blocks_per_seq)]
        num_tokens = 0
        for i, size in enumerate(sizes):
            progress("warming up", 100.0 * i / len(sizes))
            ids = torch.zeros(size, dtype=torch.int64, device=self.device.device)
            count = -(-size // self.block_size)
            assert self.kv_cache is not None
            if count > self.kv_cache.shape[2]:
                break
            table = torch.arange(count, dtype=torch.int32, device=self.device.device)[None]
            positions = torch.arange(size, device=self.device.device)
            batch = ForwardBatch(
                ids,
                positions,
                positions.clone(),
                [size],
                [size],
                table,
                [list(range(count))],
                0,
                self.block_size,
                torch.tensor([size - 1], device=self.device.device),
                {},
            )
            self.model.compute_logits(self.model(batch))
            num_tokens += size
        progress("warming up", 100.0)
        return num_tokens

    def check_device(self) -> None:
        """Raise what the device raises if it has lost its state: after a sticky CUDA error every call does."""
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)
            torch.ones(1, device=self.device.device).item()

    def release_buffers(self) -> None:
        """Give back memory that is only kept to save time."""
        attention_layers(self.model)[0].backend.release_buffers()
        if self.device.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the content of these blocks, in every layer, with zeros."""
        assert self.kv_cache is not None
        self.kv_cache[:, :, blocks] = 0

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free_rows.append(row.index)
        self.sampler.forget(seq_id)

    def exit(self) -> None:
        """Let go of the model's and the pool's memory; a second call is a no-op."""
        if self.kv_cache is not None:
            self.kv_cache = None
            del self.model

    # -- internals ------------------------------------------------------------------------------------

    def _prepare(self, plan: StepPlan) -> tuple[ForwardBatch, _HiddenRows]:
        ids, positions, slots = self._input_ids.numpy(), self._positions.numpy(), self._slots.numpy()
        block_size, offset = self.block_size, 0
        logits_indices: list[int] = []
        hidden_rows = _HiddenRows([], [], [])
        rows: list[int] = []
        for item in plan.items:
            seq, start, count = item.seq, item.start, item.num_tokens
            row = self._table_row(seq)
            rows.append(row)
            if count == 1:
                ids[offset] = seq.token_ids[start]
                positions[offset] = start
                slots[offset] = seq.block_table[start // block_size] * block_size + start % block_size
            else:
                where = np.arange(start, start + count)
                ids[offset : offset + count] = seq.token_ids[start : start + count]
                positions[offset : offset + count] = where
                blocks = self._tables[row, where // block_size]
                slots[offset : offset + count] = blocks * block_size + where % block_size
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
            input_ids=self._to_device(self._input_ids[:offset]),
            positions=self._to_device(self._positions[:offset]),
            slot_mapping=self._to_device(self._slots[:offset]),
            query_lens=[item.num_tokens for item in plan.items],
            context_lens=[item.start + item.num_tokens for item in plan.items],
            block_tables=self._to_device(torch.from_numpy(self._tables[rows, :width])),
            block_lists=[item.seq.block_table for item in plan.items],
            num_decodes=plan.num_decodes,
            block_size=block_size,
            logits_indices=self._to_device(torch.tensor(logits_indices, dtype=torch.int64)),
            scratch={},
        )
        if self._wants_lengths:
            self._add_device_lengths(batch)
        return batch, hidden_rows

    def _score_prompt(self, hidden: torch.Tensor, first: int, item: ScheduledSequence) -> Scores:
        seq, wanted = item.seq, item.seq.unscored_prompt(item.start, item.start + item.num_tokens)
        targets = torch.tensor(seq.token_ids[wanted.start + 1 : wanted.stop + 1], device=hidden.device)
        rows = hidden[first : first + len(wanted)]
        count = seq.params.prompt_logprobs or 0
        return score_prompt(rows, targets, count, self.model.compute_logits, self.model_config.vocab_size)

    def _add_device_lengths(self, batch: ForwardBatch) -> None:
        count = len(batch.query_lens)
        query_start, context_lens = self._query_start[: count + 1], self._context_lens[:count]
        np.cumsum(batch.query_lens, dtype=np.int32, out=query_start.numpy()[1:])
        context_lens.numpy()[:] = batch.context_lens
        batch.query_start = self._to_device(query_start)
        batch.context_lens_tensor = self._to_device(context_lens)

    def _table_row(self, seq: Sequence) -> int:
        """The persistent block-table row of seq, brought up to date by what was added since the last step."""
        row = self._rows.get(seq.seq_id)
        if row is None:
            row = self._rows[seq.seq_id] = _TableRow(self._take_row(), seq, seq.block_table, 0)
        if row.source is not seq.block_table:
            # A preempted sequence came back with another table, or a block of it was copied on write.
            row.source, row.filled = seq.block_table, 0
        if row.filled < len(seq.block_table):
            self._tables[row.index, row.filled : len(seq.block_table)] = seq.block_table[row.filled :]
            row.filled = len(seq.block_table)
        return row.index

    def _take_row(self) -> int:
        if not self._free_rows:
            # Only preempted and paused sequences hold a row without running; there are never more running than rows.
            for seq_id in [r for r, row in self._rows.items() if row.seq.status is not SequenceStatus.RUNNING]:
                self._free_rows.append(self._rows.pop(seq_id).index)
        return self._free_rows.pop()

    def _host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self.device.device.type == "cuda")

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.device.type == "cpu" else tensor.to(self.device.device, non_blocking=True)


def _sampling_row(seq: Sequence) -> SamplingRow:
    prompt = output = ()
    if seq.params.has_penalties:
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
    banned = seq.stop_ids if seq.num_output_tokens < seq.params.min_tokens else ()
    position = len(seq.token_ids)
    return SamplingRow(seq.seq_id, seq.params, seq.seed, position, prompt, output, banned, seq.num_logprobs)


@dataclass(slots=True)
class _HiddenRows:
    """What the hidden states [R, hidden] that a step keeps are for.

    sampled        sequences that sample; sampled_rows their rows: forks share one
    prompts        chunks whose prompt's log-probabilities are wanted, each with the first of its rows
    """

    sampled: list[Sequence]
    sampled_rows: list[int]
    prompts: list[tuple[int, ScheduledSequence]]


@dataclass(slots=True)
class _TableRow:
    index: int
    seq: Sequence
    source: list[int]
    filled: int
