"""The page's port of a server whose engine stands in, and what a program can put there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from gradio.routes import App as GradioApp
from starlette.routing import Mount

from app.chat import ChatService
from app.page_queue import PageQueue
from app.server import build_app
from app.settings import Settings
from app.store import Store
from tests.app.standin import StandInEngine, served

USER = "0" * 32


class Port:
    """The port of a server, what an event that is put there is answered, and the queue of these events."""

    def __init__(self, http: httpx.AsyncClient, chats: ChatService, queue: PageQueue) -> None:
        self.http, self.chats, self.queue = http, chats, queue
        self.listeners: list[dict[str, Any]] = []

    async def join(self, number: int, data: list[Any], event_data: Any = None, tab: str = "tab") -> httpx.Response:
        """Put an event for listener `number` and read nothing."""
        event = {"data": data, "fn_index": number, "session_hash": tab, "event_data": event_data}
        # json.dumps escapes what UTF-8 cannot hold, which a program can send.
        headers = {"Content-Type": "application/json"}
        return await self.http.post("/gradio_api/queue/join", content=json.dumps(event), headers=headers)

    async def event(self, number: int, data: list[Any], event_data: Any = None, tab: str = "tab") -> dict[str, Any]:
        """Put an event for listener `number`; returns how it was completed."""
        joined = await self.join(number, data, event_data, tab)
        assert joined.status_code == 200, joined.text
        async with self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": tab}) as answer:
            async for line in answer.aiter_lines():
                message = json.loads(line.removeprefix("data:")) if line else {}
                if message.get("msg") == "process_completed":
                    return message
        raise AssertionError("the event was not answered")

    async def events(self, events: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Put many at once, each from a tab of its own (number, data and, where it is, event_data); how they were
        completed, in this order. One after the other each would wait for Gradio's queue to look."""
        return await asyncio.gather(*(self.event(*event, tab=f"tab{i}") for i, event in enumerate(events)))

    def number(self, name: str) -> int:
        return next(d["id"] for d in self.listeners if d["api_name"] == name)


@asynccontextmanager
async def opened(folder: Path, chat_engine: Any = None) -> AsyncIterator[Port]:
    """A server's port. chat_engine: what the chats ask, if not the engine that stands in for all else."""
    engine: Any = StandInEngine()
    engine.retry = lambda: None
    store = Store(folder)
    chats = ChatService(store, chat_engine or engine)
    app = build_app(Settings(), engine, chats)
    async with served(app) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as http:
        page = next(r.app for r in app.routes if isinstance(r, Mount) and isinstance(r.app, GradioApp))
        port = Port(http, chats, page.get_blocks()._queue)
        # One for each handler: the others' names end in a number.
        all_of_them = (await http.get("/config")).json()["dependencies"]
        port.listeners = [one for one in all_of_them if not re.search(r"_\d+$", one["api_name"])]
        yield port
    store.close()
