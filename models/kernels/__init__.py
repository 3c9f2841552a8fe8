"""Triton kernels, one file each, with their plain-PyTorch reference beside them.

Every file has a function that launches its kernel and a `reference` that computes the same without one. Importing
a file needs triton, importing this package does not. With TRITON_INTERPRET=1, set before triton is imported, the
kernels run on a CPU: slowly, for tests.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from typing import Any

import torch

_LEAST_CAPABILITY = (8, 0)  # asynchronous copies, and room in shared memory for tiles on the way


def load(name: str, device: torch.device) -> Any:
    """The module models.kernels.<name>, None where tensors on `device` cannot go through its kernels."""
    return import_module(f"{__name__}.{name}") if why_unusable(device.type) is None else None


@functools.cache
def why_unusable(device_type: str) -> str | None:
    """What keeps the kernels from running on a device of that type ("cpu", "cuda"); None where nothing does.

    On a card one small kernel is compiled and run, because triton may be there and its C compiler not.
    """
    if device_type != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else f"triton compiles nothing for a {device_type}"
    try:
        from models.kernels import silu_mul
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    try:
        capability = torch.cuda.get_device_capability()
        if capability < _LEAST_CAPABILITY:
            return "the Triton kernels want compute capability {}.{}, this card has {}.{}".format(
                *_LEAST_CAPABILITY, *capability
            )
        x = torch.ones(1, 2, device="cuda")
        out = float(silu_mul.silu_mul(x))
    except Exception as error:  # whatever a compiler or driver fails with is the reason that is reported
        return f"triton fails on this card: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    expected = float(silu_mul.reference(x))
    return None if abs(out - expected) < 1e-5 else f"triton computes {out} where {expected} is right"
