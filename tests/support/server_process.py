"""`python app.py` in a child process, and a cable to it that can be cut."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

REPO = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`python app.py` on a free port with its own data folder; it can be ended and started again on both."""

    def __init__(self, data: Path, *args: str) -> None:
        self.port, self._data, self._args = free_port(), data, args
        self._process: subprocess.Popen[bytes] | None = None
        self.log = data.parent / f"{data.name}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, ready: bool = True) -> Server:
        command = [sys.executable, "app.py", "--port", str(self.port), "--data-dir", str(self._data), "--device", "cpu"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*command, *self._args], cwd=REPO, env=env, stdout=log, stderr=log)
        self.wait(lambda health: health["ready"] or not ready)
        return self

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer:
            return json.load(answer)

    def wait(self, done: Callable[[dict], bool], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if done(self.health()):
                    return
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server did not get there:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Meanwhile no file takes a byte that this server writes, as on a disk without room."""
        assert self._process is not None
        pid, (_, hard) = self._process.pid, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    def stored_replies(self) -> list[str]:
        """The texts of all finished replies on its disk."""
        with closing(sqlite3.connect(self._data / "pageturn.sqlite3")) as db:
            return [
                text for (text,) in db.execute("SELECT text FROM turns WHERE role = 'assistant' AND status = 'done'")
            ]

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the exit; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(how)
        return self._process.wait(timeout=20)


class Cable:
    """A TCP proxy before a server: `cut` breaks every connection and refuses new ones until `mend`.

    path: the page stands under this path ("/x") here, which is taken off before the server sees it.
    """

    def __init__(self, target_port: int, path: str = "") -> None:
        self.port, self._target, self._path = free_port(), target_port, path
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.mend()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self._path}"

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        assert self._listener is not None
        ends = [self._listener, *self._sockets]
        self._sockets = []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink, path in ((near, far, self._path), (far, near, "")):
                    threading.Thread(target=self._carry, args=(source, sink, path), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, path: str) -> None:
        request_line = re.compile(rb"^([A-Z]+ )" + re.escape(path.encode()) + rb"/")
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(request_line.sub(rb"\1/", data, count=1) if path else data)
            sink.shutdown(socket.SHUT_WR)
