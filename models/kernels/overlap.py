"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

A short kernel spends as long starting as computing. On Hopper and later, a kernel launched with `launch_pdl` may start
once every program of the one before has called for it; what it does before its wait (reading weights, which nobody
writes) then costs nothing. The wait ends when the kernel before has finished and its writes are visible, so every
kernel launched this way waits in every program, before it reads what another kernel wrote and before it writes at all
(but for one that runs beside the one before it: trigger()).
A kernel calls for the next one after its own wait. So at most one kernel is ahead of the one that works, and before its
wait it may read, besides weights, what any kernel but the one before it has written: those had finished when that one
called. (Calling before the wait lets several be ahead; whole steps of Qwen3-0.6B on an H200 were a third slower at 4 to
32 rows, and level at one.)
"""

# How a kernel is launched is beyond the type checker.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Rows (tokens of a step) up to which launches overlap. Kernels of more last long, and programs that wait are in the way
# of those that work.
MOST_ROWS = 256


@functools.cache
def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, rows: int) -> dict[str, Any]:
    """Keywords for the launch, over so many rows, of a kernel that has a constexpr OVERLAP."""
    if rows > MOST_ROWS or not _is_able(device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_and_trigger(OVERLAP: tl.constexpr):
    """The kernel's wait for those before it, and its call for the one after it."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """The wait alone."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def trigger(OVERLAP: tl.constexpr):
    """The call alone, of a kernel that needs what the one before it writes only at its end, where it waits; until then
    it may read what earlier kernels have written, if the one before it calls after its own wait in every program."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAP: tl.constexpr):
    """Ask for the cache lines at `pointers`, which must be readable, to be brought to the L2 cache; before the wait."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
