"""RankGroup: the processes of a tensor-parallel group, the channels to them, their health.

The command channel is a socket pair for each rank: nameless, without a port, gone with its holders, and carrying
messages of any size. The ranks find each other through a file in a folder made for the group; so engines on one
machine never meet.

Each rank answers each command, in order. A death is seen at once, a hang when an answer has not come in the time that
the caller allows; loading and warming up have no limit, for they report progress. Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util  # its handler at exit, which waits for children, must be registered before ours
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine.rank import RankSetup, Ready, main

logger = logging.getLogger("pageturn.engine")

Progress = Callable[[str, float], None]

COMPILE_PATIENCE = 60.0  # seconds
WRITE_PATIENCE = 10.0  # seconds that a rank may leave a command unread
_GRACE = 2.0  # seconds that the others have for their answers when one has failed
_POLL = 0.2  # seconds between two reports of progress, which is also where a shutdown comes in
_LAST_WORDS = 2.0  # seconds to end in an orderly way


class RanksLost(RuntimeError):
    """A rank has died, hangs, or has fallen out of step. No rank of the group, and no KV block, can be used again."""


class _Awaited(NamedTuple):
    """What the selector watches: a rank's channel, or its process."""

    rank: int
    is_channel: bool


class RankGroup:
    """The processes of one group and the channels to them. Starts them; load() waits until they are ready."""

    def __init__(self, size: int, setup: Callable[[int, Path], RankSetup]) -> None:
        """setup(rank, the group's folder) says what each rank is to run."""
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="pageturn-ranks-"))
        self._channels: list[Connection] = []
        self._answered: list[deque[tuple]] = [deque() for _ in range(size)]
        self._selector = selectors.DefaultSelector()
        self._parent = os.getpid()
        self.processes: list[Any] = []
        _groups.add(self)
        spawn = multiprocessing.get_context("spawn")
        try:
            for rank in range(self.size):
                ours, theirs = _channel()
                process = spawn.Process(
                    target=main, args=(setup(rank, self.folder), theirs), name=f"pageturn-rank-{rank}", daemon=True
                )
                self._channels.append(ours)
                _start_deaf(process)
                theirs.close()
                self.processes.append(process)
                self._selector.register(ours, selectors.EVENT_READ, _Awaited(rank, True))
                self._selector.register(process.sentinel, selectors.EVENT_READ, _Awaited(rank, False))
        except BaseException:
            self.kill()
            raise

    def __del__(self) -> None:
        """Dropped, not ended, it leaves no rank behind either, whose channel a cycle of objects would keep open."""
        if hasattr(self, "processes"):
            self.kill()

    def load(self, progress: Progress, num_blocks: int | None = None) -> tuple[int, Ready]:
        """Wait until every rank is ready -> (KV blocks, how fast the slowest rank is and what is captured).

        num_blocks: None for the smallest number that any rank can hold. Raises what kept a rank from loading
        (ValueError for a model that cannot be served), RanksLost where one died of it; all are killed then.
        """
        try:
            fitting = self._await_all("fits", progress)
            if len(set(fitting)) > 1:
                shown = ", ".join(f"{n:,}" for n in fitting)
                logger.info("KV blocks that the ranks can hold: %s; the smallest number is used", shown)
            chosen = min(fitting) if num_blocks is None else num_blocks
            self.send(chosen)
            ready: list[Ready] = self._await_all("ready", progress)
            assert all(one.shapes == ready[0].shapes for one in ready), f"the ranks' graphs differ: {ready}"
            seconds, rate = max(one.seconds_per_token for one in ready), min(one.prefill_rate for one in ready)
            return chosen, Ready(seconds, rate, ready[0].shapes)
        except BaseException:
            self.kill()
            raise

    def send(self, message: Any) -> None:
        """To every rank; RanksLost where one is dead or does not read, or all were ended."""
        if not self.processes:
            raise RanksLost("the ranks have been ended")
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for rank, channel in enumerate(self._channels):
            try:
                channel.send_bytes(data)
            except BlockingIOError:
                raise RanksLost(f"rank {rank} has read nothing for {WRITE_PATIENCE:.1f} s: it hangs") from None
            except OSError:
                raise RanksLost(self._death(rank)) from None

    def answers(self, seconds: float) -> list[tuple]:
        """The next answer of every rank, by rank. RanksLost after so many seconds, or when a rank dies. One that
        compiles a kernel has COMPILE_PATIENCE from then on.

        Where a rank has failed, the others may wait for it in a collective for ever, and have two seconds.
        """
        got = self._answered  # kept where ^C comes in between; a rank may be steps ahead of another
        deadline = time.monotonic() + seconds
        failed: tuple | None = None
        while not all(got):
            if failed is None:
                failed = next((answers[0] for answers in got if answers and answers[0][0] == "failed"), None)
                if failed is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
            answer = self._next(deadline - time.monotonic())
            if answer is None:
                if failed is not None:
                    raise RanksLost(f"a rank failed alone: {in_words(failed[1])}") from failed[1]
                missing = ", ".join(str(rank) for rank, answers in enumerate(got) if not answers)
                raise RanksLost(f"rank {missing} has not answered for {seconds:.1f} s: it hangs")
            rank, message = answer
            if message[0] == "compiling":
                deadline = max(deadline, time.monotonic() + COMPILE_PATIENCE)
            elif message[0] == "log":
                logger.log(*message[1:])
            else:
                got[rank].append(message)
        return [answers.popleft() for answers in got]

    def loss(self) -> RanksLost | None:
        """Why the group cannot be used any more, as far as it shows without asking: a rank that is dead."""
        dead = next((rank for rank, process in enumerate(self.processes) if process.exitcode is not None), None)
        return None if dead is None else RanksLost(self._death(dead))

    def end(self) -> None:
        """Let every rank end, and kill the one that does not. A second call is a no-op."""
        for channel in self._channels:
            with contextlib.suppress(OSError):  # dead already, or stuck: killed below
                channel.send(None)
        deadline = time.monotonic() + _LAST_WORDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now and leave nothing behind. A second call is a no-op, and so is one by a fork of the parent,
        whose copy of this ends before the ranks do."""
        if os.getpid() != self._parent:
            return
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for channel in self._channels:
            channel.close()
        self.processes, self._channels = [], []
        self._selector.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        _groups.discard(self)

    # -- internals ------------------------------------------------------------------------------------

    def _await_all(self, kind: str, progress: Progress) -> list[Any]:
        """What every rank says under this name, however long it takes; rank 0's progress is passed on meanwhile."""
        got: dict[int, Any] = {}
        stage: tuple[str, float] = ("starting the ranks", 0.0)
        while len(got) < self.size:
            progress(*stage)
            answer = self._next(_POLL)
            if answer is None:
                continue
            rank, message = answer
            if message[0] == "progress":
                stage = message[1:]
            elif message[0] == "compiling":
                pass
            elif message[0] == "log":
                logger.log(*message[1:])
            elif message[0] == "failed":
                raise message[1]
            else:
                assert message[0] == kind, f"rank {rank} says {message[0]} where {kind} is due"
                got[rank] = message[1]
        return [got[rank] for rank in range(self.size)]

    def _next(self, seconds: float) -> tuple[int, tuple] | None:
        """The next (rank, message), None where none comes in time; RanksLost when a rank dies."""
        ready = [key.data for key, _ in self._selector.select(max(0.0, seconds))]
        for rank, is_channel in sorted(ready, key=lambda awaited: not awaited.is_channel):  # last words first
            if is_channel:
                try:
                    return rank, self._channels[rank].recv()
                except (EOFError, OSError):
                    pass
            raise RanksLost(self._death(rank))
        return None

    def _death(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(1.0)  # its channel may have closed a moment before
        code = process.exitcode
        if code is None:
            return f"rank {rank} has closed its channel"
        if code >= 0:
            return f"rank {rank} died with exit code {code}"
        hint = "; the system does so where memory runs out" if -code == signal.SIGKILL else ""
        return f"rank {rank} was killed by {signal.Signals(-code).name}{hint}"


def _channel() -> tuple[Connection, Connection]:
    """Both ends of a socket pair. To a rank that does not read a write waits for WRITE_PATIENCE, then fails."""
    ours, theirs = socket.socketpair()
    seconds, microseconds = divmod(int(WRITE_PATIENCE * 1_000_000), 1_000_000)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds))
    return Connection(ours.detach()), Connection(theirs.detach())


def _start_deaf(process: Any) -> None:
    """Start a process that a ^C in the terminal does not reach, not even before it can ignore it by itself."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def in_words(error: BaseException) -> str:
    """The exception's type and text."""
    return f"{type(error).__name__}: {error}"


# Groups that nobody has ended when the interpreter does: it would wait for their processes.
_groups: weakref.WeakSet[RankGroup] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for group in list(_groups):
        group.kill()
