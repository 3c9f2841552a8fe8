"""The reader's end of a request: its deltas as an async iterator, or as an ordinary one.

What was not read yet is merged, so that a reader that is slow, or never reads, holds no more than the reply itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.origin import Origin
from engine.outputs import Delta, RequestMetrics, RequestOutput, RequestPriority, StepOutput
from engine.sampling_params import SamplingParams
from engine.stream import StreamState, merge, merge_steps

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

Abort = Callable[[int, str], None]  # (request id, reason): how a stream ends its request in the engine


@dataclass(slots=True)
class Submission:
    """A request on its way to the engine. arrival is in seconds of time.perf_counter()."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: RequestPriority
    origin: Origin
    arrival: float


class Stream:
    """What RequestStream and BlockingStream share: the text state and the way to end the request."""

    def __init__(self, request: Submission, tokenizer: Tokenizer | None, abort: Abort) -> None:
        self.request_id = request.request_id
        self._abort = abort
        self._state = StreamState(request.request_id, request.prompt_ids, request.params, tokenizer)

    def abort(self) -> None:
        """End the request; the stream then ends with finish_reason "abort" and its figures. Twice is a no-op."""
        if not self._state.finished:
            self._abort(self.request_id, "abort")

    def output(self) -> RequestOutput:
        """Everything received so far as one result."""
        return self._state.output()

    @property
    def metrics(self) -> RequestMetrics:
        return self._state.metrics

    def _feed(self, output: StepOutput) -> Delta | None:
        if self._state.finished:
            return None
        delta = self._state.feed(output)
        if self._state.stopped_by_text:
            self._abort(self.request_id, "stop")
        return delta


class RequestStream(Stream):
    """`async for delta in stream`: deltas merged since the last read; ends after the one with a finish_reason.

    Belongs to the event loop that submitted it, and to one reader.
    """

    def __init__(
        self, request: Submission, tokenizer: Tokenizer | None, abort: Abort, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(request, tokenizer, abort)
        self.loop = loop
        self._unread: Delta | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._unread = self._unread, None
        assert delta is not None
        self._ended = delta.finish_reason is not None
        return delta

    def deliver(self, output: StepOutput) -> None:
        """Take one step's output; called on the stream's own loop."""
        delta = self._feed(output)
        if delta is not None:
            self._unread = merge(self._unread, delta)
            self._arrived.set()


class BlockingStream(Stream):
    """`for delta in stream`, for a thread without an event loop."""

    def __init__(self, request: Submission, tokenizer: Tokenizer | None, abort: Abort) -> None:
        super().__init__(request, tokenizer, abort)
        self._unread: StepOutput | None = None
        self._arrived = threading.Condition()

    def __iter__(self) -> Iterator[Delta]:
        while not self._state.finished:
            with self._arrived:
                while self._unread is None:
                    self._arrived.wait()
                output, self._unread = self._unread, None
            delta = self._feed(output)
            if delta is not None:
                yield delta

    def put(self, output: StepOutput) -> None:
        """Take one step's output; called by the engine thread. What was not read yet is merged with it."""
        with self._arrived:
            self._unread = merge_steps(self._unread, output)
            self._arrived.notify()


def hand_over(batch: list[tuple[RequestStream, StepOutput]]) -> None:
    """Deliver a step's outputs to the streams of one event loop; called on that loop."""
    for stream, output in batch:
        stream.deliver(output)
