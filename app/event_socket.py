"""WS /stream/ws: Gradio's event stream over a WebSocket.

A browser opens six HTTP/1.1 connections per origin, and Gradio's stream holds one per tab for as long as a reply
runs: with six tabs streaming, a seventh would not load and no tab could send "stop". Sockets are not counted.
assets/stream.js asks here instead of at /gradio_api/queue/data; this module puts that very request to the same ASGI
app, cookies included, so that its login check and its behaviour are Gradio's own, and sends each part of the answer's
body as one text. The stream ends with the socket: a page that goes away cancels its events as before.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

SOCKET_PATH, STREAM_PATH = "/stream/ws", "/gradio_api/queue/data"
REFUSED = 1008  # policy violation


def event_socket(app: Any, origin_allowed: Callable[[WebSocket], bool]) -> APIRouter:
    """The route. `app` is the ASGI app that Gradio is mounted in; `origin_allowed` tells whether a socket comes
    from a page of this server (a foreign page could otherwise read a stream with the reader's cookies)."""
    router = APIRouter()

    @router.websocket(SOCKET_PATH)
    async def stream(socket: WebSocket) -> None:
        if not origin_allowed(socket):
            await socket.close(REFUSED)
            return
        await socket.accept()
        gone = asyncio.Event()
        answer = asyncio.create_task(app(_scope(socket), _receiver(gone), _sender(socket)))
        listening = asyncio.create_task(_until_closed(socket))
        try:
            await asyncio.wait({answer, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.set()
            listening.cancel()
            answer.cancel()
            outcomes = await asyncio.gather(answer, listening, return_exceptions=True)
        with suppress(RuntimeError, WebSocketDisconnect):  # closed by the page already
            await socket.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    return router


def _scope(socket: WebSocket) -> dict[str, Any]:
    """The socket's handshake as the HTTP request for the event stream."""
    path = socket.scope["path"].removesuffix(SOCKET_PATH) + STREAM_PATH
    dropped = (b"connection", b"upgrade", b"accept-encoding")
    kept = [(k, v) for k, v in socket.scope["headers"] if k not in dropped and not k.startswith(b"sec-websocket")]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},  # the response listens for the disconnect itself
        "http_version": "1.1",
        "method": "GET",
        "scheme": {"wss": "https"}.get(socket.scope.get("scheme", "ws"), "http"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": socket.scope["query_string"],
        "root_path": socket.scope.get("root_path", ""),
        "headers": kept,
        "client": socket.scope.get("client"),
        "server": socket.scope.get("server"),
        "state": {},
    }


def _receiver(gone: asyncio.Event) -> Callable[[], Any]:
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _sender(socket: WebSocket) -> Callable[[dict[str, Any]], Any]:
    decoder = codecs.getincrementaldecoder("utf-8")()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            await socket.close(REFUSED, f"status {message['status']}")
        elif message["type"] == "http.response.body":
            text = decoder.decode(message.get("body", b""))
            if text:
                with suppress(RuntimeError, WebSocketDisconnect):  # the page left in mid-stream
                    await socket.send_text(text)

    return send


async def _until_closed(socket: WebSocket) -> None:
    """Return when the page closes the socket; it never sends anything."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
