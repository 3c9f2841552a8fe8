"""One rank of a tensor-parallel group: a process that holds a shard of the model and runs the steps it is sent.

It is told everything over one channel, a socket pair made for it alone, and answers there. What it says, in order:

    ("progress", stage, percent)        while it loads
    ("fits", num_blocks)                its shard is loaded, and that many KV blocks fit beside it; what it is told
                                        next is how many it is to allocate
    ("ready", Ready)                    warmed up, how fast it then was, and which steps are captured as graphs
    ("compiling",)                      at any time: it compiles a kernel, and may need longer
    ("log", level, text)                at any time, rank 0 alone: what its engine has to say
    ("done", answer, calls)             for every step, in order; see step_answer.py; empty on ranks other than 0.
                                        calls counts the collectives so far, a graph's as one.
    ("failed", exception, calls)        instead of any of these; calls is None where the process is of no more use

A step comes as (plan, chores, ahead); see plan_deltas.py. One that is to run ahead is launched while the step before it
still runs; any other when that one is answered.

It ends when it is told None, or when the parent's end of the channel closes: then at once, whatever it is doing, so
that no death of the parent leaves a rank behind. ^C and SIGTERM often reach the whole process group; they are the
parent's to answer, which may have partial replies to store first.

Imports nothing heavy at the top: the watch over the parent must stand before torch is loaded.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.heap import rare_collections, settled_heap
from models.config import ModelConfig

if TYPE_CHECKING:
    from engine.device import DevicePlan
    from engine.graph_shapes import Shape
    from engine.model_runner import ModelRunner, StepHandle
    from engine.plan_deltas import Message

# Seconds that a rank with a card waits awake for its next step before it sleeps.
_SPIN = 200e-6


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is to run. folder is the group's own, for its members to find each other in; device, dtype and the
    rest are what the parent's DeviceManager chose; limits are ModelRunner's."""

    rank: int
    size: int
    folder: Path
    config: EngineConfig
    path: Path
    model_config: ModelConfig
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    limits: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ready:
    """seconds_per_token: of warm-up steps; prefill_rate: tokens/s, see ModelRunner; shapes: the steps that
    are captured as graphs, the same ones on every rank."""

    seconds_per_token: float
    prefill_rate: float
    shapes: list[Shape]


@dataclass(slots=True)
class Chores:
    """What a rank is to do before a step: give back buffers, zero blocks, copy blocks {destination: source}."""

    release_buffers: bool = False
    scrub: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def do(self, runner: ModelRunner) -> None:
        if self.release_buffers:
            runner.release_buffers()
        if self.scrub:
            runner.scrub(self.scrub)
        if self.copies:
            runner.copy_blocks(self.copies)


def main(setup: RankSetup, channel: Connection) -> None:
    """The process's main function."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(channel.fileno(), setup.folder), daemon=True).start()
    prepare_environment(setup.device, setup.size)
    try:
        runner = _load(setup, channel)
        with settled_heap(), rare_collections():
            RankLoop(runner, channel, speaks=setup.rank == 0).serve()
        runner.exit()  # NCCL ends when no graph holds its operations any more
    except (EOFError, ConnectionError):  # the parent is gone, and this thread has seen it first
        end_as_an_orphan(setup.folder)
    except Exception as error:
        channel.send(("failed", _portable(error), None))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to tear down, and taking down an interpreter with torch in it lasts


def end_with_parent(fd: int, folder: Path) -> None:
    """Wait until the other end of the channel is closed, by whatever death; then end, in the midst of anything."""
    hung_up = select.poll()
    hung_up.register(fd, 0)  # no event but the hang-up, which is always reported
    hung_up.poll()
    end_as_an_orphan(folder)


def end_as_an_orphan(folder: Path) -> None:
    """Leave nothing behind that the parent would have removed, and end."""
    shutil.rmtree(folder, ignore_errors=True)  # all ranks try
    os._exit(1)


def prepare_environment(device: str, size: int) -> None:
    """What libraries read once, when they are loaded; of a rank of so many on "cpu" or "cuda"."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(cores, int(asked) if asked.isdigit() else cores) // size)
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # All ranks are on one machine; the name of the host may lead to an interface that others can reach, or nowhere.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # Multicast over NVLink is of no use to messages this small, and needs what not every machine allows.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMMMEM", "CUDA")  # plain peer memory, whatever other library PyTorch has for it
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")  # one_shot.py's buffer is an allocation of its own
    # Registering every buffer of every captured exchange with the other ranks would take longer than it ever saves.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _load(setup: RankSetup, channel: Connection) -> ModelRunner:
    """Join the group, load the shard, agree on the size of the pool, warm up."""
    import torch
    import torch.distributed as dist

    from engine.device import DeviceManager, DevicePlan, Probe
    from engine.loading import num_blocks_that_fit
    from engine.model_runner import ModelRunner

    on_cuda = setup.device == "cuda"
    device = torch.device("cuda", setup.rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    plan = DevicePlan(device, getattr(torch, setup.dtype), setup.attention_backend, setup.block_size, ())
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=(setup.folder / "rendezvous").as_uri(),
        rank=setup.rank,
        world_size=setup.size,
        device_id=device if on_cuda else None,
    )

    def report(stage: str, percent: float) -> None:
        if setup.rank == 0:
            channel.send(("progress", stage, percent))

    _tell_of_compiling(channel)
    if setup.rank == 0:
        _tell_what_is_logged(channel)
    runner = ModelRunner(
        setup.path,
        setup.model_config,
        plan,
        **setup.limits,
        enforce_eager=setup.config.enforce_eager,
        progress=report,
        tp_rank=setup.rank,
        tp_size=setup.size,
    )
    devices = DeviceManager(setup.config, Probe(setup.rank if on_cuda else 0))
    channel.send(("fits", num_blocks_that_fit(setup.config, devices, plan, runner)))
    runner.allocate_kv_cache(channel.recv())
    runner.warm_up(report)
    runner.capture_graphs(report)
    shapes = [] if runner.graphs is None else runner.graphs.shapes
    seconds = _seconds_per_token(runner, plan)
    channel.send(("ready", Ready(seconds, runner.prefill_rate, shapes)))
    return runner


