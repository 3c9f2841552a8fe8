"""How much host memory this process may still take, in bytes: the tightest of the limits that apply to it.

A container's limit is often far below the machine's free memory, and what the kernel does when it is passed is
kill the process; so the KV pool is sized from the smallest of

    MemAvailable                         what the machine has left (proc(5))
    cgroup v2 memory.max, v1 limit       of the process's group and every group above it, less what they use,
                                         page cache they could drop not counted as used
    RLIMIT_AS                            less the address space already mapped
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


class Room(NamedTuple):
    """Bytes left under one limit, and that limit's name."""

    free: int
    limit: str


def free_to_this_process(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), address_space: int | None = None
) -> Room:
    """The tightest room. address_space: RLIMIT_AS in bytes, None to ask the system.

    Without any figure (not Linux) half of the physical memory counts as free, and 2 GiB where even that is
    unknown.
    """
    rooms = [*_machine(proc), *_cgroup_v2(proc, cgroups), *_cgroup_v1(proc, cgroups)]
    limit = _address_space_limit() if address_space is None else address_space
    if limit is not None:
        rooms.append(Room(limit - _mapped(proc), "RLIMIT_AS"))
    if not rooms:
        rooms.append(_physical())
    tightest = min(rooms)
    return Room(max(0, tightest.free), tightest.limit)


def _machine(proc: Path) -> list[Room]:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return [Room(int(rest.split()[0]) * 1024, "MemAvailable")]
    return []


def _cgroup_v2(proc: Path, cgroups: Path) -> list[Room]:
    paths = [line.split(":", 2)[2] for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")]
    rooms = []
    for folder in _upwards(cgroups, paths):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            reclaimable = _statistic(folder / "memory.stat", "inactive_file")
            rooms.append(Room(limit - used + reclaimable, "cgroup memory.max"))
    return rooms


def _cgroup_v1(proc: Path, cgroups: Path) -> list[Room]:
    paths = []
    for line in _lines(proc / "self" / "cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3 and "memory" in fields[1].split(","):
            paths.append(fields[2])
    rooms = []
    for folder in _upwards(cgroups / "memory", paths):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            reclaimable = _statistic(folder / "memory.stat", "total_inactive_file")
            rooms.append(Room(limit - used + reclaimable, "cgroup memory.limit_in_bytes"))
    return rooms


def _upwards(root: Path, paths: list[str]) -> list[Path]:
    """The folders of these groups and of all above them. Inside a container the path may lead outside of what
    is mounted; then the root, which is the container's own group, is what there is to read."""
    folders = {root} if paths else set()
    for path in paths:
        folder = root / path.strip("/")
        while folder != root and root in folder.parents:
            folders.add(folder)
            folder = folder.parent
    return sorted(folders)


def _address_space_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _mapped(proc: Path) -> int:
    """Bytes of address space the process has mapped; 0 where unknown."""
    for line in _lines(proc / "self" / "status"):
        if line.startswith("VmSize:"):
            return int(line.split()[1]) * 1024
    return 0


def _physical() -> Room:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, "half of the physical memory")
    return Room(2**31, "an assumed 2 GiB (this system gives no figure)")


def _lines(path: Path) -> list[str]:
    """A file of the kernel's, or nothing where this kernel does not have it or does not show it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The file's integer; None for "max" (no limit) and for a missing file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
