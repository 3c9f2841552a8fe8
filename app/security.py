"""Who may talk to which route: origin, API key, login; and the headers that bound what the page can do."""

from __future__ import annotations

import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
