"""The live panel's hub: one task reads the engine's block table and feeds every watcher's socket.

Frames are JSON texts, sent over `WS /kv/ws`. The server speaks first; every frame from the hub task carries the
same two parts beside its own:

    "stat":   {"ready": bool, "stage": str, "percent": float (0-100), "error": str | null, "model": str,
               "small_model": bool,                          so small that its words should not be relied on
               "running": int, "waiting": int,               requests
               "prefill_rate": float, "decode_rate": float,  tokens/s of the whole engine, recent
               "prompt_tokens": int, "cached_tokens": int,   of all requests since the model was loaded
               "hit_rate": float,                            their ratio, 0-1
               "kv": {"total", "free", "cached", "active"}}  blocks
    "events": [{"seq": int, "ago": float (seconds), "kind": str, "owner": int, "request": int, "count": int,
                "detail": str}, ...]   oldest first. A delta has what is new since the frame before it, a full frame
               the latest 20, so that after one a watcher may meet an event again (seq tells).
               kind is one of the engine's: allocate, hit, share, evict, preempt, copy, pin, unpin, finish, abort,
               error.

Kinds of frame:

    {"type": "full",  "n": N, "block_size": B, "data": base64}   the whole table: on connect, after the pool changed
            its size, when so many blocks changed at once that it is the shorter form, and after a slow watcher's
            backlog was dropped.
            data is N records of 3 bytes in physical order: state uint8, owner uint16 little-endian.
            n = 0 (data "") while the model is loading.
    {"type": "delta", "idx": [int, ...], "val": [int, ...]}      the blocks that changed since the previous frame;
            val = state | owner << 8, the same three bytes as one integer. Both lists are empty when only stat or
            events changed. No frame is sent while nothing at all changes.
    {"type": "block", "id", "state": str, "refcount", "position", "owner", "turn", "request", "pinned": bool, "hits",
            "last_use": seconds ago | null, "last_hit": seconds ago | null}
            the answer to a hover; no stat, no events.

State codes: 0 free, 1 cached, 2 active (one sequence holds it), 3 shared (two or more hold it). "state" in a block
frame is the code's name. owner is the slot of the conversation whose sequence wrote the block (kept while the
block is cached, also when another conversation hits it); 0: nobody, or a request from the API. So a watcher tells
what happened to a block from two successive values: free to active is an allocation; cached to active or active to
shared under the same owner a hit; cached under one owner to active under another an eviction and a rewrite.

A watcher may send {"type": "hover", "id": n}; anything else closes the socket with code 1008. Beyond MAX_WATCHERS a
socket is closed with 1013 (try again later); at shutdown with 1001.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.block_records import ACTIVE, KVSnapshot
from engine.events import BlockEvent

log = logging.getLogger("pageturn.app")

INTERVAL = 0.15  # seconds between two looks at the pool
MAX_WATCHERS = 200
MAX_BACKLOG = 8  # frames a watcher may lag behind (1.2 s) before they are dropped for one full frame
FULL_ABOVE = 400  # changed blocks up to which a delta is always the form sent
EVENTS_KEPT = 20

SHARED = 3  # on the wire only: ACTIVE with a refcount of two or more
STATE_NAMES = ("free", "cached", "active", "shared")


class Engine(Protocol):
    """What the hub reads; all three are cheap and may be called from any thread."""

    def kv_snapshot(self) -> KVSnapshot | None: ...
    def status(self) -> Any: ...
    def events(self, since: int) -> list[BlockEvent]: ...


class KVHub:
    """Fans the pool's changes out to every watcher; costs nothing while nobody watches.

    All methods belong to one event loop.
    """

    def __init__(self, engine: Engine, interval: float = INTERVAL, max_watchers: int = MAX_WATCHERS) -> None:
        self._engine = engine
        self._interval = interval
        self._max_watchers = max_watchers
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._snapshot: KVSnapshot | None = None
        self._values = np.zeros(0, np.int32)  # state | owner << 8 of every block, as last sent
        self._stat: dict[str, Any] = {}
        self._events: deque[BlockEvent] = deque(maxlen=EVENTS_KEPT)
        self._seq = 0

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def serve(self, socket: WebSocket) -> None:
        """Run one watcher's socket from accept to close. Origin and login are the caller's to check."""
        await socket.accept()
        if self._closed or len(self._watchers) >= self._max_watchers:
            await socket.close(1001 if self._closed else 1013)
            return
        if self._task is None or self._task.done():
            self._look()
            self._task = asyncio.create_task(self._run(), name="kv-hub")
        watcher = _Watcher(socket, self)
        self._watchers.add(watcher)
        sender = asyncio.create_task(watcher.send())
        try:
            await self._answer(socket)
        finally:
            self._watchers.discard(watcher)
            sender.cancel()

    async def close(self, code: int = 1001) -> None:
        """End every watcher's socket and take no more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        await self._end(code)

    async def _end(self, code: int) -> None:
        async def end(watcher: _Watcher) -> None:
            # It may have gone first, or not be reading: then the server drops the connection.
            with suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await watcher.socket.close(code)

        await asyncio.gather(*map(end, self._watchers))

    async def _answer(self, socket: WebSocket) -> None:
        """Read what the watcher asks until it leaves."""
        while (message := await socket.receive())["type"] == "websocket.receive":
            block = _hovered(message.get("text"))
            if block is None:
                await socket.close(1008, 'send {"type": "hover", "id": n}')
                return
            with suppress(WebSocketDisconnect):
                await socket.send_text(json.dumps(self._block(block)))

    async def _run(self) -> None:
        """One look every interval while anyone watches."""
        try:
            while self._watchers:
                await asyncio.sleep(self._interval)
                frame = self._look()
                if frame is not None:
                    text = json.dumps(frame, separators=(",", ":"))
                    for watcher in self._watchers:
                        watcher.offer(text)
        except Exception:
            log.exception("the panel's hub failed; its watchers are sent away and may come back")
            await self._end(1011)

    def _look(self) -> dict[str, Any] | None:
        """Read the engine and return the frame that leads from the last look to this one; None: no change."""
        snapshot, stat = self._engine.kv_snapshot(), _stat(self._engine.status())
        events = self._engine.events(self._seq)[-EVENTS_KEPT:]
        values, before = _values(snapshot), self._values
        changed = np.flatnonzero(values != before) if len(values) == len(before) else None
        if changed is not None and not len(changed) and not events and stat == self._stat:
            self._snapshot = snapshot
            return None
        self._snapshot, self._values, self._stat = snapshot, values, stat
        if events:
            self._seq = events[-1].seq
            self._events.extend(events)
        # An entry of a delta takes about three times the four characters that a block takes in a full frame.
        if changed is None or (len(changed) > FULL_ABOVE and 3 * len(changed) > len(values)):
            return self.full()
        frame = {"type": "delta", "idx": changed.tolist(), "val": values[changed].tolist()}
        return frame | {"stat": stat, "events": _told(events)}

    def full(self) -> dict[str, Any]:
        """The whole table as of the last look."""
        records = self._values.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3]
        return {
            "type": "full",
            "n": len(records),
            "block_size": self._snapshot.block_size if self._snapshot is not None else 0,
            "data": base64.b64encode(records.tobytes()).decode("ascii"),
            "stat": self._stat,
            "events": _told(self._events),
        }

    def _block(self, block: int) -> dict[str, Any]:
        """The answer to a hover over `block`; one that is not in the pool (it may have shrunk) is free."""
        snapshot = self._snapshot
        if snapshot is None or not 0 <= block < len(snapshot.state):
            return {
                "type": "block",
                "id": block,
                "state": "free",
                "refcount": 0,
                "position": 0,
                "owner": 0,
                "turn": 0,
                "request": 0,
                "pinned": False,
                "hits": 0,
                "last_use": None,
                "last_hit": None,
            }
        return {
            "type": "block",
            "id": block,
            "state": STATE_NAMES[int(self._values[block]) & 0xFF],
            "refcount": int(snapshot.refcount[block]),
            "position": int(snapshot.position[block]),
            "owner": int(snapshot.owner[block]),
            "turn": int(snapshot.turn[block]),
            "request": int(snapshot.request[block]),
            "pinned": bool(snapshot.pinned[block]),
            "hits": int(snapshot.hits[block]),
            "last_use": _ago(float(snapshot.last_use[block])),
            "last_hit": _ago(float(snapshot.last_hit[block])),
        }


