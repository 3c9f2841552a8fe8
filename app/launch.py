"""From settings to a running server: check, open the port, load behind it, end cleanly.

Everything that can be told at once (settings, port, model file, data folder) is checked before the port opens; a
fault there is one line and exit code 2. torch is imported by the engine's thread after the port is open.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from app.doorway import THREAD_NAME, Doorway
from app.restart import WINDOW_SECONDS, Restart, become_new, taken_over
from app.settings import Settings, with_flags

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine.engine_thread import EngineThread

EXIT_UNUSABLE = 2
BACKLOG = 2048  # connections that may wait to be accepted
LOAD_POLL = 0.1  # seconds between two looks at how the loading goes
LAST_WORDS = 1.0  # seconds that open streams have at shutdown to carry their last text
# The devices of NVIDIA's driver, of WSL's and of AMD's.
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Read when Gradio and huggingface_hub are imported.
OFFLINE_MANNERS = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


class CannotStart(Exception):
    """Something given cannot be used; the message is one line."""


def run(settings: Settings) -> NoReturn:
    """Serve until SIGTERM, ^C or a failure to load a local model, then end the process with the exit code."""
    os.environ.update(OFFLINE_MANNERS)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("pageturn").setLevel(logging.INFO)
    _on_signals(_interrupt)  # until the server takes both over
    restart = taken_over()
    try:
        code = _run(settings, restart)
    except CannotStart as error:
        code = _refuse(str(error))
    except KeyboardInterrupt:
        code = 0
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once. Everything is stored and closed by now, and to take the interpreter down, with torch
    and Gradio in it, would take seconds. Nor may it be taken down around a thread that could not be joined: one that
    is inside an import, a download or a step."""
    if not any(thread.name in ("engine", THREAD_NAME) for thread in threading.enumerate()):
        atexit._run_exitfuncs()  # multiprocessing's among them, which end child processes
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _on_signals(handler: Callable[[int, FrameType | None], Any]) -> None:
    """What ^C and SIGTERM do from now on."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, handler)


def _interrupt(sig: int, frame: FrameType | None) -> None:
    """End now. (asyncio replaces Python's own handler of ^C, and would cancel the start half-way at its next await.)"""
    raise KeyboardInterrupt


def _run(settings: Settings, restart: Restart | None) -> int:
    on_cpu = _check_device(settings.device, settings.attention_backend)
    _check_model(settings.model, settings.max_model_len, settings.tensor_parallel_size, on_cpu)
    listener = restart.listener if restart else bind(settings.host, settings.port)
    store = _open_store(settings)
    asked_to_end = threading.Event()
    _on_signals(lambda *_: asked_to_end.set())  # an interrupt would leave asyncio with half an event loop
    try:
        server = asyncio.run(_serve(settings, listener, store, restart, asked_to_end))
    finally:
        store.close()
    if server.kept_listener is not None:
        become_new(server.restart_cause, server.kept_listener)
    return server.exit_code


async def _serve(
    settings: Settings, listener: socket.socket, store: Any, restart: Restart | None, asked_to_end: threading.Event
) -> Server:
    _on_signals(_interrupt)
    if asked_to_end.is_set():
        raise KeyboardInterrupt
    from engine.engine_thread import EngineThread

    engine = EngineThread(settings.engine_config())

    def build() -> FastAPI:
        from app.chat import ChatService
        from app.gradio_import import without_interface_files

        without_interface_files()
        from app.server import build_app

        chats = ChatService(store, engine, settings.abandon_after, isolate_users=settings.isolate_users)
        return build_app(settings, engine, chats)

    server = Server(settings, engine, build, listener, restart)
    _on_signals(server.handle_exit)
    await server.serve(sockets=[listener])
    if server.doorway.fault is not None:
        raise server.doorway.fault
    return server


class Server(uvicorn.Server):
    """uvicorn that starts the engine once the page is there, and at the end lets jobs be stored first."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineThread,
        build: Callable[[], FastAPI],
        listener: socket.socket,
        restart: Restart | None = None,
    ) -> None:
        self.doorway = Doorway(build, engine, self._page_built)
        config = uvicorn.Config(
            self.doorway,
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            lifespan="on",
            ws_per_message_deflate=False,  # 50 watchers' short frames cost 40 % more with it, at the same length
            ws_max_size=2**16,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
        )
        super().__init__(config)
        self.exit_code = 0
        self.restart_cause = ""
        self.kept_listener: socket.socket | None = None  # set when the process is to begin anew
        self._restart = restart
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._loading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = address(self._settings, self._listener.getsockname()[1])
        again = f" again, after a fault: {self._restart.cause}" if self._restart else ""
        print(f"PageTurn is open at {url}{again} (the model is loading)", flush=True)
        if self._settings.auth and not self._settings.api_key:
            print("note: --auth guards the page only; without --api-key everybody may use /v1", flush=True)

    def _page_built(self) -> None:
        """Load the model behind the page: torch and Gradio imported at the same time would only delay each other."""
        if self.doorway.fault is not None:
            self.should_exit = True
        elif not self.should_exit:
            loop = asyncio.get_running_loop()
            self._engine.on_death = lambda: loop.call_soon_threadsafe(self._engine_died)
            self._engine.start()
            self._loading = asyncio.create_task(self._report_load())

    async def _report_load(self) -> None:
        """Say when the model is ready. A local model that cannot be loaded ends the server; after a failed download
        the page stays up with the reason and a Retry button."""
        began, failed = time.monotonic(), False
        while not (status := self._engine.status()).ready:
            if status.error and not failed and not self.should_exit:
                if is_fatal(self._settings.model, self._engine.cause):
                    self.exit_code = _refuse(with_flags(status.error))
                    self.should_exit = True
                    return
                print(f"the model is not loaded: {_one_line(status.error)} (the page offers Retry)", flush=True)
            failed = status.error is not None
            await asyncio.sleep(LOAD_POLL)
        blocks = f"{status.kv['total']:,} KV blocks of {status.block_size} tokens"
        how = f"{status.device}, {status.dtype}, {blocks}"
        print(f"{status.model} is ready after {time.monotonic() - began:.1f} s ({how})", flush=True)

    def _engine_died(self) -> None:
        """Begin anew, once: streams have had their last word, and shutdown() stores what the chats have of it."""
        cause = _one_line(self._engine.status().error)
        if self.should_exit:
            return
        if self._restart is not None and self._restart.is_recent():
            minutes = WINDOW_SECONDS / 60
            print(
                f"the engine has stopped: {cause} (restarted once within {minutes:.0f} minutes; it stays down)",
                flush=True,
            )
            return
        print(f"the engine has stopped: {cause} (the server restarts)", flush=True)
        self.restart_cause = cause
        self.kept_listener = self._listener.dup()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._loading is not None:
            self._loading.cancel()
        # uvicorn would wait for open streams before it tells the application to end, and those wait for their jobs.
        await self.doorway.close()
        if self.server_state.tasks and not self.force_exit:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS)
        # Cancelled tasks would be logged as faults; a closed connection ends them as a client that left does.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised once more at the end: an orderly end is exit code 0."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def is_fatal(model: str, cause: BaseException | None) -> bool:
    """Whether a failed load ends the server: unless trying again may help, which it may after a download."""
    from models.catalog import local_path

    return local_path(model) is not None or isinstance(cause, ValueError)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address (connections wait until they are accepted); CannotStart if it cannot."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise CannotStart(f"--host: {host!r} is no address of this machine") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    try:
        listener.bind(target)
        listener.listen(BACKLOG)  # at once: two servers may bind one address, but only one may listen
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            other = "is in use by another program; choose another with --port (0: any free one)"
            raise CannotStart(f"port {port} on {host} {other}") from None
        raise CannotStart(f"cannot listen on {host} port {port}: {error.strerror}; see --host and --port") from None
    return listener


def address(settings: Settings, port: int) -> str:
    """The URL to open on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}{settings.root_path}"


