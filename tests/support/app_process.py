"""app.py as it is started from a shell: how it opens, what it prints, with which code it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_app(*argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run app.py until it ends by itself."""
    return subprocess.run(
        [sys.executable, "app.py", *argv],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class AppProcess:
    """A running app.py with its own port and data folder; as a context manager it leaves no process behind."""

    def __init__(
        self,
        *argv: str,
        data_dir: Path,
        port: int | None = None,
        program: tuple[str, ...] = ("app.py",),
        **env: str,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        self._log = data_dir.with_suffix(".log").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", str(self.port), "--data-dir", str(data_dir), *argv],
            cwd=ROOT,
            env=_environment() | env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> AppProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()

    def log(self) -> str:
        """What it printed so far, stdout and stderr together."""
        self._log.seek(0)
        return self._log.read()

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer:
            return json.load(answer)

    def wait_for(self, true: Callable[[], bool], seconds: float = 60) -> float:
        """Seconds until `true()`; fails if the process ends first."""
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log()}"
            assert time.monotonic() - began < seconds, self.log()
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_open(self) -> float:
        """Seconds until /healthz answered."""
        return self.wait_for(self._answers)

    def wait_ready(self) -> AppProcess:
        """Return when the model is loaded."""
        self.wait_open()
        self.wait_for(lambda: self.health()["ready"], 120)
        return self

    def end(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(20)

    def _answers(self) -> bool:
        try:
            self.health()
        except OSError:
            return False
        return True


def _environment() -> dict[str, str]:
    """This process's, without settings of the server, but with the cache folder that holds the model."""
    ours = ("PAGETURN_", "GRADIO_", "SPACE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours) or k == "PAGETURN_HOME"}
