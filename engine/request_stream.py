"""The reader's end of a request: its deltas as an async iterator, or as an ordinary one.

What was not read yet is merged, so that a reader that is slow, or never reads, holds no more than the reply itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.many_outputs import Abort, feed, open_state
from engine.origin import Origin
from engine.outputs import Delta, RequestMetrics, RequestOutput, RequestPriority, StepOutput
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.stream import merge, merge_steps

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


@dataclass(slots=True)
class Submission:
    """A request on its way to the engine. validated: the prompt as LLMEngine.validate() gave it. arrival is in seconds
    of time.perf_counter()."""

    request_id: int
    prompt_ids: list[int]
    validated: np.ndarray
    params: SamplingParams | BeamSearchParams
    priority: RequestPriority
    origin: Origin
    arrival: float


class Stream:
    """What RequestStream and BlockingStream share: the text state and the way to end the request."""

    def __init__(self, request: Submission, tokenizer: Tokenizer | None, abort: Abort) -> None:
        self.request_id = request.request_id
        self._abort = abort
        self._state = open_state(request.request_id, request.prompt_ids, request.params, tokenizer)

    def abort(self) -> None:
        """End the request; the stream then ends with finish_reason "abort" and its figures. Twice is a no-op."""
        if not self._state.finished:
            self._abort(self.request_id, "abort", None)

    def output(self) -> RequestOutput:
        """Everything received so far as one result."""
        return self._state.output()

    @property
    def num_outputs(self) -> int:
        """How many continuations end with a finish_reason of their own before the stream does."""
        return self._state.num_outputs

    @property
    def metrics(self) -> RequestMetrics:
        return self._state.metrics

    def _feed(self, output: StepOutput) -> Delta | None:
        return None if self._state.finished else feed(self._state, output, self._abort)


class RequestStream(Stream):
    """`async for delta in stream`: deltas merged since the last read, each continuation's apart; ends when all of them
    have said their finish_reason.

    Belongs to the event loop that submitted it, and to one reader.
    """

    def __init__(
        self, request: Submission, tokenizer: Tokenizer | None, abort: Abort, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(request, tokenizer, abort)
        self.loop = loop
        self._unread: dict[int, Delta] = {}
        self._reader: asyncio.Future[None] | None = None  # what the reader waits for, or has waited for

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._unread:
            if self._state.finished:
                raise StopAsyncIteration
            if self._reader is not None and not self._reader.done():
                raise RuntimeError("somebody waits for this stream already: it has one reader")
            # A bare future: an asyncio.Event is one, too, with a queue of those that wait, and takes twice the time.
            self._reader = self.loop.create_future()
            await self._reader
        return self._unread.pop(next(iter(self._unread)))

    def deliver(self, output: StepOutput) -> None:
        """Take one step's output; called on the stream's own loop."""
        delta = self._feed(output)
        if delta is None:
            return
        index, unread, reader = delta.index, self._unread, self._reader
        unread[index] = merge(unread[index], delta) if index in unread else delta
        if reader is not None and not reader.done():
            reader.set_result(None)


class BlockingStream(Stream):
    """`for delta in stream`, for a thread without an event loop."""

    def __init__(self, request: Submission, tokenizer: Tokenizer | None, abort: Abort) -> None:
        super().__init__(request, tokenizer, abort)
        self._unread: dict[int, StepOutput] = {}
        self._arrived = threading.Condition()

    def __iter__(self) -> Iterator[Delta]:
        while not self._state.finished:
            with self._arrived:
                while not self._unread:
                    self._arrived.wait()
                output = self._unread.pop(next(iter(self._unread)))
            delta = self._feed(output)
            if delta is not None:
                yield delta

    def put(self, output: StepOutput) -> None:
        """Take one step's output; called by the engine thread. What was not read yet is merged with it. What comes
        behind the last word, of a thread that was given up, is dropped."""
        with self._arrived:
            unread = self._unread.get(output.index)
            if unread is None or unread.finish_reason is None:
                self._unread[output.index] = merge_steps(unread, output)
                self._arrived.notify()


def hand_over(batch: list[tuple[RequestStream, StepOutput]]) -> None:
    """Deliver a step's outputs to the streams of one event loop; called on that loop."""
    for stream, output in batch:
        stream.deliver(output)
