"""Who may talk to which route: host name, origin, API key, login; and the headers that bound what the page can do."""

from __future__ import annotations

import hmac
import re
import socket
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from app.settings import Settings

# 'unsafe-inline' and 'unsafe-eval' are what Gradio's own page and gr.HTML need. Nothing may come from elsewhere, so
# that a remote image in a model's reply cannot carry the chat away. No X-Frame-Options and no frame-ancestors: a
# hosted Space shows the page inside an iframe.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' ws: wss:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "frame-src 'none'",
        "form-action 'self'",
        "base-uri 'self'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

REFUSED_HOST = (
    "This server answers to localhost, IP addresses and this machine's own name only; for another name start it with "
    "--allowed-hosts NAME (PAGETURN_ALLOWED_HOSTS).\n"
)

# What the page and its login use of /gradio_api/, and what stands beside it that nobody uses.
BEHIND_LOGIN = ("queue", "run", "cancel", "reset", "heartbeat")  # Gradio asks for it in some of them, after the body
USED_OF_GRADIO = (*BEHIND_LOGIN, "startup-events", "login_check", "theme.css")
CLOSED = ("openapi.json", "monitoring")
MAX_PAGE_BODY = 32 * 2**20  # bytes of an event; an imported chat is the longest

# Set with the page. SameSite=Strict: a browser sends it back only from a page of this site, which is all that its
# presence tells; it holds nothing.
PAGE_COOKIE = "pageturn-page"
SET_PAGE_COOKIE = f"{PAGE_COOKIE}=1; Path=/; SameSite=Strict; HttpOnly"


class SecurityHeaders:
    """ASGI middleware that puts HEADERS on every response and the page's cookie on the page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_page = scope["path"].removeprefix(scope.get("root_path", "")) == "/"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if is_page:
                    headers.append("Set-Cookie", SET_PAGE_COOKIE)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class HostGate:
    """ASGI middleware before everything. A page of another site can have its own name resolved to this machine (DNS
    rebinding); what it then asks is of its own origin to the browser, but its Host is still that name. A server that
    listens on this machine only answers to no name that is not this machine's."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        own = socket.gethostname().lower()
        names = ("localhost", "*.localhost", own, own.partition(".")[0], *settings.allowed_hosts)
        self._names = {name for name in names if not name.startswith("*")}
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._answers_to(HTTPConnection(scope).headers.get("host")):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(1008)(scope, receive, send)  # before accept: the handshake is answered with 403
        else:
            await PlainTextResponse(REFUSED_HOST, 403)(scope, receive, send)

    def _answers_to(self, host: str | None) -> bool:
        if not host:  # every browser sends one
            return True
        name = re.sub(r":\d*$", "", host).lower().rstrip(".")
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def listens_locally(host: str) -> bool:
    """Whether a server bound to `host`, an address or a name, is reached from this machine only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        return False
    return ip_address(str(found[4][0]).partition("%")[0]).is_loopback


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class PageGate:
    """ASGI middleware in front of what Gradio serves. Gradio answers pages of every origin, with their reader's login;
    here they are refused, preflights included. It also takes uploads, gives out files, fetches from elsewhere and
    describes itself; here what the page does not use is closed."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        # /v1 and /kv ask the guard themselves, and answer in their own form.
        if path is None or path.startswith(("/v1/", "/kv/")):
            await self._app(scope, receive, send)
        elif refusal := self._refusal(path, HTTPConnection(scope)):
            status, why = refusal
            await JSONResponse({"detail": why}, status)(scope, receive, send)
        else:
            await self._app(scope, _at_most(MAX_PAGE_BODY, receive), send)

    def _refusal(self, path: str, connection: HTTPConnection) -> tuple[int, str] | None:
        if not self._guard.same_origin(connection):
            return 403, "a page of another site may not use this server"
        first, _, rest = path.lstrip("/").partition("/")
        name = rest.partition("/")[0]
        if first in CLOSED or (first == "gradio_api" and name not in USED_OF_GRADIO):
            return 403, "the page does not use this address"
        if first == "gradio_api" and name in BEHIND_LOGIN and not self._guard.logged_in(connection):
            return 401, "Not authenticated"
        return None


def _at_most(limit: int, receive: Receive) -> Receive:
    """`receive` of a body that may not be longer than `limit` bytes."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413, f"the body is longer than {limit:,} bytes; send less")
        return message

    return counted


class Guard:
    """Answers whether a connection may pass. `gradio_app` is bound once the page is mounted: it owns the logins."""

    def __init__(self, settings: Settings) -> None:
        self._api_key = settings.api_key
        self._auth = settings.auth
        self.gradio_app: Any = None

    @staticmethod
    def same_origin(connection: HTTPConnection) -> bool:
        """False for a request that a browser sends on behalf of another site's page.

        Sockets and simple POSTs are not held back by the browser's same-origin policy. A client that is no browser
        sends no Origin and passes. Behind a proxy that rewrites Host there is X-Forwarded-Host to go by, or the
        page's cookie; a foreign page can bring neither.
        """
        origin = connection.headers.get("origin")
        if origin is None or PAGE_COOKIE in connection.cookies:
            return True
        try:
            host = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        forwarded = connection.headers.get("x-forwarded-host", "").split(",")[0].strip()
        return bool(host) and host in (connection.headers.get("host", "").lower(), forwarded.lower())

    def has_api_key(self, connection: HTTPConnection) -> bool:
        """True if no key is set or the request carries it as `Authorization: Bearer KEY`."""
        if self._api_key is None:
            return True
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode())

    def logged_in(self, connection: HTTPConnection) -> bool:
        """True if no login is set or the browser carries one that the page's login form gave it."""
        if self._auth is None:
            return True
        if self.gradio_app is None:
            return False
        # The form sets one token under two names, one of them for pages without TLS, as Gradio's own routes read it.
        names = (f"{prefix}-{self.gradio_app.cookie_id}" for prefix in ("access-token", "access-token-unsecure"))
        token = next(filter(None, map(connection.cookies.get, names)), None)
        return token in self.gradio_app.tokens

    def may_read_snapshot(self, connection: HTTPConnection) -> bool:
        """/kv/snapshot stands behind key and login; where both are set, either opens it."""
        if self._api_key is not None and self._auth is not None:
            return self.has_api_key(connection) or self.logged_in(connection)
        return self.has_api_key(connection) and self.logged_in(connection)
