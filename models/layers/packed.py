"""Matrix products with weights in oneDNN's own blocked layout, for CPUs.

F.linear hands oneDNN a row-major bf16 weight, which it then rearranges on every call: at decode sizes that costs
more than the product itself (2-3 times as slow at 1 row, 1.3 times at 512, measured on AMX). For fp32 it calls a
BLAS that is made for large products (2-3 times as slow at 8 rows). Packing once at load avoids both. The
operators are those that torch.compile emits for CPU models.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The layout depends on the rows to expect; one chosen for prompts is as good at a single row.
_EXPECTED_ROWS = 512


def can_pack(weight: Tensor) -> bool:
    """True where a packed product exists and is the faster one: fp32, or bf16 where the CPU computes in it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Tensor:
    """weight [out, in] -> an opaque tensor for packed_linear, which alone can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> x W^T + bias [T, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
