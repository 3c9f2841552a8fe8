"""Compiles decode.c on this machine, for this machine's CPU, and loads it. It takes half a second, once: what was
compiled is kept beside the models (see models.catalog.cache_dir). Its threads are PyTorch's own: it finds the OpenMP
library that PyTorch has loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from models.catalog import cache_dir

_SOURCE = Path(__file__).with_name("decode.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 60.0


class Unavailable(Exception):
    """There is no library here; the message says why."""


@functools.cache
def load(bf16: bool) -> ctypes.CDLL:
    """The library for models of bfloat16, or of float32. Raises Unavailable."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler: none of {', '.join(_COMPILERS)} is installed")
    command = [*compiler.split(), *_FLAGS, *(["-DBF16"] if bf16 else [])]
    known_by = hashlib.sha256("\n".join([_SOURCE.read_text(), *command, _cpu()]).encode()).hexdigest()[:16]
    try:
        return ctypes.CDLL(str(_compiled(command, f"decode-{known_by}.so")))
    except OSError as error:
        raise Unavailable(f"{error}") from error


def _compiled(command: list[str], name: str) -> Path:
    folder = cache_dir() / "native"
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=folder)
    except OSError:  # it cannot be kept
        folder = Path(scratch := tempfile.mkdtemp(prefix="pageturn-"))
    try:
        part = Path(scratch, "part.so")
        run = subprocess.run(
            [*command, "-o", str(part), str(_SOURCE), "-lm"],
            capture_output=True, text=True, timeout=_COMPILE_S, check=False,
        )  # fmt: skip
        if run.returncode:
            said = [line for line in run.stderr.splitlines() if line.strip()] or ["it said nothing"]
            raise Unavailable(f"{command[0]} fails with code {run.returncode}: {said[0].strip()}")
        return part.replace(folder / name)  # at once: another process may want it, too
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} cannot be used: {error}") from error
    finally:
        if Path(scratch) != folder:
            shutil.rmtree(scratch, ignore_errors=True)


def _cpu() -> str:
    """What decides the instructions that -march=native takes: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "cpu family", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip() in wanted}))
