"""The one port: Gradio at "/", the OpenAI API at /v1, the panel's feed at /kv, /healthz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import gradio as gr
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from gradio.routes import App as GradioApp
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from app.doorway import health
from app.event_socket import event_socket
from app.kv_hub import STATE_NAMES, KVHub
from app.openai_api import build_api
from app.page_blocks import refuse_in_words
from app.security import Guard, HostGate, PageGate, SecurityHeaders, listens_locally
from app.settings import Settings
from app.ui import build_ui

if TYPE_CHECKING:
    from app.chat import ChatService
    from engine.block_records import KVSnapshot
    from engine.engine_thread import EngineThread

log = logging.getLogger("pageturn.app")

ENGINE_TIMEOUT = 5.0  # seconds the engine has to finish its step in flight at shutdown
LOADING_TIMEOUT = 1.0  # ... and a model that is still loading: an import or a file being read cannot be ended


def build_app(settings: Settings, engine: EngineThread, chats: ChatService) -> FastAPI:
    """The whole server as one ASGI application. Its lifespan ends jobs and engine, in this order.

    The engine need not be loaded, nor even started.
    """
    guard, hub = Guard(settings), KVHub(engine)
    closing = _once(lambda: _close(chats, hub, engine))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await closing()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.close = closing  # for a server that wants it before it waits for open connections
    app.add_middleware(PageGate, guard=guard)
    app.add_middleware(SecurityHeaders)
    if listens_locally(settings.host):
        app.add_middleware(HostGate, settings=settings)
    if settings.root_path:
        app.add_middleware(UnderPath, root_path=settings.root_path)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        return JSONResponse(health(engine), headers={"Cache-Control": "no-store"})

    @app.get("/kv/snapshot")
    async def snapshot(request: Request) -> Response:
        if not guard.may_read_snapshot(request):
            return JSONResponse(
                {"error": "/kv/snapshot needs the API key (Authorization: Bearer ...) or the page's login"},
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return JSONResponse(snapshot_json(engine.kv_snapshot()), headers={"Cache-Control": "no-store"})

    @app.websocket("/kv/ws")
    async def watch(socket: WebSocket) -> None:
        if guard.same_origin(socket) and guard.logged_in(socket):
            await hub.serve(socket)
        else:
            await socket.close(1008)  # before accept: the handshake is answered with 403

    app.include_router(event_socket(app, guard.same_origin))  # Gradio checks the login behind it
    app.mount("/v1", build_api(settings, engine, guard))
    blocks, mount_kwargs = build_ui(chats, engine, settings)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth=settings.auth,
        root_path=settings.root_path or None,
        run_history=False,
        footer_links=[],
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        show_error=False,  # a handler's own gr.Error is shown all the same; a fault's text stays in the log
        **mount_kwargs,
    )
    guard.gradio_app = next(r.app for r in app.routes if isinstance(r, Mount) and isinstance(r.app, GradioApp))
    refuse_in_words(guard.gradio_app)
    return app


class UnderPath:
    """ASGI middleware for an app that a proxy serves under a path, whether or not the proxy takes that path away."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = scope["path"]
            kept = path == self._root or path.startswith(self._root + "/")
            scope = {**scope, "root_path": self._root, "path": path if kept else self._root + path}
        await self._app(scope, receive, send)


def snapshot_json(snapshot: KVSnapshot | None) -> dict[str, Any]:
    """The answer of /kv/snapshot: every block of the pool in physical order; none before the model is loaded."""
    if snapshot is None:
        return {"block_size": 0, "total": 0, "blocks": []}
    columns = (snapshot.state, snapshot.refcount, snapshot.owner, snapshot.position, snapshot.hits)
    return {
        "block_size": snapshot.block_size,
        "total": len(snapshot.state),
        "blocks": [
            {
                "id": block,
                "state": STATE_NAMES[state],
                "refcount": refcount,
                "owner": owner,
                "position": position,
                "hits": hits,
            }
            for block, (state, refcount, owner, position, hits) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ],
    }


async def _close(chats: ChatService, hub: KVHub, engine: EngineThread) -> None:
    """Jobs first: they store what their requests gave so far, which needs the engine's last word on each. Where a
    step goes on and on, the engine's own shutdown says it without waiting for the step."""
    patience = ENGINE_TIMEOUT if engine.status().ready else LOADING_TIMEOUT
    try:
        async with asyncio.timeout(patience):
            await chats.shutdown()
    except TimeoutError:
        patience = 0.0
    await hub.close()
    await asyncio.to_thread(engine.shutdown, patience)
    await chats.shutdown()


def _once(close: Any) -> Any:
    """Call `close` at the first call; every later one waits for that same run."""
    task: asyncio.Task[None] | None = None

    async def run() -> None:
        nonlocal task
        if task is None:
            task = asyncio.create_task(close())
        await asyncio.shield(task)

    return run
