"""StepGraphs: steps as CUDA graphs, one launch in place of several hundred.

A graph is one shape of step (see graph_shapes.py): from the step's inputs to the drawn token ids. Steps are padded to a
shape captured. All graphs share a pool of memory, which they can because they never run at once: what one leaves there
is read before the next is launched, on the same stream. Logits and token ids have buffers of their own, of which every
graph uses the first rows; so the next step finds the ids there, also before the host has read them. Of several ranks
rank 0 draws, and the graph sends the ids to the others; num_replays counts, for the ranks' sake, the steps launched.

Steps of many decodes alone are captured twice: with and without a look at what they have in common.

What the host chooses when a step is launched (grids, splits) is frozen in a graph. So nothing in it may follow from the
lengths of the moment: the block tables are always handed over in their full width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine import launch_ahead
from engine.device import DevicePlan
from engine.graph_buffers import GraphBuffers
from engine.graph_inputs import GraphInputs
from engine.graph_shapes import Shape, capture_order
from engine.sampler import Sampler
from engine.scheduler import StepPlan
from models import kernels
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers.attention import attention_layers
from models.layers.parallel import any_rank, broadcast_from_first
from models.layers.rotary import RotaryEmbedding

logger = logging.getLogger("pageturn.engine")

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
class GraphStep:
    """A replayed step: logits [S, V] of a row for each place of its shape, on the device until the next launch, of
    several ranks on rank 0 alone; and token_ids int64 [S], in host memory once `done` has happened, or None where the
    step needs more than the graph's draw. rows: by item of the plan, its place."""

    logits: Tensor | None
    token_ids: Tensor | None
    done: Any
    rows: list[int]


