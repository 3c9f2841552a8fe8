"""The panel's feed: a watcher that applies every frame holds the pool as it is, whatever it missed."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.kv_hub import EVENTS_KEPT, MAX_BACKLOG, KVHub
from app.security import Guard
from engine.events import BlockEvent
from tests.app.standin import StandInEngine, served

INTERVAL = 0.02


@asynccontextmanager
async def watched(engine: StandInEngine, **hub_options: Any) -> AsyncIterator[tuple[KVHub, str]]:
    """A hub behind a real server; yields it and the socket's address."""
    hub = KVHub(engine, interval=INTERVAL, **hub_options)
    app = FastAPI()

    @app.websocket("/kv/ws")
    async def route(socket: WebSocket) -> None:
        await hub.serve(socket)

    async with served(app) as address:
        yield hub, f"ws://{address}/kv/ws"
        await hub.close()


class Watcher:
    """What the page keeps: the pool as the frames tell it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.values: list[int] = []
        self.frames: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        frame = json.loads(await self.socket.recv())
        if frame["type"] == "full":
            raw = np.frombuffer(base64.b64decode(frame["data"]), np.uint8).reshape(frame["n"], 3).astype(int)
            self.values = (raw[:, 0] | raw[:, 1] << 8 | raw[:, 2] << 16).tolist()
        elif frame["type"] == "delta":
            for index, value in zip(frame["idx"], frame["val"], strict=True):
                self.values[index] = value
        (self.blocks if frame["type"] == "block" else self.frames).append(frame)
        return frame

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():
                await self.read()


def truth(engine: StandInEngine) -> list[int]:
    """Every block as state | owner << 8, told from the engine's arrays one by one."""
    shared = [3 if s == 2 and r >= 2 else int(s) for s, r in zip(engine.state, engine.refcount, strict=True)]
    return [s | int(o) << 8 for s, o in zip(shared, engine.owner, strict=True)]


def write(engine: StandInEngine, blocks: slice, state: int, refcount: int, owner: int) -> None:
    engine.state[blocks], engine.refcount[blocks], engine.owner[blocks] = state, refcount, owner


async def test_a_watcher_gets_the_whole_pool_then_only_what_changed() -> None:
    engine = StandInEngine()
    write(engine, slice(0, 5), 2, 1, 258)
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        first = await watcher.read()
        assert (first["type"], first["n"], first["block_size"]) == ("full", 64, 4)
        assert watcher.values == truth(engine)
        write(engine, slice(3, 7), 2, 2, 65535)
        write(engine, slice(0, 1), 1, 0, 258)
        second = await watcher.read()
        assert second["type"] == "delta" and second["idx"] == [0, 3, 4, 5, 6]
        assert watcher.values == truth(engine)


async def test_a_block_held_twice_is_shared_and_a_cached_one_is_not() -> None:
    engine = StandInEngine()
    write(engine, slice(0, 1), 2, 2, 1)
    write(engine, slice(1, 2), 1, 0, 1)
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        await watcher.read()
        assert [v & 0xFF for v in watcher.values[:3]] == [3, 1, 0]


async def test_nothing_is_sent_while_nothing_changes() -> None:
    engine = StandInEngine()
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        await watcher.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.recv(), 10 * INTERVAL)
        engine.set(running=1)
        frame = await watcher.read()
        assert frame["type"] == "delta" and frame["idx"] == [] and frame["stat"]["running"] == 1


async def test_the_figures_are_the_engine_s() -> None:
    engine = StandInEngine(prompt_tokens=200, cached_tokens=50, decode_rate=31.26, waiting=3)
    async with watched(engine) as (_, url), connect(url) as socket:
        stat = (await Watcher(socket).read())["stat"]
    assert stat["hit_rate"] == 0.25 and stat["decode_rate"] == 31.3 and stat["waiting"] == 3
    assert stat["kv"]["total"] == 64 and stat["ready"] is True and stat["model"] == "standin"


