"""Which processes a process has started, whether they are gone, and what memory it has; read from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _stat(int(folder.name))) is not None:
            parents.setdefault(stat[1], []).append(int(folder.name))
    found, unvisited = [], [pid]
    while unvisited:
        children = parents.get(unvisited.pop(), [])
        found += children
        unvisited += children
    return found


def gone(pids: Iterable[int], seconds: float, but: str = "\0") -> bool:
    """Whether all of them are, or are within so many seconds; those whose command line holds `but` do not count."""
    left, end = list(pids), time.monotonic() + seconds
    while True:
        left = [pid for pid in left if _lives(pid) and but not in _command(pid)]
        if not left or time.monotonic() > end:
            return not left
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """The names in it; none where a system shows none."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def left_in_shared_memory(before: set[str], seconds: float = 60) -> set[str]:
    """What is there now, was not before, and stays for so long: what tests in other processes put there goes sooner."""
    left, end = shared_memory() - before, time.monotonic() + seconds
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= shared_memory()
    return left


def resident_bytes() -> int:
    """Memory that this process has in use, as the system sees it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lives(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
