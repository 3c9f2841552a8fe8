"""The one restart after a fault that the engine cannot survive: the process becomes a new one.

exec, not a supervising parent: the process keeps its id, so a terminal, a container or a service manager sees no end;
no second interpreter stands by; and every thread goes, also one that is stuck in native code. The listening socket
goes along, so that whoever connects meanwhile waits instead of being refused, and the port stays ours.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass

WINDOW_SECONDS = 600.0  # a fault this soon after a restart is not answered with another one
_VARIABLE = "_PAGETURN_RESTART"  # tells the new process; it takes it out of the environment again


@dataclass(frozen=True, slots=True)
class Restart:
    """What the process before this one left: why it ended, when, and its listening socket."""

    cause: str
    at: float  # time.monotonic(), which goes on over an exec
    listener: socket.socket

    def is_recent(self) -> bool:
        return time.monotonic() - self.at < WINDOW_SECONDS


def taken_over() -> Restart | None:
    """What a restart has left for this process; None if it was started by somebody else."""
    note = os.environ.pop(_VARIABLE, None)
    if note is None:
        return None
    data = json.loads(note)
    listener = socket.socket(fileno=data["fd"])
    listener.set_inheritable(False)
    return Restart(data["cause"], data["at"], listener)


def become_new(cause: str, listener: socket.socket) -> None:
    """Run this process's command line anew, in its place. Everything worth keeping must be on disk by now."""
    listener.set_inheritable(True)
    os.environ[_VARIABLE] = json.dumps({"cause": cause, "at": time.monotonic(), "fd": listener.fileno()})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