async def test_before_the_model_is_loaded_the_pool_is_empty_and_the_stage_is_told() -> None:
    engine = StandInEngine(ready=False)
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        first = await watcher.read()
        assert (first["n"], first["data"], first["stat"]["ready"]) == (0, "", False)
        engine.set(ready=True)
        await watcher.until(lambda: len(watcher.values) == 64)
        assert watcher.frames[-1]["type"] == "full"


async def test_a_change_of_most_of_a_large_pool_comes_as_one_full_frame() -> None:
    engine = StandInEngine(kv={"total": 2000, "free": 2000, "cached": 0, "active": 0})
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        await watcher.read()
        write(engine, slice(0, 1500), 2, 1, 7)
        assert (await watcher.read())["type"] == "full"
        assert watcher.values == truth(engine)
        write(engine, slice(0, 300), 1, 0, 7)
        assert (await watcher.read())["type"] == "delta"
        assert watcher.values == truth(engine)


async def test_events_come_once_in_deltas_and_the_latest_in_a_full_frame() -> None:
    engine = StandInEngine()
    engine.ring = [BlockEvent(i, time.time() - 2, "hit", 5, 9, i) for i in range(1, 31)]
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        told = (await watcher.read())["events"]
        assert [e["seq"] for e in told] == list(range(31 - EVENTS_KEPT, 31))
        assert (told[0]["kind"], told[0]["owner"], told[0]["request"]) == ("hit", 5, 9)
        assert 1.9 < told[0]["ago"] < 4
        engine.ring.append(BlockEvent(31, time.time(), "evict", 5, 9, 2, "words"))
        assert [(e["kind"], e["count"], e["detail"]) for e in (await watcher.read())["events"]] == [
            ("evict", 2, "words")
        ]


async def test_a_watcher_that_lags_is_sent_one_full_frame_and_is_right_again() -> None:
    engine = StandInEngine()
    async with watched(engine) as (hub, url), connect(url) as fast, connect(url) as slow_socket:
        quick, slow = Watcher(fast), Watcher(slow_socket)
        await quick.read()
        await slow.read()
        (stalled,) = [w for w in hub._watchers if w.socket.client.port == slow_socket.local_address[1]]
        free_to_send = asyncio.Event()
        send_text = stalled.socket.send_text

        async def held(text: str) -> None:
            await free_to_send.wait()
            await send_text(text)

        stalled.socket.send_text = held  # type: ignore[method-assign]  # a full send buffer, without the megabytes
        for owner in range(1, 3 * MAX_BACKLOG):
            write(engine, slice(owner, owner + 1), 2, 1, owner)
            await quick.until(lambda: quick.values == truth(engine))
            assert len(stalled._frames) <= MAX_BACKLOG
        free_to_send.set()
        await slow.until(lambda: slow.values == truth(engine))
        assert len(slow.frames) <= 4
        assert "full" in {f["type"] for f in slow.frames[1:]}


async def test_hovering_tells_a_block_s_story() -> None:
    engine = StandInEngine()
    write(engine, slice(7, 8), 2, 3, 12)
    engine.position[7], engine.hits[7], engine.last_use[7] = 4, 6, time.time() - 10
    engine.turn[7], engine.request[7], engine.last_hit[7], engine.pinned[7] = 2, 81, time.time() - 20, True
    async with watched(engine) as (_, url), connect(url) as socket:
        watcher = Watcher(socket)
        await socket.send('{"type": "hover", "id": 7}')
        await socket.send('{"type": "hover", "id": 8}')
        await socket.send('{"type": "hover", "id": 64}')
        await watcher.until(lambda: len(watcher.blocks) == 3)
        block, unused, outside = watcher.blocks
        assert 9 < block.pop("last_use") < 15
        assert 19 < block.pop("last_hit") < 25
        assert block == {
            "type": "block", "id": 7, "state": "shared", "refcount": 3, "position": 4, "owner": 12, "hits": 6,
            "turn": 2, "request": 81, "pinned": True,
        }  # fmt: skip
        assert unused["last_hit"] is None and unused["pinned"] is False
        assert unused["last_use"] is None and unused["state"] == outside["state"] == "free"


