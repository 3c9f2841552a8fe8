"""Outbox: the streams of requests that have not ended, and the way of a step's outputs to them.

A step wakes every event loop once, however many of its streams it has outputs for; detokenizing happens over there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from engine.outputs import StepOutput
from engine.request_stream import BlockingStream, RequestStream, Stream, hand_over


class Outbox:
    """streams: by request, until it has had its last word. Any thread may add one, and two may deliver at a time: every
    change is one operation on a dict or a deque, so that no lock is taken. abort ends what nobody is left to read."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self._abort = abort
        self._kept: deque[list[StepOutput]] = deque()

    def keep(self, outputs: list[StepOutput]) -> None:
        """Have them ready for deliver_kept()."""
        self._kept.append(outputs)

    def deliver_kept(self) -> None:
        """Deliver what was kept, in its order; nothing, where another thread has come first."""
        while self._kept:
            try:
                outputs = self._kept.popleft()
            except IndexError:
                return
            self.deliver(outputs)

    def deliver(self, outputs: Iterable[StepOutput]) -> None:
        """Hand outputs to their streams; those of streams that have ended are dropped."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, StepOutput]]] = {}
        for output in outputs:
            finished = output.finish_reason is not None and output.ends_request
            stream = self.streams.pop(output.request_id, None) if finished else self.streams.get(output.request_id)
            if isinstance(stream, RequestStream):
                by_loop.setdefault(stream.loop, []).append((stream, output))
            elif isinstance(stream, BlockingStream):
                stream.put(output)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(hand_over, batch)
            except RuntimeError:  # the loop was closed: nobody is left to read
                for stream, _ in batch:
                    self._abort(stream.request_id)

    def end(self, streams: Iterable[Stream], reason: str, error: str | None) -> None:
        """Say the last word on each continuation of these, without figures: the engine is not there to give any."""
        for stream in streams:
            last = stream.num_outputs - 1
            for index in range(last + 1):
                step = StepOutput(stream.request_id, [], reason, error, index=index, ends_request=index == last)
                self.deliver([step])
