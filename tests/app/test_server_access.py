"""Who gets in where: API key, login and origin on every route of the one port; and the port behind a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.chat import ChatService
from app.server import build_app
from app.settings import Settings
from app.store import Store
from tests.app.standin import StandInEngine, served

Serve = Callable[..., AbstractAsyncContextManager[str]]
LOGIN = {"username": "ada", "password": "love:lace"}
KEY = {"Authorization": "Bearer s3cret"}


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """serve(**settings): the whole application over an engine that does nothing; yields "127.0.0.1:PORT"."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[str]:
        engine: Any = StandInEngine()
        store = Store(tmp_path / "data")
        try:
            async with served(build_app(Settings(**settings), engine, ChatService(store, engine))) as address:
                yield address
            assert engine.shutdowns == 1
        finally:
            store.close()

    return serve


async def may_watch(address: str, path: str = "/kv/ws", **headers: str) -> bool:
    try:
        async with connect(f"ws://{address}{path}", additional_headers=headers) as socket:
            return json.loads(await socket.recv())["type"] == "full"
    except InvalidStatus as refusal:
        assert refusal.response.status_code == 403
        return False


async def test_without_key_and_login_everything_is_open_to_this_machine(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in ("/", "/healthz", "/v1/models", "/kv/snapshot"):
            assert (await http.get(path)).status_code == 200, path
        assert await may_watch(address)


async def test_the_key_guards_api_and_snapshot_but_not_the_page(serve: Serve) -> None:
    async with serve(api_key="s3cret") as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in ("/v1/models", "/kv/snapshot"):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic s3cret"}):
                refused = await http.get(path, headers=headers)
                assert refused.status_code == 401 and "error" in refused.json(), path
            assert (await http.get(path, headers=KEY)).status_code == 200, path
        for path in ("/", "/healthz"):
            assert (await http.get(path)).status_code == 200, path
        assert await may_watch(address)


async def test_the_login_guards_page_socket_and_snapshot(serve: Serve) -> None:
    async with serve(auth=("ada", "love:lace")) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/config")).status_code == 401
        assert (await http.get("/kv/snapshot")).status_code == 401
        assert (await http.get("/healthz")).status_code == 200
        assert not await may_watch(address)
        assert not await may_watch(address, Cookie="access-token-unsecure=guess")

        assert (await http.post("/login", data=LOGIN | {"password": "wrong"})).status_code == 400
        assert (await http.get("/kv/snapshot")).status_code == 401

        assert (await http.post("/login", data=LOGIN)).status_code == 200
        assert (await http.get("/config")).status_code == 200
        assert (await http.get("/kv/snapshot")).status_code == 200
        cookies = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
        assert await may_watch(address, Cookie=cookies)
        assert not await may_watch(address, Cookie=cookies, Origin="https://evil.example")


async def test_with_key_and_login_either_opens_the_snapshot(serve: Serve) -> None:
    both: Any = {"api_key": "s3cret", "auth": ("ada", "love:lace")}
    async with serve(**both) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/kv/snapshot")).status_code == 401
        assert (await http.get("/kv/snapshot", headers=KEY)).status_code == 200
        await http.post("/login", data=LOGIN)
        assert (await http.get("/kv/snapshot")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401  # a login is no key


async def test_a_foreign_page_gets_neither_socket(serve: Serve) -> None:
    async with serve() as address:
        for path in ("/kv/ws", "/stream/ws?session_hash=x"):
            assert not await may_watch(address, path, Origin="https://evil.example")
        assert await may_watch(address, Origin=f"http://{address}")


@pytest.mark.parametrize("strips", [True, False])
async def test_behind_a_proxy_under_a_path_page_socket_and_api_work(strips: bool, serve: Serve) -> None:
    """A proxy either takes the path away before it passes a request on, or leaves it."""
    prefix = "" if strips else "/x"
    async with serve(root_path="/x") as address, httpx.AsyncClient(base_url=f"http://{address}{prefix}") as http:
        page = await http.get("/", headers={"X-Forwarded-Host": "chat.example", "X-Forwarded-Proto": "https"})
        assert page.status_code == 200
        root = re.search(r'"root":\s*"([^"]*)"', page.text)
        assert root is not None and root[1].endswith("/x"), root
        for path in ("/healthz", "/v1/models", "/kv/snapshot", "/config", "/theme.css"):
            assert (await http.get(path)).status_code == 200, path
        assert await may_watch(
            address, f"{prefix}/kv/ws", **{"Origin": "https://chat.example", "X-Forwarded-Host": "chat.example"}
        )


async def test_the_page_s_cookie_is_one_that_other_sites_cannot_make_a_browser_send(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        cookie = (await http.get("/")).headers["set-cookie"]
        assert "SameSite=Strict" in cookie and "HttpOnly" in cookie
        for path in ("/healthz", "/config", "/v1/models"):
            assert "set-cookie" not in (await http.get(path)).headers


async def test_an_upload_beyond_the_limit_is_refused(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        refused = await http.post("/gradio_api/upload", files={"files": ("big.txt", b"x" * 5_000_000)})
        assert refused.status_code == 413
