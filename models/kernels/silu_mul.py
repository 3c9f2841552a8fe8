"""SiLU(gate) * up, the product in the middle of SwiGLU, in one pass."""

# How a kernel is launched is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from models.kernels import overlap

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], gates first, rows contiguous -> silu(gate) * up [T, I], computed in fp32."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(size))
        grid = tokens, triton.cdiv(size, block)
        _silu_mul[grid](
            gate_up, out, gate_up.stride(0), size, BLOCK=block, **overlap.launch_options(gate_up.device, tokens)
        )  # fmt: skip
    return out


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul(gate_up, out, row_stride, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    overlap.wait_and_trigger(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
