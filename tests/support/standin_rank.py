"""A rank process without a model, quick to start, that does what setup.path names; it keeps rank.py's protocol.

Its first two answers to a step are ids [1], [2], then what the script says. Light imports only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

from engine.rank import RankSetup, Ready, end_as_an_orphan, end_with_parent


def main(setup: RankSetup, channel: Connection) -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(channel.fileno(), setup.folder), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        play(setup, channel)
    end_as_an_orphan(setup.folder)


def play(setup: RankSetup, channel: Connection) -> None:
    script, last = setup.path.name, setup.rank == setup.size - 1
    if script == "cannot load" and last:
        channel.send(("failed", ValueError("weights are missing"), None))
        time.sleep(60)
    if script == "dies loading" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(("progress", "loading weights", 50.0))
    if script == "slow to load" and last:
        time.sleep(1.5)
    channel.send(("fits", 100 - 30 * setup.rank))
    num_blocks = channel.recv()
    channel.send(("ready", Ready(0.001, 0.0, [])))
    answered = 0
    while (message := channel.recv()) is not None:
        step, _chores, _ahead = message
        answered += 1
        if answered <= 2:
            channel.send(("done", ([answered] if setup.rank == 0 else [], [], []), answered))
        elif script == "all fail":
            channel.send(("failed", ZeroDivisionError("in the model"), answered))
            answered = 0
        elif script == "spoiled":
            channel.send(("failed", ZeroDivisionError("in the model"), None))
        elif script == "out of step":
            channel.send(("failed", ZeroDivisionError("in the model"), answered + setup.rank))
        elif script == "one fails" and setup.rank == 0:
            channel.send(("failed", ZeroDivisionError("in the model"), answered))
        elif script == "exits" and last:
            os._exit(3)
        elif script == "compiles":
            channel.send(("compiling",))
            time.sleep(1.5)
            channel.send(("done", ([answered] if setup.rank == 0 else [], [], []), answered))
        elif script == "echo":
            prompt_length = len(step[2][0][3]) if step[0] == "plan" and step[2] else 0
            channel.send(("done", ([num_blocks, prompt_length], [], []), answered))
        else:
            time.sleep(60)