@pytest.mark.parametrize(
    "message", ["", "{}", "[1]", '{"type": "hover"}', '{"type": "hover", "id": "7"}', "[" * 50_000, b"\x00"]
)
async def test_a_watcher_that_sends_anything_else_is_closed(message: str | bytes) -> None:
    async with watched(StandInEngine()) as (hub, url), connect(url) as socket:
        await socket.recv()
        await socket.send(message)
        with pytest.raises(ConnectionClosed) as caught:
            async with asyncio.timeout(5):
                await socket.recv()
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1008
        assert hub.num_watchers == 0


async def test_sockets_beyond_the_cap_are_told_to_come_back() -> None:
    async with watched(StandInEngine(), max_watchers=2) as (_, url):
        async with connect(url) as one, connect(url) as two:
            await one.recv()
            await two.recv()
            async with connect(url) as third:
                with pytest.raises(ConnectionClosed) as caught:
                    await third.recv()
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1013
        async with asyncio.timeout(5), connect(url) as fourth:
            await fourth.recv()


async def test_the_hub_rests_when_the_last_watcher_leaves_and_wakes_for_the_next() -> None:
    engine = StandInEngine()
    async with watched(engine) as (hub, url):
        async with connect(url) as socket:
            await socket.recv()
        assert hub._task is not None
        await asyncio.wait_for(asyncio.shield(hub._task), 5)
        write(engine, slice(0, 9), 2, 1, 3)
        async with connect(url) as socket:
            watcher = Watcher(socket)
            await watcher.read()
            assert watcher.values == truth(engine)


async def test_when_the_server_ends_every_watcher_is_told() -> None:
    async with watched(StandInEngine()) as (hub, url), connect(url) as socket:
        await socket.recv()
        await hub.close()
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1001


async def test_a_fault_in_the_hub_is_logged_and_sends_watchers_away(caplog: pytest.LogCaptureFixture) -> None:
    engine = StandInEngine()
    async with watched(engine) as (_, url):
        async with connect(url) as socket:
            await socket.recv()
            del engine.state  # what a fault in the engine looks like from here
            with pytest.raises(ConnectionClosed) as caught, caplog.at_level(logging.ERROR):
                await socket.recv()
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1011
        assert "hub failed" in caplog.text
        engine.state = np.zeros(64, np.uint8)
        async with connect(url) as socket:
            await socket.recv()


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),
        ({"Origin": "http://{host}"}, True),
        ({"Origin": "https://{host}"}, True),  # TLS ended at a proxy
        ({"Origin": "https://chat.example", "X-Forwarded-Host": "chat.example"}, True),
        ({"Origin": "https://chat.example", "Cookie": "pageturn-page=1"}, True),  # a proxy that rewrites Host
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "https://evil.example", "Cookie": "other=1"}, False),
        ({"Origin": "http://{host}.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": ""}, False),
    ],
)
async def test_only_the_server_s_own_page_may_watch(headers: dict[str, str], passes: bool) -> None:
    hub, app = KVHub(StandInEngine()), FastAPI()

    @app.websocket("/kv/ws")
    async def route(socket: WebSocket) -> None:
        if Guard.same_origin(socket):
            await hub.serve(socket)
        else:
            await socket.close(1008)

    async with served(app) as address:
        filled = {name: value.format(host=address) for name, value in headers.items()}
        if passes:
            async with connect(f"ws://{address}/kv/ws", additional_headers=filled) as socket:
                await socket.recv()
        else:
            with pytest.raises(InvalidStatus, match="403"):
                async with connect(f"ws://{address}/kv/ws", additional_headers=filled):
                    pass
        await hub.close()
