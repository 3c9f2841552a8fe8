"""EngineThread: the one thread that owns an LLMEngine; requests come in by an Inbox, deltas go out by an Outbox.

Nothing but this thread touches the engine's state once it is loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine.config import EngineConfig
from engine.faults import StepStuck, root_cause
from engine.heap import rare_collections, settled_heap
from engine.inbox import Inbox
from engine.origin import Origin
from engine.outbox import Outbox
from engine.outputs import RequestPriority
from engine.request_stream import BlockingStream, RequestStream, Stream, Submission
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.status import EngineStatus, LoadStatus
from engine.watchdog import Watchdog
from models.catalog import ModelUnavailable

if TYPE_CHECKING:
    from engine.block_records import KVSnapshot
    from engine.events import BlockEvent
    from engine.explain import Explanation
    from engine.llm_engine import LLMEngine
    from models.tokenizer import Tokenizer

logger = logging.getLogger("pageturn.engine")

T = TypeVar("T")

MAX_UNFINISHED = 1024
_IDLE_CHECK_SECONDS = 1.0
# The default of 5 ms would let a busy engine thread hold up an event loop for several of its steps.
_SWITCH_INTERVAL = 0.001
_SHUT_DOWN = "it was shut down"
# What a token may take while no step was measured yet: a first step compiles kernels, or pages weights in.
_UNMEASURED_SECONDS_PER_TOKEN = {"cpu": 1.0, "cuda": 0.02}


class EngineError(RuntimeError):
    """The engine cannot take this request now."""


class EngineNotReady(EngineError):
    """The model is still being fetched or loaded."""


class EngineDead(EngineError):
    """The engine has stopped; the message carries the root cause."""


class QueueFull(EngineError):
    """Too many requests are unfinished; try again when some have ended."""


class EngineThread:
    """Owns the engine of a process. Every method may be called from any thread.

    on_death is called, on an engine's thread, when a loaded engine has died and every stream has had its last word.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.on_death: Callable[[], object] | None = None
        self._engine: LLMEngine | None = None
        self._inbox = Inbox()
        self._outbox = Outbox(self.abort)
        # Both go on over a retry: an id or a number from before it never means something of the new engine.
        self._ids = itertools.count(1)
        self._last_event = 0
        # Guards the change from up to down: under it a request or a question gets in, or is told that it is too late.
        self._lock = threading.Lock()
        self._load = LoadStatus()
        self._error: str | None = None
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._settled = threading.Event()

    # -- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading; returns at once. status() tells how it goes. A second call is a no-op while it lives."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._error = self._cause = None
            self._stopping = False
            self._settled.clear()
            self._inbox = Inbox()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def retry(self) -> None:
        """Load again after a failure; a no-op unless the engine is down, and while its thread is stuck in a step."""
        if self._error is not None:
            thread = self._thread
            if thread is not None:
                thread.join(timeout=5)
            self.start()

    def wait_until_settled(self, timeout: float | None = None) -> bool:
        """Block until the model is loaded or has failed to; False on timeout (seconds)."""
        return self._settled.wait(timeout)

    def shutdown(self, timeout: float = 5.0) -> None:
        """End every request with "abort", release the model, join the thread. A step that goes on for longer than
        `timeout` (seconds) is not waited for: the requests end without it."""
        self._stopping = True
        self._inbox.post(lambda: None)  # wakes the thread, which then sees that it is to stop
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            with self._lock:
                self._error = self._error or _SHUT_DOWN
            self._end_all()

    @property
    def cause(self) -> BaseException | None:
        """The exception that brought the engine down, or kept it from loading."""
        return self._cause

    # -- requests -------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: RequestPriority = RequestPriority.NORMAL,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
        want_text: bool = True,
    ) -> RequestStream:
        """Queue a request for the running event loop and return its stream.

        Raises ValueError for bad arguments, EngineNotReady, EngineDead or QueueFull. Prompts that cannot be
        served end with finish_reason "error". owner and turn are stamped on the blocks that the request writes,
        which serve only requests of the same cache_salt (see Origin).
        """
        request = self._admit(prompt_ids, params, priority, Origin(owner, turn, cache_salt))
        tokenizer = self.tokenizer if want_text else None
        stream = RequestStream(request, tokenizer, self.abort, asyncio.get_running_loop())
        self._register(request, stream)
        return stream

    def submit_blocking(
        self,
        prompt_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: RequestPriority = RequestPriority.NORMAL,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
        want_text: bool = True,
    ) -> BlockingStream:
        """submit() for threads without an event loop: the stream is an ordinary iterator."""
        request = self._admit(prompt_ids, params, priority, Origin(owner, turn, cache_salt))
        stream = BlockingStream(request, self.tokenizer if want_text else None, self.abort)
        self._register(request, stream)
        return stream

    def abort(self, request_id: int, reason: str = "abort", index: int | None = None) -> None:
        """End a request, or its continuation `index`, as soon as the step in flight is done; what is unknown or has
        ended is a no-op."""
        self._inbox.post(lambda: self._engine.abort(request_id, reason, index) if self._engine else None)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt, as LLMEngine.encode; raises EngineNotReady before the model is loaded."""
        return self._ready_engine().encode(prompt)

    # -- the cache ------------------------------------------------------------------------------------
    # Each of these waits until the step in flight is done (on a CPU up to half a second): from an event loop call
    # them with asyncio.to_thread. They raise EngineNotReady, EngineDead, and ValueError as LLMEngine's own do.

    def explain(self, prompt_ids: list[int], cache_salt: str = "") -> Explanation:
        """What the prompt would find in the cache, see LLMEngine.explain."""
        return self._ask(lambda engine: engine.explain(prompt_ids, cache_salt))

    def pin(self, owner: int) -> int:
        """Keep a conversation's blocks from eviction, see BlockManager.pin."""
        return self._ask(lambda engine: engine.pin(owner))

    def unpin(self, owner: int) -> int:
        """Let them be evicted again, see BlockManager.unpin."""
        return self._ask(lambda engine: engine.unpin(owner))

    # -- what others see ------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer if self._engine is not None else None

    def status(self) -> EngineStatus:
        """A cheap look at the engine, never blocking on a step."""
        engine = self._engine  # before the stage, which is told in the opposite order
        if engine is None or self._error is not None:
            return EngineStatus(False, self.config.model, self._load, self._error)
        return EngineStatus.of(engine, self._load)

    def kv_snapshot(self) -> KVSnapshot | None:
        """Copies of the pool's arrays; None before the model is loaded."""
        return self._engine.blocks.snapshot() if self._engine is not None else None

    def events(self, since: int = 0) -> list[BlockEvent]:
        """Events numbered above `since`, oldest first; a bounded ring keeps the last few thousand."""
        return self._engine.events.since(since) if self._engine is not None else []

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL)
        engine: LLMEngine | None = None
        died = False
        try:
            self._load = LoadStatus("starting", 0.0)
            # Imported here, so that a server can open its port before torch is in memory.
            from engine.llm_engine import LLMEngine

            engine = LLMEngine(self.config, self._report)
            engine.events.continue_after(self._last_event)
            with settled_heap(), rare_collections():
                self._load = LoadStatus("ready", 100.0)
                self._engine = engine  # last: whoever finds an engine finds it ready, see status()
                self._settled.set()
                self._loop(engine)
                if self._stopping:
                    self._wind_up(engine)
        except BaseException as error:
            died = self._fail(error) and engine is not None
        finally:
            self._end_all()
            self._engine = None
            self._settled.set()
            if died:
                self._tell_of_death()
            if engine is not None:
                self._last_event = engine.events.last_seq
                engine.exit()

    def _wind_up(self, engine: LLMEngine) -> None:
        """End every request with "abort" and its figures."""
        with self._lock:  # no request gets in from here on
            self._error = self._error or _SHUT_DOWN
        self._outbox.deliver_kept()
        for request_id in list(self._outbox.streams):
            engine.abort(request_id)
        self._outbox.deliver(engine.step())

    def _fail(self, error: BaseException) -> bool:
        """Take note of what brought the engine down; False if it was down already: the first fault is the cause."""
        # A bad model or setting, a failed download and an end asked for explain themselves in one line.
        expected = self._stopping or isinstance(error, (ValueError, ModelUnavailable))
        with self._lock:
            if self._error is not None:
                return False
            self._cause = error
            self._error = str(error) if expected else root_cause(error)
        if not expected:
            logger.error("the engine has stopped: %s", self._error, exc_info=error)
        return True

    def _give_up_step(self, error: StepStuck) -> None:
        """The engine's thread is lost in a step. Called on the watchdog's thread, for everybody who waits."""
        if self._fail(error):
            frame = sys._current_frames().get(self._thread.ident or 0) if self._thread else None
            logger.error("the step is stuck here:\n%s", "".join(traceback.format_stack(frame)) if frame else "?")
            self._end_all()
            self._tell_of_death()

    def _tell_of_death(self) -> None:
        if self.on_death is not None and not self._stopping:
            try:
                self.on_death()
            except Exception:
                logger.exception("what is to be told of the engine's end could not be")

    def _loop(self, engine: LLMEngine) -> None:
        device = str(engine.device.device).partition(":")[0]
        unmeasured = _UNMEASURED_SECONDS_PER_TOKEN.get(device, 1.0)
        watchdog = Watchdog(engine.executor, self._give_up_step, seconds_per_token=unmeasured)
        try:
            self._serve(engine, watchdog)
        finally:
            watchdog.end()

    def _serve(self, engine: LLMEngine, watchdog: Watchdog) -> None:
        unchecked = False
        while True:
            idle = engine.is_finished()
            if idle or not engine.is_ahead:
                self._outbox.deliver_kept()
            if idle:
                watchdog.rest()
            restless = unchecked or engine.ranks is not None
            command = self._inbox.next(idle, _IDLE_CHECK_SECONDS if restless else None)
            if self._stopping or self._error is not None:
                return
            if command is not None:
                self._outbox.deliver_kept()
                watchdog.wake()
                command()
                unchecked = True
            elif idle:
                # Drained and quiet: the books must balance now, or nothing after this can be trusted.
                if unchecked:
                    engine.check_integrity()
                    unchecked = False
                engine.watch()
            else:
                # Those who read take the interpreter's lock from this thread. So where a step runs already they are
                # woken once the one behind it has been launched, too, and this thread waits.
                outputs = engine.step(self._outbox.deliver_kept)
                self._outbox.deliver_kept()
                self._outbox.keep(outputs)

    def _end_all(self) -> None:
        """End every stream that is still open: with the root cause, or with "abort" at a shutdown."""
        self._outbox.deliver_kept()
        with self._lock:
            open_streams = list(self._outbox.streams.values())
            asked = self._inbox.take_unanswered()
        for answer in asked:
            answer.set_exception(EngineDead(f"the engine has stopped: {self._error or _SHUT_DOWN}"))
        reason, error = ("abort", None) if self._stopping else ("error", self._error)
        self._outbox.end(open_streams, reason, error)

    def _report(self, stage: str, percent: float) -> None:
        self._load = LoadStatus(stage, round(percent, 1))
        if self._stopping:
            raise EngineError("shut down while loading")

    # -- submission -----------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise what submit() would, where no request can be taken now."""
        self._ready_engine()

    def _ready_engine(self) -> LLMEngine:
        if self._error is not None:
            raise EngineDead(f"the engine has stopped: {self._error}")
        engine = self._engine
        if engine is None:
            raise EngineNotReady(f"the model is not ready yet: {self._load.stage}, {self._load.percent:.0f} %")
        return engine

    def _admit(
        self,
        prompt_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        priority: RequestPriority,
        origin: Origin,
    ) -> Submission:
        arrival = time.perf_counter()
        engine = self._ready_engine()
        validated = engine.validate(prompt_ids, params, priority)
        if (unfinished := len(self._outbox.streams)) >= MAX_UNFINISHED:
            raise QueueFull(f"{unfinished} requests are unfinished, the limit is {MAX_UNFINISHED}; try again")
        return Submission(next(self._ids), list(prompt_ids), validated, params, priority, origin, arrival)

    def _register(self, request: Submission, stream: Stream) -> None:
        with self._lock:
            if self._error is not None or self._engine is None:
                raise EngineDead(f"the engine has stopped: {self._error or _SHUT_DOWN}")
            self._outbox.streams[request.request_id] = stream
        self._inbox.post(lambda: self._add(request))

    def _add(self, request: Submission) -> None:
        assert self._engine is not None
        self._engine.add_request(
            request.prompt_ids,
            request.params,
            request.priority,
            owner=request.origin.owner,
            turn=request.origin.turn,
            cache_salt=request.origin.cache_salt,
            request_id=request.request_id,
            arrival=request.arrival,
            validated=request.validated,
        )

    def _ask(self, question: Callable[[LLMEngine], T]) -> T:
        """Run `question` in the engine thread between two steps and wait for its answer."""
        with self._lock:
            answer = self._inbox.ask(partial(question, self._ready_engine()))
        return answer.result()