class StepGraphs:
    """Graphs of steps of the given shapes, cheapest first. See capture() and launch()."""

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        inputs: GraphInputs,
        shapes: list[Shape],
        block_size: int,
        device: torch.device,
        recorder: CudaRecorder,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.shapes: list[Shape] = []  # those captured
        self._wanted = shapes
        self._model, self._sampler, self._inputs = model, sampler, inputs
        self._block_size = block_size
        self._recorder = recorder
        self._device, self._tp_size = device, tp_size
        self.num_replays = 0
        self._used_before = recorder.used_bytes()
        self._step_rows = kernels.load("step_rows", device)
        most = max(shape.sequences for shape in shapes)
        self._logits: Tensor | None = None
        if tp_rank == 0:
            self._logits = torch.zeros(most, sampler.vocab_size, dtype=model.lm_head.out_dtype, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.arange(most, device=device)
        pinned = device.type == "cuda"
        self._results = [torch.zeros(most, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._events = [recorder.event() for _ in range(2)]
        self._turn = 0
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._sharing: dict[Shape, Callable[[], None]] = {}  # of decodes that have a prefix in common

    @torch.inference_mode()
    def capture(self, budget: int, progress: Callable[[str, float], None], seconds: float = SECONDS) -> None:
        """Record a graph of each shape, the most useful first, while they take at most `budget` bytes and `seconds`;
        the log says what they took. Of several ranks none goes on where one has had enough."""
        started = time.perf_counter()
        order = capture_order(self._wanted)
        used, why = 0, ""
        for i, shape in enumerate(order):
            progress("capturing graphs", 100.0 * i / len(order))
            used, elapsed = self._recorder.used_bytes() - self._used_before, time.perf_counter() - started
            if self._any_rank(elapsed > seconds or used > budget):
                why = f"; left out: {', '.join(map(_name, sorted(order[i:])))}"
                break
            # Padding rows only: nothing is written to the cache.
            self._inputs.send([], 0, shape, 0)
            buffers = self._inputs.buffers(shape)
            self._replays[shape] = self._recorder.record(partial(self._step, shape, buffers, shares=shape.tokens > 0))
            if buffers.shared is not None and not shape.tokens:
                self._sharing[shape] = self._recorder.record(partial(self._step, shape, buffers, shares=True))
        self.shapes = [shape for shape in self._wanted if shape in self._replays]
        progress("capturing graphs", 100.0)
        used = self._recorder.used_bytes() - self._used_before
        logger.info(
            "graphs: %d shapes, to %d decodes and %d prompt tokens, %.1f s (at most %.0f s), %.0f MiB (at most %.0f)%s",
            len(self.shapes),
            max((shape.decodes for shape in self.shapes), default=0),
            max((shape.tokens for shape in self.shapes), default=0),
            time.perf_counter() - started,
            seconds,
            used / _MIB,
            budget / _MIB,
            why,
        )

    def shape_of(self, plan: StepPlan) -> Shape | None:
        """The cheapest captured shape that holds the plan's step; None where there is none, or the step is to report
        what no graph computes."""
        return launch_ahead.shape_of(plan, self.shapes)

    def can_follow(self, plan: StepPlan) -> bool:
        """Whether launch(plan) may come before the tokens of the last launch, which was one of these, are read."""
        return launch_ahead.can_follow(plan.items, self._inputs.drawn)

    @property
    def leads(self) -> bool:
        """The last step of all was launched here, and its tokens are where the next one finds them."""
        return bool(self._inputs.drawn)

    def interrupt(self) -> None:
        """A step runs that is none of these."""
        self._inputs.drawn = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan, shape: Shape) -> GraphStep:
        """Start the plan's step in a shape that holds it."""
        turn = self._turn
        self._turn = 1 - turn
        done = self._events[turn]
        done.synchronize()  # the step before last, whose buffers these are
        is_drawn = self._inputs.send(plan.items, plan.num_decodes, shape, turn)
        sharing = self._sharing.get(shape) if self._inputs.shares else None
        (sharing or self._replays[shape])()
        self.num_replays += 1
        logits, token_ids = self._logits_of(shape), None
        if is_drawn:
            token_ids = self._results[turn][: shape.sequences]
            token_ids.copy_(self._tokens[: shape.sequences], non_blocking=True)
        done.record()
        num_chunks = len(plan.items) - plan.num_decodes
        rows = [*range(plan.num_decodes), *range(shape.decodes, shape.decodes + num_chunks)]
        return GraphStep(logits, token_ids, done, rows)

    def _step(self, shape: Shape, x: GraphBuffers, shares: bool) -> None:
        """What is recorded."""
        tables = self._inputs.step_tables[: shape.sequences]
        self._step_rows.step_rows(
            self._inputs.tables, x.table_rows, x.blocks, x.context_lens, x.sources, self._tokens,
            block_size=self._block_size, input_ids=x.input_ids, step_tables=tables,
        )  # fmt: skip
        decodes_only = not shape.tokens
        batch = ForwardBatch(
            input_ids=x.input_ids,
            positions=x.positions,
            slot_mapping=x.slots,
            query_lens=[1] * shape.sequences,
            context_lens=[1] * shape.sequences,  # the backend reads those on the device, and query_start
            block_tables=tables,
            block_lists=[],
            num_decodes=shape.decodes,
            block_size=self._block_size,
            logits_indices=self._rows[: shape.decodes] if decodes_only else x.last_tokens,
            scratch={},
            query_start=x.query_start,
            context_lens_tensor=x.context_lens,
            shared=x.shared if shares else None,
        )
        drawn = self._tokens[: shape.sequences]
        logits = self._model.compute_logits(self._model(batch), out=self._logits_of(shape))
        if logits is not None:
            last_ids = x.input_ids if decodes_only else x.input_ids.index_select(0, x.last_tokens)
            self._sampler.draw(logits, self._inputs.settings, x.draw_rows, x.drawn_positions, last_ids, out=drawn)
        if self._tp_size > 1:
            broadcast_from_first(drawn)

    def _logits_of(self, shape: Shape) -> Tensor | None:
        return None if self._logits is None else self._logits[: shape.sequences]

    def _any_rank(self, flag: bool) -> bool:
        return any_rank(flag, self._device) if self._tp_size > 1 else flag


def why_eager(enforce_eager: bool, device: DevicePlan, model: Any, sampler: Sampler) -> str | None:
    """What keeps steps from being captured; None where nothing does."""
    if enforce_eager:
        return "enforce_eager is set"
    if device.device.type != "cuda":
        return f"a {device.device.type} has no CUDA graphs"
    if not attention_layers(model)[0].backend.wants_device_lengths:
        return f"attention by {device.attention_backend} reads lengths on the host"
    if any(module.dynamic for module in model.modules() if isinstance(module, RotaryEmbedding)):
        return "dynamic rotary scaling computes its angles on the host"
    if not sampler.has_kernel:
        return "the sampling kernel does not run here"
    return None


def memory_budget(shapes: list[Shape], model: ModelConfig) -> int:
    """Bytes that graphs of these shapes may take: logits in two precisions, the counts of tokens that penalties need (2
    bytes a row and token), the largest step's activations, and each graph's own."""
    rows, tokens = max(shape.sequences for shape in shapes), max(shape.total for shape in shapes)
    width = 6 * model.hidden_size + 3 * model.intermediate_size
    width += 2 * (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    graphs = len(shapes) + sum(not shape.tokens for shape in shapes)  # some are captured twice
    return 256 * _MIB + (2 * 4 + 2) * rows * model.vocab_size + 2 * 2 * tokens * width + 4 * _MIB * graphs


def _name(shape: Shape) -> str:
    return f"{shape.decodes}+{shape.tokens}" if shape.tokens else str(shape.decodes)
