"""Matrix products with weights laid out for a CPU that has AVX-512 or AMX and computes in bf16.

bf16, in oneDNN's own blocked layout. F.linear hands oneDNN a row-major weight, which it then rearranges on every
call: at decode sizes that costs more than the product itself (2-3 times as slow at 1 row, 1.3 times at 512,
measured on AMX). Packing once at load avoids it. The operators are those that torch.compile emits for CPU models.

int4, for checkpoints that keep 4-bit weights. A product of a few rows is bound by the bytes of the weight, of which
it has 5 bits an element instead of 16: 3-4 times as fast at 1 row, equal at about 14, slower beyond. The scales
are rounded to bf16, as the bf16 weight itself is, with the same error.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from models.int4 import GROUP, Int4Matrix

# oneDNN chooses a layout by the rows it is told to expect. At a single row these two are equal; for a prompt either
# may be twice as fast as the other, depending on the shape of the weight and the CPU, so the shape is measured.
_LAYOUTS = (512, 1)
_PROMPT_ROWS = 1024
_CLEARLY_FASTER = 0.85  # of the first layout's time; closer ones are noise, and the choice should be the same each time
# From here on the bf16 product is the faster one (measured on two cores with AMX).
INT4_MAX_ROWS = 12


def can_pack(weight: Tensor) -> bool:
    """True where a packed product exists and is the faster one: bf16, on a CPU that computes in bf16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight: Tensor, prompt_rows: bool = True) -> Tensor:
    """weight [out, in] -> an opaque tensor for packed_linear, which alone can read it. prompt_rows: whether it will
    meet all the rows of a prompt."""
    rows = _expected_rows(*weight.shape) if prompt_rows else _LAYOUTS[0]
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)


@functools.cache
def _expected_rows(out_features: int, in_features: int) -> int:
    """The layout that computes a prompt faster for weights of this shape, by a trial of some milliseconds."""
    x = torch.zeros(_PROMPT_ROWS, in_features, dtype=torch.bfloat16)
    weight = torch.zeros(out_features, in_features, dtype=torch.bfloat16)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for rows in _LAYOUTS]
    best = [math.inf, math.inf]
    for _ in range(5):  # the first round also sets the products up
        for i in range(2):
            start = time.perf_counter()
            packed_linear(x, packed[i], None)
            best[i] = min(best[i], time.perf_counter() - start)
    return _LAYOUTS[best[1] < _CLEARLY_FASTER * best[0]]


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] -> x W^T + bias [T, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def packed_silu_mul(x: Tensor, gate: tuple[Tensor, Tensor | None], up: tuple[Tensor, Tensor | None]) -> Tensor:
    """x [T, in] -> silu(x G^T + g) * (x U^T + u) [T, out]; gate and up are (packed weight, bias). The products end in
    the activation, which saves writing and reading both of them."""
    gated = torch.ops.mkldnn._linear_pointwise(x, *gate, "swish", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, gated, *up, "mul")


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """weight: opaque, half a byte an element. scales bf16 [in / 32, out, 2]: the scale and the value of q = 8."""

    weight: Tensor
    scales: Tensor


def can_pack_int4(weight: Tensor) -> bool:
    """True where the 4-bit product of a weight [out, in] exists and is vectorised."""
    return (
        can_pack(weight)
        and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        and torch.cpu._is_avx512_supported()
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % GROUP == 0
    )


def pack_int4(matrix: Int4Matrix) -> PackedInt4:
    """The matrix as int4_linear reads it."""
    middle = torch.add(matrix.offset, matrix.scale, alpha=8)
    scales = torch.stack([matrix.scale, middle], 2).transpose(0, 1).to(torch.bfloat16).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.q.to(torch.int32), 1)
    return PackedInt4(packed, scales)


def int4_linear(x: Tensor, packed: PackedInt4, bias: Tensor | None) -> Tensor:
    """x bf16 [T, in] -> x W^T + bias [T, out]."""
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed.weight, GROUP, packed.scales)
    return y if bias is None else y.add_(bias)
