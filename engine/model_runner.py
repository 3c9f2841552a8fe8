"""ModelRunner: input buffers, the forward pass, the KV pool's memory. plan ► launch ► collect.

It owns the tensors and never decides what runs: launch() takes the scheduler's plan, starts the step and
returns a handle; collect() waits for it and brings the sampled ids to the host.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import step_graphs
from engine.block_tables import BlockTables
from engine.device import DevicePlan
from engine.faults import is_out_of_memory
from engine.graph_inputs import GraphInputs
from engine.graph_shapes import Shape, all_shapes
from engine.logprobs import Scores, score, score_prompt
from engine.outputs import TokenLogprobs
from engine.sampler import Sampler, SamplingRow
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence
from engine.step_graphs import StepGraphs
from engine.step_inputs import StepInputs
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers import one_shot
from models.layers.attention import attention_layers
from models.layers.parallel import any_rank
from models.loader import load_model

logger = logging.getLogger("pageturn.engine")

Progress = Callable[[str, float], None]

# Tokens of the dummy steps. On a card each count of few rows has a kernel of its own, compiled at its first use.
_WARM_UP_TOKENS = {"cpu": (1, 16), "cuda": (1, 2, 3, 4, 16, 256)}
# Of the step that tells the prefill's rate: on a card so many that it, not the host, takes the time.
_MEASURED_TOKENS = {"cpu": 256, "cuda": 4096}


@dataclass(slots=True)
class StepHandle:
    """A step in flight. token_ids int64 [R], of R sequences or of those in `rows` where that is given, stays on the
    device until collect(), and so do the scores; with `arrived`, a CUDA event, it is in host memory once that has
    happened.

    collect() fills logprobs, by sequence, and prompt_logprobs, the next ones of each sequence's prompt.
    """

    sequences: list[Sequence]
    token_ids: torch.Tensor | None
    arrived: Any = None
    rows: list[int] | None = None
    scores: Scores | None = None
    scored: list[int] = field(default_factory=list)
    prompt_scores: list[tuple[Sequence, Scores]] = field(default_factory=list)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]] = field(default_factory=list)


class ModelRunner:
    """Runs one model, or one rank's shard of it, on one device. num_blocks and max_model_len are fixed when it is
    built. Of several ranks every one runs every step, and rank 0 samples; what a captured step draws all have.
    graph_bytes: memory that capture_graphs() may take beside the KV pool."""

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
        enforce_eager: bool = False,
    ) -> None:
        self.device = device
        self.model_config = model_config
        self.block_size = device.block_size
        self.max_blocks_per_seq = -(-max_model_len // self.block_size)
        self.max_num_tokens = max_num_tokens
        self._tp_rank, self._tp_size = tp_rank, tp_size
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
            native=not enforce_eager,
        )
        if device.device.type == "cpu":
            why = "enforce_eager is set" if enforce_eager else self.model.why_no_decoder
            logger.info("steps of few tokens: %s", f"by PyTorch ({why})" if why else "in C, compiled for this CPU")
        if tp_size > 1:
            how = one_shot.install(self.model, model_config.hidden_size, device.dtype, device.device)
            logger.info("sums over ranks: %s", how)
        decoder = self.model.decoder
        self.sampler = Sampler(model_config.vocab_size, device.device, decoder.draw if decoder is not None else None)
        self.kv_cache: torch.Tensor | None = None
        self.prefill_rate = 0.0  # tokens/s, measured by warm_up
        self._tables = BlockTables(max_num_seqs, self.max_blocks_per_seq)
        self._inputs = StepInputs(
            self._tables,
            self.block_size,
            device.device,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            device_lengths=attention_layers(self.model)[0].backend.wants_device_lengths,
        )
        self.graphs: StepGraphs | None = None
        self._shapes = all_shapes(max_num_seqs, max_num_tokens)
        self._why_eager = step_graphs.why_eager(enforce_eager, device, self.model, self.sampler)
        if tp_size > 1 and any_rank(self._why_eager is not None, device.device):
            self._why_eager = self._why_eager or "another rank cannot"
        self.graph_bytes = 0 if self._why_eager else step_graphs.memory_budget(self._shapes, model_config)

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        size = torch.empty((), dtype=self.device.dtype).element_size()
        return self.model_config.kv_bytes_per_token(size, self._tp_size) * self.block_size

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Take the pool's memory: [layers, 2, num_blocks, block_size, this rank's kv_heads, head_dim].

        Zeroed, because a masked-out slot still enters attention as 0 * value, which NaN would survive. On a CPU
        these are the system's pages of zeros, which take neither time nor memory before they are written.
        """
        c = self.model_config
        kv_heads = c.kv_heads_per_rank(self._tp_size)
        shape = (c.num_hidden_layers, 2, num_blocks, self.block_size, kv_heads, c.head_dim)
        dtype, device = self.device.dtype, self.device.device
        if device.type == "cpu":  # torch.zeros would write them all
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            self.kv_cache = torch.from_numpy(zeros).view(dtype).view(shape)
        else:
            self.kv_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.model.bind_kv_cache(self.kv_cache)

    def release_kv_cache(self) -> None:
        """Let go of the pool's memory; another pool may be allocated."""
        self.kv_cache = None
        for layer in attention_layers(self.model):
            layer.k_cache = layer.v_cache = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the step of `plan`; every planned sequence has its blocks already."""
        if self.graphs is not None:
            if (shape := self.graphs.shape_of(plan)) is not None:
                return self._replay(self.graphs, plan, shape)
            self.graphs.interrupt()
        batch, rows = self._inputs.build(plan)
        hidden = self.model(batch)
        sampled = rows.sampled
        scored = [(item.seq, self._score_prompt(hidden, first, item)) for first, item in rows.prompts]
        prompt_scores = [(seq, scores) for seq, scores in scored if scores is not None]
        if not sampled:
            return StepHandle([], None, prompt_scores=prompt_scores)
        if rows.prompts or len(sampled) > len(hidden):
            hidden = hidden.index_select(0, self._inputs.to_device(torch.tensor(rows.sampled_rows)))
        logits = self.model.compute_logits(hidden)
        if logits is None:
            return StepHandle([], None)
        handle = self._sample(logits, sampled)
        handle.prompt_scores = prompt_scores
        return handle

    @property
    def leads(self) -> bool:
        """A step may be launched behind the last one before that is collected; can_follow() says whether this one."""
        return self.graphs is not None and self.graphs.leads

    def can_follow(self, plan: StepPlan) -> bool:
        return self.graphs is not None and self.graphs.shape_of(plan) is not None and self.graphs.can_follow(plan)

    def collect(self, handle: StepHandle) -> list[int]:
        """Wait for the step; returns the sampled id of each of handle.sequences, BAD_TOKEN where the logits
        were not finite. On a rank other than 0 there are none, or the same."""
        handle.prompt_logprobs = [(seq, scores.read()) for seq, scores in handle.prompt_scores]
        if handle.scores is not None:
            found = zip(handle.scored, handle.scores.read(), strict=True)
            handle.logprobs = {handle.sequences[i]: logprobs for i, logprobs in found}
        if handle.token_ids is None:
            if self.device.device.type == "cuda":
                # The host buffers are filled anew for the next step; this one must have read them.
                torch.cuda.current_stream().synchronize()
            return []
        if handle.arrived is not None:
            handle.arrived.synchronize()
        token_ids = handle.token_ids.tolist()
        return token_ids if handle.rows is None else [token_ids[row] for row in handle.rows]

    @torch.inference_mode()
    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Copy whole blocks, {destination: source}, in every layer, as if all at once; before the step that writes."""
        assert self.kv_cache is not None
        device = self.device.device
        targets, sources = (torch.tensor(list(ids), device=device) for ids in (copies, copies.values()))
        try:
            self.kv_cache[:, :, targets] = self.kv_cache[:, :, sources]
        except RuntimeError as error:  # for want of memory for what was read; nothing is written yet
            if not is_out_of_memory(error):
                raise
            self.release_buffers()
            # A layer at a time, in memory that is asked for before the first is written: what has failed halfway could
            # not be done again, for a source may be another's target.
            read = self.kv_cache[0].index_select(1, sources)
            for layer in self.kv_cache:
                torch.index_select(layer, 1, sources, out=read)
                layer.index_copy_(1, targets, read)

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> int:
        """Run dummy steps of the shapes that serving meets first, and of one that tells the prefill's rate, against
        the first blocks, whose content is then overwritten by whoever allocates them. Returns how many tokens they
        were."""
        layer = attention_layers(self.model)[0]
        assert layer.k_cache is not None and layer.v_cache is not None, "allocate_kv_cache comes before warm_up"
        most_decodes = max(shape.decodes for shape in self._shapes)
        layer.backend.warm_up(layer.num_heads, layer.k_cache, layer.v_cache, most_decodes)
        self.sampler.warm_up()
        kind = self.device.device.type
        room = self.block_size * min(self.max_blocks_per_seq, layer.k_cache.shape[0])
        longest = min(self.max_num_tokens, room, self.model_config.max_position_embeddings)
        sizes = [n for n in _WARM_UP_TOKENS[kind] if n <= longest]
        measured = min(_MEASURED_TOKENS[kind], longest)
        sizes += [measured, measured] if kind == "cuda" else [measured]  # the first may compile what the second takes
        seconds = 0.0
        for i, size in enumerate(sizes):
            progress("warming up", 100.0 * i / len(sizes))
            seconds = self._run_dummy(size)
        self.prefill_rate = measured / seconds
        progress("warming up", 100.0)
        return sum(sizes)

    def _run_dummy(self, size: int) -> float:
        """A step of so many prompt tokens -> seconds."""
        device = self.device.device
        count = -(-size // self.block_size)
        ids = torch.zeros(size, dtype=torch.int64, device=device)
        table = torch.arange(count, dtype=torch.int32, device=device)[None]
        positions = torch.arange(size, device=device)
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
            torch.tensor([size - 1], device=device),
            {},
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        self.model.compute_logits(self.model(batch))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def capture_graphs(self, progress: Progress) -> None:
        """Capture steps as CUDA graphs, where that can be done; after warm_up. The log says what came of it."""
        if self._why_eager is not None:
            logger.info("graphs: none (%s)", self._why_eager)
            return
        device = self.device.device
        layer = attention_layers(self.model)[0]
        per_tile = partial(layer.backend.sequences_per_tile, layer.num_heads, layer.num_kv_heads)
        inputs = GraphInputs(
            self._tables, self.model_config.vocab_size, self.block_size, self._shapes, device, per_tile
        )
        recorder = step_graphs.CudaRecorder(device)
        ranks = self._tp_rank, self._tp_size
        self.graphs = StepGraphs(
            self.model, self.sampler, inputs, self._shapes, self.block_size, device, recorder, *ranks
        )
        self.graphs.capture(self.graph_bytes, progress)

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
        self._tables.forget(seq_id)
        self.sampler.forget(seq_id)

    def exit(self) -> None:
        """Let go of the model's and the pool's memory; a second call is a no-op."""
        if self.kv_cache is not None:
            self.kv_cache = self.graphs = None
            del self.model

    # -- internals ------------------------------------------------------------------------------------

    def _replay(self, graphs: StepGraphs, plan: StepPlan, shape: Shape) -> StepHandle:
        step = graphs.launch(plan, shape)
        # Decodes draw a token each; the chunks behind them may draw none, or those of several forks.
        n = plan.num_decodes
        sampled, rows = [item.seq for item in plan.items[:n]], step.rows[:n]
        for item, row in zip(plan.items[n:], step.rows[n:], strict=True):
            if item.samples:
                sampled += item.seq.drawn
                rows += [row] * len(item.seq.drawn)
        if step.token_ids is not None:
            return StepHandle(sampled, step.token_ids, step.done, rows)
        if step.logits is None:
            return StepHandle([], None)
        logits = step.logits.index_select(0, self._inputs.to_device(torch.tensor(rows)))
        return self._sample(logits.float(), sampled)

    def _sample(self, logits: torch.Tensor, sampled: list[Sequence]) -> StepHandle:
        settings = self.sampler.prepare([_sampling_row(seq) for seq in sampled])
        token_ids = self.sampler(logits, settings)
        handle = StepHandle(sampled, token_ids)
        if settings.scored is not None:
            handle.scores, handle.scored = score(logits, token_ids, settings.scored), settings.scored.index
        return handle

    def _score_prompt(self, hidden: torch.Tensor, first: int, item: ScheduledSequence) -> Scores | None:
        seq, wanted = item.seq, item.seq.unscored_prompt(item.start, item.start + item.num_tokens)
        targets = torch.tensor(seq.token_ids[wanted.start + 1 : wanted.stop + 1], device=hidden.device)
        rows = hidden[first : first + len(wanted)]
        count = seq.params.prompt_logprobs or 0
        return score_prompt(rows, targets, count, self.model.compute_logits, self.model_config.vocab_size)


def _sampling_row(seq: Sequence) -> SamplingRow:
    prompt = output = ()
    if seq.params.has_penalties:
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
    banned = seq.stop_ids if seq.num_output_tokens < seq.params.min_tokens else ()
    position = len(seq.token_ids)
    return SamplingRow(seq.seq_id, seq.params, seq.seed, position, prompt, output, banned, seq.num_logprobs)
