"""WS /stream/ws: Gradio's own event stream, carried over a socket."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from app.event_socket import event_socket


def build(stream, allowed: bool = True) -> FastAPI:
    app = FastAPI()
    app.include_router(event_socket(app, lambda socket: allowed))
    app.get("/gradio_api/queue/data")(stream)
    return app


def test_the_stream_arrives_whole_with_its_query_and_cookies_and_ends_with_the_socket():
    async def stream(request: Request, session_hash: str) -> StreamingResponse:
        async def parts():
            yield f"data: {session_hash} {request.cookies['token']}\n\n"
            for byte in "data: é€🙂\n\n".encode():  # characters split over parts
                yield bytes([byte])

        return StreamingResponse(parts(), media_type="text/event-stream")

    with (
        TestClient(build(stream), cookies={"token": "secret"}) as client,
        client.websocket_connect("/stream/ws?session_hash=abc") as socket,
    ):
        text = ""
        with pytest.raises(WebSocketDisconnect):
            while True:
                text += socket.receive_text()
    assert text == "data: abc secret\n\ndata: é€🙂\n\n"


async def test_a_page_that_leaves_ends_its_stream():
    left, sent, said = asyncio.Event(), asyncio.Queue(), asyncio.Queue()

    async def stream() -> StreamingResponse:
        async def parts():
            try:
                yield "data: first\n\n"
                await asyncio.sleep(60)
            finally:
                left.set()

        return StreamingResponse(parts())

    scope = {"type": "websocket", "path": "/stream/ws", "query_string": b"", "headers": [], "subprotocols": []}
    serving = asyncio.create_task(build(stream)(scope, said.get, sent.put))
    await said.put({"type": "websocket.connect"})
    assert (await sent.get())["type"] == "websocket.accept"
    assert (await sent.get())["text"] == "data: first\n\n"
    await said.put({"type": "websocket.disconnect", "code": 1001})
    async with asyncio.timeout(2):
        await left.wait()
        await serving


def test_a_socket_from_another_site_is_refused():
    async def stream() -> dict:
        raise AssertionError("must not be asked")

    with (
        TestClient(build(stream, allowed=False)) as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/stream/ws"),
    ):
        pass


def test_a_stream_that_gradio_refuses_closes_the_socket_with_its_status():
    from fastapi import HTTPException

    async def stream() -> None:
        raise HTTPException(401)

    with TestClient(build(stream)) as client, client.websocket_connect("/stream/ws") as socket:
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_text()
        assert closed.value.code == 1008 and "401" in closed.value.reason
