"""Matrix products with bf16 weights in oneDNN's own blocked layout, for CPUs with bf16 instructions.

F.linear hands oneDNN a row-major weight, which it then rearranges on every call: at decode sizes that costs more
than the product itself (2-3 times as slow at 1 row, 1.3 times at 512, measured on AMX). Packing once at load
avoids it. The operators are those that torch.compile emits for CPU models.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The layout depends on the rows to expect; one chosen for prompts is as good at a single row.
_EXPECTED_ROWS = 512


def can_pack(weight: Tensor) -> bool:
    """True where a packed product exists and is the faster one: bf16, on a CPU that computes in bf16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight: Tensor) -> Tensor:
    """weight [out, in] -> an opaque tensor for packed_linear, which alone can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> x W^T + bias [T, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
