"""Doorway: answers at the port while the page behind it is still being imported and built.

Gradio takes seconds to import on a small machine. Meanwhile /healthz is answered, and every other request waits at
the door instead of being refused, so that the page can be opened as soon as the server's URL is printed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi import FastAPI  # a quarter of a second, which the port need not wait for

THREAD_NAME = "build-page"


def health(engine: Any) -> dict[str, Any]:
    """The answer of /healthz."""
    status = engine.status()
    return {
        "ready": status.ready,
        "model": status.model,
        "load": {"stage": status.load.stage, "percent": round(status.load.percent, 1)},
        "error": status.error,
        "running": status.running,
        "waiting": status.waiting,
        "kv": {name: status.kv[name] for name in ("total", "free", "cached", "active")},
    }


class Doorway:
    """An ASGI application that becomes the one that `build` returns.

    build runs in a thread of its own, once the port is open; then on_built is called on the event loop. If build
    fails, `fault` holds the exception, on_built is called all the same, and the requests at the door get a 500.
    At an early shutdown the thread is left behind: an import cannot be ended, and is not worth waiting for.
    """

    def __init__(self, build: Callable[[], FastAPI], engine: Any, on_built: Callable[[], None]) -> None:
        self._build = build
        self._engine = engine
        self._on_built = on_built
        self._app: FastAPI | None = None
        self._settled = asyncio.Event()
        self._stopping = asyncio.Event()
        self.fault: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._app is None and scope["type"] == "http" and scope["path"].endswith("/healthz"):
            await JSONResponse(health(self._engine), headers={"Cache-Control": "no-store"})(scope, receive, send)
            return
        await self._settled.wait()
        if self._app is None:
            raise RuntimeError("the page could not be built") from self.fault
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """End what the application has running (see build_app); its lifespan ends with the server's."""
        if self._app is not None:
            await self._app.state.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        living = asyncio.create_task(self._live())
        assert (await receive())["type"] == "lifespan.shutdown"
        self._stopping.set()
        if self._settled.is_set():
            await living
        await send({"type": "lifespan.shutdown.complete"})

    async def _live(self) -> None:
        """Build the application and keep its lifespan open until the server's ends."""
        try:
            app = await self._built_in_thread()
            async with app.router.lifespan_context(app):
                self._app = app
                self._settled.set()
                self._on_built()
                await self._stopping.wait()
        except Exception as error:
            self.fault = error
            self._settled.set()
            self._on_built()

    async def _built_in_thread(self) -> FastAPI:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[FastAPI] = loop.create_future()

        def build() -> None:
            try:
                app = self._build()
            except BaseException as error:
                result: Callable[[], None] = partial(built.set_exception, error)
            else:
                result = partial(built.set_result, app)
            with suppress(RuntimeError):  # the loop is closed: the server has ended meanwhile
                loop.call_soon_threadsafe(result)

        threading.Thread(target=build, name=THREAD_NAME, daemon=True).start()
        return await built
