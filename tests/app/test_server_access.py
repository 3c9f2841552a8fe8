"""Who gets in where: API key, login and origin on every route of the one port; and the port behind a proxy."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.chat import ChatService
from app.security import MAX_PAGE_BODY, listens_locally
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


async def may_watch(address: str, path: str = "/kv/ws", *, name: str = "", **headers: str) -> bool:
    """name: the host by which the server is asked for, where that is not its address."""
    ip, port = address.split(":")
    try:
        async with connect(
            f"ws://{name or address}{path}", host=ip, port=int(port), additional_headers=headers
        ) as watch:
            return json.loads(await watch.recv())["type"] == "full"
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


async def test_a_page_of_another_site_reaches_nothing_that_gradio_serves(serve: Serve) -> None:
    """Gradio by itself answers every origin, with the reader's cookies, where the host is not this machine."""
    foreign = {"Host": "chat.example.org", "Origin": "https://evil.example"}
    own = {"Host": "chat.example.org", "Origin": "https://chat.example.org"}
    join = {"data": [], "fn_index": 0, "session_hash": "abc"}
    proxied: Any = {"auth": ("ada", "love:lace"), "allowed_hosts": ("chat.example.org",)}
    async with serve(**proxied) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.post("/login", data=LOGIN, headers=own)).status_code == 200
        for method, path in (("POST", "/gradio_api/queue/join"), ("GET", "/gradio_api/queue/data"), ("GET", "/config")):
            preflight = {**foreign, "Access-Control-Request-Method": method}
            for answer in (
                await http.request(method, path, headers=foreign, json=join if method == "POST" else None),
                await http.options(path, headers=preflight),
            ):
                assert answer.status_code == 403, path
                assert "access-control-allow-origin" not in answer.headers, path
        assert (await http.get("/config", headers=own)).status_code == 200
        assert (await http.post("/gradio_api/queue/join", headers=own, json=join)).status_code != 403


async def test_what_gradio_serves_beside_the_page_is_closed(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in (
            "/openapi.json",
            "/monitoring",
            "/gradio_api/file=/etc/hostname",
            "/gradio_api/file//etc/hostname",
        ):
            assert (await http.get(path)).status_code == 403, path
        for name in (
            "info",
            "openapi.json",
            "deep_link",
            "proxy=https://hf.space/x",
            "stream/a/b/1/playlist.m3u8",
            "runs",
        ):
            assert (await http.get(f"/gradio_api/{name}")).status_code == 403, name
        for name in (
            "component_server",
            "process_recording",
            "call/send",
            "api/send",
            "vibe-edit",
            "run-history/connect",
        ):
            assert (await http.post(f"/gradio_api/{name}", json={})).status_code == 403, name
        for path in ("/docs", "/redoc", "/v1/openapi.json"):
            assert (await http.get(path)).status_code == 404, path
        for path in ("/gradio_api/theme.css", "/gradio_api/startup-events"):
            assert (await http.get(path)).status_code == 200, path


async def test_nothing_can_be_uploaded(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for path in ("/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/upload?upload_id=1"):
            assert (await http.post(path, files={"files": ("a.txt", b"a")})).status_code == 403, path


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
    wrong = {"Authorization": "Bearer other"}
    async with serve(**both) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for headers in ({}, wrong, {"Cookie": "access-token-unsecure=guess"}):
            assert (await http.get("/kv/snapshot", headers=headers)).status_code == 401, headers
        assert (await http.get("/kv/snapshot", headers=KEY)).status_code == 200
        await http.post("/login", data=LOGIN)
        for headers in ({}, wrong):
            assert (await http.get("/kv/snapshot", headers=headers)).status_code == 200, headers
        assert (await http.get("/v1/models")).status_code == 401  # a login is no key
        assert not await may_watch(address, **KEY)  # nor is a key a login


async def test_a_foreign_page_gets_neither_socket(serve: Serve) -> None:
    async with serve() as address:
        for path in ("/kv/ws", "/stream/ws?session_hash=x"):
            assert not await may_watch(address, path, Origin="https://evil.example")
        assert await may_watch(address, Origin=f"http://{address}")


OTHERS = ("evil.example", "evil.example:7860", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example")
OWN = ("localhost", "LOCALHOST:1", "localhost.", "chat.localhost:7860", "127.0.0.1:7860", "[::1]:7860", "10.0.0.7")


async def test_a_name_that_another_site_had_resolved_to_this_machine_reaches_nothing(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        for host in OTHERS:
            for path in ("/", "/healthz", "/v1/models", "/kv/snapshot", "/config"):
                forged = {"Host": host, "Origin": f"http://{host}", "X-Forwarded-Host": "localhost"}
                refused = await http.get(path, headers=forged)
                assert refused.status_code == 403 and "--allowed-hosts NAME" in refused.text, (host, path)
            assert not await may_watch(address, name=host)
            assert not await may_watch(address, "/stream/ws?session_hash=x", name=host)
        for host in (*OWN, socket.gethostname()):
            assert (await http.get("/v1/models", headers={"Host": host})).status_code == 200, host
        assert await may_watch(address, name="localhost:7860")


async def test_a_proxy_s_name_is_answered_where_it_is_named(serve: Serve) -> None:
    async with serve(allowed_hosts=("chat.example.org", "*.example.net")) as address:
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            for host, status in (("chat.example.org:443", 200), ("a.example.net", 200), ("b.example.org", 403)):
                assert (await http.get("/healthz", headers={"Host": host})).status_code == status, host
        assert await may_watch(address, name="chat.example.org")


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"host": "::"}, {"allowed_hosts": ("*",)}])
async def test_bound_to_other_addresses_or_told_so_it_answers_to_any_name(serve: Serve, settings: Any) -> None:
    async with serve(**settings) as address, httpx.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/healthz", headers={"Host": "user-name.hosted.example"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_this_machine_only_reaches_is_known(host: str, local: bool) -> None:
    assert listens_locally(host) is local


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


async def test_what_is_put_into_the_page_s_queue_is_of_a_limited_length(serve: Serve) -> None:
    async with serve() as address, httpx.AsyncClient(base_url=f"http://{address}") as http:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(MAX_PAGE_BODY // 2**20 + 1):
                yield b"x" * 2**20

        for content in (b"x" * (MAX_PAGE_BODY + 1), parts()):
            answer = await http.post("/gradio_api/queue/join", content=content)
            assert answer.status_code == 413 and "33,554,432 bytes" in answer.text


async def test_nobody_ends_or_begins_an_event_without_the_login(serve: Serve) -> None:
    """Gradio asks for it in some of these, and only after it has read the body."""
    async with (
        serve(auth=("ada", "love:lace")) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as http,
    ):
        for name in ("queue/join", "cancel", "reset", "run/stop"):
            assert (await http.post(f"/gradio_api/{name}", content=b"no JSON")).status_code == 401
        assert (await http.get("/gradio_api/heartbeat/tab")).status_code == 401