class _Watcher:
    """One socket's outgoing frames. A backlog is dropped for one full frame, so memory stays bounded."""

    def __init__(self, socket: WebSocket, hub: KVHub) -> None:
        self.socket = socket
        self._hub = hub
        self._frames: deque[str] = deque()
        self._needs_full = True
        self._wake = asyncio.Event()
        self._wake.set()

    def offer(self, text: str) -> None:
        if len(self._frames) >= MAX_BACKLOG:
            self._needs_full = True
        if not self._needs_full:  # else the full frame will hold this change too
            self._frames.append(text)
        self._wake.set()

    async def send(self) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # closed meanwhile; the reading side ends the watcher
            while True:
                await self._wake.wait()
                if self._needs_full:
                    self._needs_full = False
                    self._frames.clear()
                    await self.socket.send_text(json.dumps(self._hub.full(), separators=(",", ":")))
                elif self._frames:
                    await self.socket.send_text(self._frames.popleft())
                else:
                    self._wake.clear()


def _values(snapshot: KVSnapshot | None) -> np.ndarray:
    """int32 [N]: state | owner << 8. Without a pool (the model is loading) N is 0."""
    if snapshot is None:
        return np.zeros(0, np.int32)
    state = np.where((snapshot.state == ACTIVE) & (snapshot.refcount > 1), SHARED, snapshot.state)
    return state.astype(np.int32) | (snapshot.owner.astype(np.int32) & 0xFFFF) << 8


def _stat(status: Any) -> dict[str, Any]:
    return {
        "ready": status.ready,
        "stage": status.load.stage,
        "percent": round(status.load.percent, 1),
        "error": status.error,
        "model": status.model,
        "small_model": status.small_model,
        "running": status.running,
        "waiting": status.waiting,
        "prefill_rate": round(status.prefill_rate, 1),
        "decode_rate": round(status.decode_rate, 1),
        "prompt_tokens": status.prompt_tokens,
        "cached_tokens": status.cached_tokens,
        "hit_rate": round(status.cached_tokens / status.prompt_tokens, 4) if status.prompt_tokens else 0.0,
        "kv": status.kv,
    }


def _ago(at: float) -> float | None:
    """Seconds since `at` of time.time(); None for 0.0, never."""
    return round(max(0.0, time.time() - at), 1) if at else None


def _told(events: Any) -> list[dict[str, Any]]:
    now = time.time()
    return [
        {
            "seq": e.seq,
            "ago": round(max(0.0, now - e.time), 2),
            "kind": e.kind,
            "owner": e.owner,
            "request": e.request_id,
            "count": e.count,
            "detail": e.detail,
        }
        for e in events
    ]


def _hovered(text: str | None) -> int | None:
    """The block that a watcher's message asks for; None if it is no such message."""
    try:
        message = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("type") != "hover":
        return None
    block = message.get("id")
    return block if isinstance(block, int) and not isinstance(block, bool) else None
