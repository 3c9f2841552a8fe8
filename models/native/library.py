"""Compiles decode.c on this machine, for this machine's CPU, and loads it. It takes half a second, once: what was
compiled is kept beside the models (see models.catalog.cache_dir). Its threads are PyTorch's own: what GCC makes finds
the OpenMP library that PyTorch has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from models.catalog import cache_dir

_SOURCE = Path(__file__).with_name("decode.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC")
_COMPILERS = ("gcc", "cc")
_COMPILE_S = 60.0


class Unavailable(Exception):
    """There is no library here; the message says why."""


@functools.cache
def load(bf16: bool) -> ctypes.CDLL:
    """The library for models of bfloat16, or of float32. Raises Unavailable."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler: none of {', '.join(_COMPILERS)} is installed")
    try:
        words = shlex.split(compiler)
    except ValueError as error:
        raise Unavailable(f"CC={compiler!r} cannot be read: {error}") from error
    if not words:
        raise Unavailable(f"CC={compiler!r} names no compiler")
    command = [*words, *_FLAGS, *(["-DBF16"] if bf16 else [])]
    known_by = "\n".join([_SOURCE.read_text(), *command, *platform.libc_ver(), _cpu()])
    name = f"decode-{hashlib.sha256(known_by.encode()).hexdigest()[:16]}.so"
    try:
        folder = cache_dir() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / name).exists():
            with contextlib.suppress(OSError):  # damaged, or of another system: compiled anew
                return ctypes.CDLL(str(folder / name))
        return _compile(command, folder, name)
    except (OSError, RuntimeError):  # no home, or it cannot be written to or run from
        pass
    try:
        return _compile(command, None, name)
    except OSError as error:
        raise Unavailable(f"there is nowhere to compile: {error}") from error


def _compile(command: list[str], folder: Path | None, name: str) -> ctypes.CDLL:
    """The library of a new file, which stays in the folder; without one it goes once it is loaded."""
    with tempfile.TemporaryDirectory(prefix="pageturn-", dir=folder) as scratch:
        new = Path(scratch, name)
        try:
            run = subprocess.run(
                [*command, "-o", str(new), str(_SOURCE), "-lm"],
                capture_output=True, text=True, errors="replace", timeout=_COMPILE_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{command[0]} cannot be used: {error}") from error
        if run.returncode:
            said = [line.strip() for line in run.stderr.splitlines() if line.strip()] or ["it said nothing"]
            reason = next((line for line in said if "error" in line), said[0])
            raise Unavailable(f"{command[0]} fails with code {run.returncode}: {reason}")
        try:
            loaded = ctypes.CDLL(str(new))
        except OSError as error:
            if folder is not None:
                raise
            raise Unavailable(f"what {command[0]} has made cannot be loaded: {error}") from error
        if folder is not None:
            new.replace(folder / name)  # at once: another process may want it, too
        return loaded


def _cpu() -> str:
    """What decides the instructions that -march=native takes: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "cpu family", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip() in wanted}))