def _tell_what_is_logged(channel: Connection) -> None:
    """Have the engine's log, which the parent has set up and this process has not, written there."""

    class ToParent(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            channel.send(("log", record.levelno, record.getMessage()))

    logger = logging.getLogger("pageturn.engine")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(ToParent())


def _tell_of_compiling(channel: Connection) -> None:
    """Have it said when a kernel is compiled: in the midst of a step too, where a form of it is met for the first
    time, and that takes seconds."""
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.runtime.jit_cache_hook = lambda **_: channel.send(("compiling",))  # called before every compilation


def _seconds_per_token(runner: ModelRunner, plan: DevicePlan) -> float:
    """From a second round of the warm-up, which sets nothing up any more."""
    import torch

    started = time.perf_counter()
    num_tokens = runner.warm_up(lambda stage, percent: None)
    if plan.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / num_tokens


@dataclass(slots=True)
class _Launched:
    """A step that has no answer yet: in flight, or failed already. calls: the collectives up to its end."""

    handle: StepHandle | None
    error: Exception | None
    calls: int | None


class RankLoop:
    """Runs the steps that a rank is sent, one behind the other. speaks: what they find is wanted from this rank."""

    def __init__(self, runner: ModelRunner, channel: Connection, *, speaks: bool) -> None:
        from engine.plan_deltas import PlanDecoder
        from models.layers.parallel import Collective

        self._runner, self._channel, self._speaks = runner, channel, speaks
        self._collectives = [module for module in runner.model.modules() if isinstance(module, Collective)]
        self._decoder = PlanDecoder()
        self._in_flight: deque[_Launched] = deque()
        self._launched_last = False
        self._inbox = select.poll()
        self._inbox.register(channel.fileno(), select.POLLIN)
        self._spin = _SPIN if runner.device.device.type == "cuda" else 0.0

    def serve(self) -> None:
        """Until told to end."""
        while True:
            if self._in_flight and self._ends_first(self._in_flight[0]):
                self._answer()
                continue
            if not self._in_flight:
                self._await_message()
            message = self._channel.recv()
            if message is None:
                return
            step, chores, ahead = message
            while self._in_flight and not ahead:
                self._answer()
            self._in_flight.append(self._launch(step, chores))

    # -- internals ------------------------------------------------------------------------------------

    def _launch(self, step: Message, chores: Chores) -> _Launched:
        runner = self._runner
        plan, ended = self._decoder.decode(step)
        for seq_id in ended:
            runner.forget(seq_id)
        chores_done = False
        try:
            chores.do(runner)
            chores_done = True
            if not self._launched_last and any(i.start + i.num_tokens > len(i.seq.token_ids) for i in plan.items):
                raise RuntimeError("the step before it, whose tokens it goes on from, was not launched")
            handle = runner.launch(plan)
        except Exception as error:
            self._launched_last = False
            # A step can be run again in parts, but chores are told once: a block that was not copied would be used.
            usable = chores_done and _is_usable(runner.device)
            return _Launched(None, error, self._num_calls() if usable else None)
        self._launched_last = True
        return _Launched(handle, None, self._num_calls())

    def _answer(self) -> None:
        """Collect the oldest step in flight, and say what it found."""
        from engine.step_answer import EMPTY, to_answer

        step = self._in_flight.popleft()
        if step.handle is not None:
            try:
                token_ids = self._runner.collect(step.handle)
            except Exception as error:
                step.error, step.calls = error, step.calls if _is_usable(self._runner.device) else None
            else:
                answer = to_answer(step.handle, token_ids) if self._speaks else EMPTY
                self._channel.send(("done", answer, step.calls))
                return
        assert step.error is not None
        self._channel.send(("failed", _portable(step.error), step.calls))

    def _ends_first(self, step: _Launched) -> bool:
        """Wait until the step has ended or a message is there -> whether it was the former."""
        arrived = step.handle.arrived if step.handle is not None else None
        if arrived is None:  # it ends in collect(), or has failed already: nothing runs behind it
            return True
        while not arrived.query():
            if self._inbox.poll(0):
                return False
        return True

    def _await_message(self) -> None:
        """Wait for it awake for a moment: while work flows the next one comes before a sleeper would be up."""
        until = time.perf_counter() + self._spin
        while not self._inbox.poll(0) and time.perf_counter() < until:
            pass

    def _num_calls(self) -> int:
        graphs = self._runner.graphs
        return sum(c.num_calls for c in self._collectives) + (graphs.num_replays if graphs is not None else 0)


def _is_usable(plan: DevicePlan) -> bool:
    """Whether the device still computes: after some CUDA errors nothing in the process works any more."""
    import torch

    if plan.device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def _portable(error: Exception) -> Exception:
    """The exception as it can be sent, with the traceback as a note; one that cannot be pickled is told in words."""
    note = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"in a rank's process:\n{note}")
    return copy
