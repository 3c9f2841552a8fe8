"""An engine whose every delta the test decides: for states that a real one reaches only by accident.

What the server makes of a real engine is tested with the real one; this stands in where a test must hold a request
in its prefill, fill the queue, or kill the engine at a chosen moment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvicorn

from engine.block_records import KVSnapshot
from engine.events import BlockEvent
from engine.outputs import Delta
from engine.sampling_params import SamplingParams
from engine.status import EngineStatus, LoadStatus

READY = EngineStatus(
    ready=True,
    model="standin",
    load=LoadStatus("ready", 100.0),
    error=None,
    kv={"total": 64, "free": 64, "cached": 0, "active": 0},
    max_model_len=100,
    block_size=4,
)


class StandInTokenizer:
    """One token a character."""

    def encode_chat(self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any] | None = None) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['role']}:{m['content']}"]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


@dataclass
class StandInRequest:
    """A submitted request: the test puts deltas, the server reads them as a stream."""

    prompt_ids: list[int]
    params: SamplingParams
    request_id: int = 1

    def __post_init__(self) -> None:
        self.aborted = asyncio.Event()
        self.figures: dict[str, Any] = {"num_prompt_tokens": len(self.prompt_ids), "num_cached_tokens": 0}
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._open = self.params.n
        self._tokens = [0] * self.params.n

    def say(self, text: str = "", finish_reason: str | None = None, index: int = 0, **more: Any) -> None:
        self._tokens[index] += len(text)
        count = self._tokens[index]
        self._deltas.put_nowait(
            Delta(text, finish_reason=finish_reason, num_output_tokens=count, index=index, **self.figures, **more)
        )

    def abort(self) -> None:
        if self._open and not self.aborted.is_set():
            self.aborted.set()
            self.say(finish_reason="abort")

    def __aiter__(self) -> StandInRequest:
        return self

    async def __anext__(self) -> Delta:
        if not self._open:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._open -= delta.finish_reason is not None
        return delta


class StandInEngine:
    """The parts of EngineThread that app/ uses."""

    def __init__(self, **status: Any) -> None:
        self._status = replace(READY, **status)
        self.refuse: Exception | None = None
        self.requests: list[StandInRequest] = []
        self.submitted = asyncio.Event()
        self.ring: list[BlockEvent] = []
        self.shutdowns = 0
        n = self._status.kv["total"]
        self.state, self.refcount = np.zeros(n, np.uint8), np.zeros(n, np.int32)
        self.owner, self.position = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.hits, self.last_use = np.zeros(n, np.int32), np.zeros(n, np.float64)
        self.turn, self.request = np.zeros(n, np.int32), np.zeros(n, np.int64)
        self.last_hit, self.pinned = np.zeros(n, np.float64), np.zeros(n, np.bool_)

    def set(self, **status: Any) -> None:
        self._status = replace(self._status, **status)

    def status(self) -> EngineStatus:
        return self._status

    @property
    def tokenizer(self) -> StandInTokenizer | None:
        return StandInTokenizer() if self._status.ready else None

    def submit(self, prompt_ids: list[int], params: SamplingParams, **_: Any) -> StandInRequest:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(StandInRequest(prompt_ids, params))
        self.submitted.set()
        return self.requests[-1]

    async def next_request(self) -> StandInRequest:
        async with asyncio.timeout(5):
            await self.submitted.wait()
        self.submitted.clear()
        return self.requests[-1]

    def kv_snapshot(self) -> KVSnapshot | None:
        if not self._status.ready:
            return None
        arrays = (self.state, self.refcount, self.owner, self.position, self.hits, self.last_use)
        more = (self.turn, self.request, self.last_hit, self.pinned)
        return KVSnapshot(self._status.block_size, *(a.copy() for a in arrays + more))

    def events(self, since: int = 0) -> list[BlockEvent]:
        return [e for e in self.ring if e.seq > since]

    def retry(self) -> None:
        raise AssertionError("nothing failed")

    def shutdown(self, timeout: float = 5.0) -> None:
        self.shutdowns += 1


@asynccontextmanager
async def served(app: Any, **config: Any) -> AsyncIterator[str]:
    """The application behind a real uvicorn on a free port; yields "127.0.0.1:PORT"."""
    listener = socket.create_server(("127.0.0.1", 0))
    options = {"log_level": "warning", "timeout_graceful_shutdown": 2, "ws_per_message_deflate": False} | config
    server = uvicorn.Server(uvicorn.Config(app, **options))
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:  # noqa: ASYNC110  uvicorn sets a plain flag
        await asyncio.sleep(0.01)
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await task
