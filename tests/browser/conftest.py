"""A real server in a child process and a real Chromium before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chromium import find_chromium
from server_process import Cable, Server

LAUNCH_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def server_args(shallow_model_path: Path) -> tuple[str, ...]:
    return ("--model", str(shallow_model_path), "--num-kvcache-blocks", "1024")


@pytest.fixture(scope="session")
def server(server_args: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not end it; each test comes with its own browser profile, so its own user."""
    # A test that fails in mid-reply must not slow down the ones after it: its reply ends with its browser.
    server = Server(tmp_path_factory.mktemp("data"), *server_args, "--abandon-after", "8").start()
    yield server
    assert server.end() == 0, server.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def own_server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that a test may end and start again, with the whole of the default model."""
    server = Server(tmp_path_factory.mktemp("own"), "--model", str(default_model_path), "--num-kvcache-blocks", "1024")
    server.start()
    yield server
    server.end()


@pytest.fixture
def cable(server: Server) -> Iterator[Cable]:
    """A connection to the shared server that the test may cut."""
    cable = Cable(server.port)
    yield cable
    cable.cut()


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """Per module: Playwright's synchronous API keeps an event loop running, which asyncio tests would trip over."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # a test machine may be busy; what must be quick is timed by its test
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=LAUNCH_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def profile(chromium) -> Iterator[Callable[..., object]]:
    """profile(**options) -> a new browser profile: another user. Errors of the page's scripts fail the test.

    scripts: run in each of its pages before the page's own."""
    contexts, errors = [], []

    def make(scripts=(), **options):
        context = chromium.new_context(**({"viewport": {"width": 1400, "height": 860}} | options))
        context.set_default_timeout(60_000)
        for script in scripts:
            context.add_init_script(script)
        context.on("weberror", lambda error: errors.append(str(error.error)))
        contexts.append(context)
        return context

    yield make
    for context in contexts:
        context.close()
    assert not errors
