"""DecodeGraphs: decode steps as CUDA graphs, one launch in place of several hundred.

A graph is one size of batch: from the step's inputs to the drawn token ids. Batches are padded to the next size
captured. All graphs share a pool of memory, which they can because they never run at once: what one leaves there is
read before the next is launched, on the same stream. Logits and token ids have buffers of their own, of which every
graph uses the first rows.

What the host chooses when a step is launched (grids, splits) is frozen in a graph. So nothing in it may follow from the
lengths of the moment: the block tables are always handed over in their full width.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.decode_inputs import DecodeBuffers, DecodeInputs
from engine.device import DevicePlan
from engine.sampler import Sampler
from engine.scheduler import ScheduledSequence
from models.batch import ForwardBatch
from models.layers.attention import attention_layers
from models.layers.rotary import RotaryEmbedding

logger = logging.getLogger("pageturn.engine")

MOST_ROWS = 512  # of a graph; beyond, launches are a small share of a step
SECONDS = 60.0  # to capture in
_MIB = 2**20


class CudaRecorder:
    """Records what a function launches; every call of what record() returns launches it again, on the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """function runs once before it is recorded: kernels are compiled and libraries set up on their first use."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def used_bytes(self) -> int:
        """Of the card's memory, by whomever."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()


@dataclass(slots=True)
class DecodeStep:
    """A replayed step of R rows: logits [R, V], on the device until the next launch; token_ids int64 [R], in host memory once
    `done` has happened, or None where the rows need more than the graph's draw: the logits are float32 then."""

    logits: Tensor
    token_ids: Tensor | None
    done: Any


class DecodeGraphs:
    """Graphs of decode steps of the given sizes, ascending. See capture() and launch()."""

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        inputs: DecodeInputs,
        sizes: list[int],
        block_size: int,
        device: torch.device,
        recorder: CudaRecorder,
    ) -> None:
        self.sizes: list[int] = []  # those captured
        self._wanted = sizes
        self._model, self._sampler, self._inputs = model, sampler, inputs
        self._block_size = block_size
        self._recorder = recorder
        self._used_before = recorder.used_bytes()
        most = sizes[-1]
        self._logits = torch.zeros(most, sampler.vocab_size, dtype=model.lm_head.out_dtype, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)
        pinned = device.type == "cuda"
        self._results = [torch.zeros(most, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._events = [recorder.event() for _ in range(2)]
        self._turn = 0
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.inference_mode()
    def capture(self, budget: int, progress: Callable[[str, float], None], seconds: float = SECONDS) -> None:
        """Record a graph of each size while they take at most `budget` bytes and `seconds`; the log says what they
        took. The largest comes first, so that the others find memory in the pool; then the powers of two, between
        which the others are refinements."""
        started = time.perf_counter()
        order = capture_order(self._wanted)
        used, why = 0, ""
        for i, size in enumerate(order):
            progress("capturing graphs", 100.0 * i / len(order))
            used, elapsed = self._recorder.used_bytes() - self._used_before, time.perf_counter() - started
            if elapsed > seconds or used > budget:
                why = f"; left out: {', '.join(map(str, sorted(order[i:])))}"
                break
            # Padding rows only: nothing is written to the cache.
            self._inputs.send([], size, 0)
            buffers = self._inputs.buffers(size)
            self._replays[size] = self._recorder.record(lambda size=size, buffers=buffers: self._step(size, buffers))
        self.sizes = sorted(self._replays)
        progress("capturing graphs", 100.0)
        used = self._recorder.used_bytes() - self._used_before
        logger.info(
            "decode graphs: %d sizes up to %d sequences, %.1f s (at most %.0f s), %.0f MiB (at most %.0f)%s",
            len(self.sizes), self.sizes[-1] if self.sizes else 0,
            time.perf_counter() - started, seconds, used / _MIB, budget / _MIB, why,
        )  # fmt: skip

    def fits(self, num_rows: int) -> bool:
        """Whether a step of so many decodes has a graph."""
        return bool(self.sizes) and 0 < num_rows <= self.sizes[-1]

    @torch.inference_mode()
    def launch(self, items: list[ScheduledSequence]) -> DecodeStep:
        """Start the step of these decodes; fits() says whether it can be."""
        count = len(items)
        size = self.sizes[bisect_left(self.sizes, count)]
        turn = self._turn
        self._turn = 1 - turn
        done = self._events[turn]
        done.synchronize()  # the step before last, whose buffers these are
        is_drawn = self._inputs.send(items, size, turn)
        self._replays[size]()
        logits, token_ids = self._logits[:count], None
        if not is_drawn:
            logits = logits.float()
        else:
            token_ids = self._results[turn][:count]
            token_ids.copy_(self._tokens[:count], non_blocking=True)
        done.record()
        return DecodeStep(logits, token_ids, done)

    def _step(self, size: int, x: DecodeBuffers) -> None:
        """What is recorded."""
        tables = self._inputs.tables
        tables.view(-1).index_copy_(0, x.entries, x.blocks)
        batch = ForwardBatch(
            input_ids=x.input_ids,
            positions=x.positions,
            slot_mapping=x.slots,
            query_lens=[1] * size,
            context_lens=[1] * size,  # the backend reads those on the device
            block_tables=tables.index_select(0, x.table_rows),
            block_lists=[],
            num_decodes=size,
            block_size=self._block_size,
            logits_indices=self._rows[:size],
            scratch={},
            query_start=self._query_start[: size + 1],
            context_lens_tensor=x.context_lens,
        )
        logits = self._model.compute_logits(self._model(batch), out=self._logits[:size])
        self._sampler.draw(
            logits, self._inputs.settings, x.table_rows, x.drawn_positions, x.input_ids, out=self._tokens[:size]
        )


def why_eager(enforce_eager: bool, device: DevicePlan, model: Any, sampler: Sampler, tp_size: int) -> str | None:
    """What keeps decode steps from being captured; None where nothing does."""
    if enforce_eager:
        return "enforce_eager is set"
    if device.device.type != "cuda":
        return f"a {device.device.type} has no CUDA graphs"
    if tp_size > 1:
        return "tensor_parallel_size is above 1"
    if not attention_layers(model)[0].backend.wants_device_lengths:
        return f"attention by {device.attention_backend} reads lengths on the host"
    if any(module.dynamic for module in model.modules() if isinstance(module, RotaryEmbedding)):
        return "dynamic rotary scaling computes its angles on the host"
    if not sampler.has_kernel:
        return "the sampling kernel does not run here"
    return None


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: steps of 8 up to 256, then of 16, and few rows exactly."""
    most = min(max_num_seqs, MOST_ROWS)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MOST_ROWS + 1, 16), most}
    return sorted(size for size in sizes if size <= most)


def capture_order(sizes: list[int]) -> list[int]:
    """The largest, then powers of two, then the rest, each from large to small."""
    return sorted(sizes, key=lambda size: (size != sizes[-1], size & (size - 1) != 0, -size))


def memory_budget(sizes: list[int], vocab_size: int) -> int:
    """Bytes that graphs of these sizes may take: the logits in two precisions, each graph's own, and activations."""
    return 256 * _MIB + 2 * 4 * sizes[-1] * vocab_size + 4 * _MIB * len(sizes)
