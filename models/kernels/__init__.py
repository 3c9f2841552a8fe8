"""Triton kernels, one file each, with their plain-PyTorch reference beside them.

Every file has a function that launches its kernel and a `reference` that computes the same without one. Importing
a file needs triton, importing this package does not. With TRITON_INTERPRET=1, set before triton is imported, the
kernels run on a CPU: slowly, for tests.
"""

from __future__ import annotations

import functools
import os

import torch


def usable(device: torch.device) -> bool:
    """Whether tensors on `device` can go through the kernels."""
    return why_unusable(device.type) is None


@functools.cache
def why_unusable(device_type: str) -> str | None:
    """What keeps the kernels from running on a device of that type ("cpu", "cuda"); None where nothing does.

    On a card one small kernel is compiled and run, because triton may be there and its C compiler not.
    """
    try:
        from models.kernels import silu_mul
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device_type != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else f"triton does not run on a {device_type}"
    x = torch.ones(1, 2, device="cuda")
    try:
        out = float(silu_mul.silu_mul(x))
    except Exception as error:  # whatever a compiler can fail with: the reason is reported, and the choice is not ours
        return f"triton fails on this card: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    expected = float(silu_mul.reference(x))
    return None if abs(out - expected) < 1e-5 else f"triton computes {out} where {expected} is right"