def _check_device(device: str, attention_backend: str) -> bool:
    """Refuse a card that cannot be there; returns whether the model will run on the CPU for certain. torch knows the
    rest, but takes seconds to import; the engine asks it."""
    no_card = sys.platform == "linux" and not any(os.path.exists(node) for node in GPU_NODES)
    if device == "cuda" and no_card:
        raise CannotStart("--device cuda: this machine has no GPU driver loaded; use --device cpu or auto")
    if attention_backend in ("triton", "flash_attn") and (device == "cpu" or no_card):
        raise CannotStart(f"--attention-backend {attention_backend} needs a GPU; on a CPU use sdpa or auto")
    return device == "cpu" or no_card


def _check_model(model: str, max_model_len: int | None, num_ranks: int, on_cpu: bool) -> None:
    from models.catalog import check_local, stored_config

    try:
        config = check_local(model)
    except (ValueError, OSError) as error:
        raise CannotStart(f"--model: {_one_line(error)}") from None
    try:
        if on_cpu or model != "default":  # on a card the default is another model, in the hub
            config = config or stored_config(model)
        limit = config.max_position_embeddings if config else None
        if limit is not None and max_model_len is not None and max_model_len > limit:
            raise CannotStart(f"--max-model-len {max_model_len} is above the model's own limit of {limit} tokens")
        if config is not None:
            config.check_ranks(num_ranks)
    except ValueError as error:
        raise CannotStart(with_flags(str(error))) from None


def _open_store(settings: Settings) -> Any:
    from app.data_folder import StoreError
    from app.store import Store

    assert settings.data_dir is not None  # parse_settings fills it
    try:
        return Store(settings.data_dir)
    except StoreError as error:
        raise CannotStart(_one_line(error)) from None


def _refuse(message: str) -> int:
    print(f"error: {_one_line(message)}", file=sys.stderr, flush=True)
    return EXIT_UNUSABLE


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
