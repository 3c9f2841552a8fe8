"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

A short kernel spends as long starting as computing. On Hopper and later, a kernel launched with `launch_pdl` may start
once every program of the one before has called trigger(); what it does before wait() (reading weights, which nobody
writes) then costs nothing. wait() returns when the kernel before has finished and its writes are visible, so every
kernel launched this way calls it in every program, before it reads what another kernel wrote and before it writes at
all. As the kernel before did not finish without its own wait(), all before it have finished, too. trigger() comes
after wait(): at most one kernel is ahead of the one that works.
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

_MOST_ROWS = 256  # of a step; kernels of more last long, and programs that wait are in the way of those that work


@functools.cache
def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, rows: int = 1) -> dict[str, Any]:
    """Keywords for the launch, over so many rows, of a kernel that has a constexpr OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if rows <= _MOST_ROWS and _is_able(device) else {"OVERLAP": False}


@triton.jit
def wait_and_trigger(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAP: tl.constexpr):
    """Ask for the cache lines at `pointers`, which must be readable, to be brought to the L2 cache; before the wait."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
