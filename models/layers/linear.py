"""Linear layers whose parameters know which part of a checkpoint's tensor is theirs.

Fused layers (query-key-value, gate-up) do one matrix product where the checkpoint keeps several matrices. Under
tensor parallelism column layers keep this rank's rows and RowLinear its columns; `tp_rank` and `tp_size` say
which. With tp_size 1 every layer is whole.

Every parameter carries `parts`, the checkpoint's names beside the layer that fill it (None for its own name),
and, until the model is loaded, `weight_loader(tensor, part)`, which copies this rank's share of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.int4 import Int4Matrix, dense
from models.layers.packed import (
    INT4_MAX_ROWS,
    PackedInt4,
    can_pack,
    can_pack_int4,
    int4_linear,
    pack,
    pack_int4,
    packed_linear,
    packed_silu_mul,
)
from models.native import layout
from models.stored import StoredTensor

if TYPE_CHECKING:  # its import needs triton
    from models.kernels.few_rows import FewRows

Weight = Tensor | Int4Matrix | StoredTensor  # as a checkpoint hands it over: whole, or still in its file


@dataclass(frozen=True, slots=True)
class Part:
    """Where one checkpoint matrix goes: rows [start, start + rows) of its `total` rows become rows
    [offset, offset + rows) of this rank's parameter."""

    name: str | None
    total: int
    start: int
    rows: int
    offset: int


def new_parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    weight_loader: Callable[[nn.Parameter, Weight, str | None], None],
    parts: Sequence[str | None] = (None,),
) -> nn.Parameter:
    """An uninitialised parameter that is filled by `weight_loader` from each of `parts`."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    parameter.parts = tuple(parts)  # type: ignore[attr-defined]
    parameter.weight_loader = lambda tensor, part: weight_loader(parameter, tensor, part)  # type: ignore[attr-defined]
    return parameter


def copy_whole(parameter: nn.Parameter, tensor: Weight, part: str | None) -> None:
    """The weight_loader of a parameter that the checkpoint stores as it is."""
    if tensor.shape != parameter.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} does not fit {tuple(parameter.shape)}")
    parameter.data.copy_(dense(tensor))


class Linear(nn.Module):
    """y = x W^T + b. Subclasses create weight [out, in] and bias [out] or None, and say how they load."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Tensor | None = None
    int4: PackedInt4 | None = None
    native: layout.NativeInt4 | None = None  # for models/native, where that decodes
    keeps_int4: bool = False  # rows in 4 bits until pack_weight, also where this module has no product for them
    few_rows: FewRows | None = None  # kernels for products of few rows, where there are any
    is_gated: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._int4_rows: list[tuple[int, Int4Matrix]] = []  # (first row, the rows), of what has been loaded

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.int4 is not None and x.shape[0] <= INT4_MAX_ROWS:
            return int4_linear(x, self.int4, self.bias)
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        if self.few_rows is not None and self.few_rows.takes(x.shape[0], normed=False):
            return self.few_rows(x)[0]
        return F.linear(x, self.weight, self.bias)

    def put(self, x: Tensor, out: Tensor) -> Tensor:
        """forward(x) into `out` [T, out], contiguous and of x's type; returns it. For layers of a card, which are never
        packed."""
        assert self.int4 is None and self.packed is None
        if self.few_rows is not None and self.few_rows.takes(x.shape[0], normed=False):
            return self.few_rows(x, out=out)[0]
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def copy_rows(self, share: Tensor | Int4Matrix, parameter: nn.Parameter, first: int = 0) -> None:
        """Fill the parameter's rows from `first` on."""
        if isinstance(share, Int4Matrix) and (self.keeps_int4 or can_pack_int4(parameter)):
            self._int4_rows.append((first, share))
        parameter.data.narrow(0, first, share.shape[0]).copy_(dense(share))

    def is_int4(self) -> bool:
        """Before pack_weight: whether the weight came in 4 bits, and whole."""
        return sum(rows.shape[0] for _, rows in self._int4_rows) == self.weight.shape[0]

    def pack_weight(self, native: bool = False) -> None:
        """Once loaded: moves the weight into the layouts that are fastest here, where there are any. native: few rows
        are multiplied by models/native."""
        if self.is_int4():
            matrix = Int4Matrix.stack([rows for _, rows in sorted(self._int4_rows, key=lambda item: item[0])])
            if native:
                self.native = layout.NativeInt4.of(matrix)
            elif can_pack_int4(self.weight):
                self.int4 = pack_int4(matrix)
        self._int4_rows = []
        kernel = kernels.load("few_rows", self.weight.device) if self.weight.dtype != torch.float32 else None
        if kernel is not None:
            self.few_rows = kernel.FewRows(self.weight, self.bias, gated=self.is_gated)
        if can_pack(self.weight):
            self.pack_dense()
            self.release_weight()

    def pack_dense(self) -> None:
        self.packed = pack(self.weight)

    def release_weight(self) -> None:
        """Frees the unpacked weight, which nothing reads any more."""
        self.weight.data = self.weight.data.new_empty(0)


class ColumnLinear(Linear):
    """A Linear with the rows of W cut into `parts`; a rank holds a share of each."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(part.rows for part in parts)
        self._parts = {part.name: part for part in parts}
        names = tuple(self._parts)
        self.weight = new_parameter((self.out_features, in_features), dtype, device, self._load, names)
        self.bias = new_parameter((self.out_features,), dtype, device, self._load, names) if bias else None

    def _load(self, parameter: nn.Parameter, tensor: Weight, name: str | None) -> None:
        part = self._parts[name]
        expected = (part.total, *parameter.shape[1:])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"shape {tuple(tensor.shape)} does not fit {expected}")
        self.copy_rows(tensor.narrow(0, part.start, part.rows), parameter, part.offset)


class MergedLinear(ColumnLinear):
    """Several matrices with the same input as one product; the outputs lie side by side."""

    def __init__(
        self,
        in_features: int,
        sizes: dict[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        parts, offset = [], 0
        for name, total in sizes.items():
            rows = divide(total, tp_size, name)
            parts.append(Part(name, total, tp_rank * rows, rows, offset))
            offset += rows
        super().__init__(in_features, parts, bias, dtype, device)


class GateUpLinear(MergedLinear):
    """gate_proj and up_proj, ending in SwiGLU's product: x [T, hidden] -> silu(gate(x)) * up(x) of
    [T, intermediate / tp_size]."""

    is_gated = True
    packed_halves: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None

    def __init__(self, hidden: int, intermediate: int, bias: bool, dtype: torch.dtype, device: torch.device,
                 tp_rank: int = 0, tp_size: int = 1) -> None:  # fmt: skip
        sizes = {"gate_proj": intermediate, "up_proj": intermediate}
        super().__init__(hidden, sizes, bias, dtype, device, tp_rank, tp_size)
        kernel = kernels.load("silu_mul", device)
        self._silu_mul = kernel.silu_mul if kernel is not None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed_halves is not None and (self.int4 is None or x.shape[0] > INT4_MAX_ROWS):
            return packed_silu_mul(x, *self.packed_halves)
        if self.few_rows is not None and self.few_rows.takes(x.shape[0], normed=False):
            return self.few_rows(x)[0]
        gate_up = super().forward(x)
        if self._silu_mul is not None:
            return self._silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def pack_dense(self) -> None:
        weights = self.weight.chunk(2)
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        gate, up = ((pack(weight), bias) for weight, bias in zip(weights, biases, strict=True))
        self.packed_halves = gate, up


class QKVLinear(ColumnLinear):
    """q_proj, k_proj and v_proj: [T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim] of this rank.

    Query heads are split evenly over the ranks. KV heads are, too, or, when ranks exceed them, each is
    replicated on tp_size / num_kv_heads neighbouring ranks.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.num_heads = divide(num_heads, tp_size, "query heads")
        if tp_size > num_kv_heads:
            replicas = divide(tp_size, num_kv_heads, "ranks over KV heads")
            self.num_kv_heads, kv_start = 1, tp_rank // replicas
        else:
            self.num_kv_heads = divide(num_kv_heads, tp_size, "KV heads")
            kv_start = tp_rank * self.num_kv_heads
        q_rows, kv_rows = self.num_heads * head_dim, self.num_kv_heads * head_dim
        kv_total = num_kv_heads * head_dim
        parts = (
            Part("q_proj", num_heads * head_dim, tp_rank * q_rows, q_rows, 0),
            Part("k_proj", kv_total, kv_start * head_dim, kv_rows, q_rows),
            Part("v_proj", kv_total, kv_start * head_dim, kv_rows, q_rows + kv_rows),
        )
        super().__init__(hidden, parts, bias, dtype, device)


class RowLinear(Linear):
    """A Linear with the columns of W split over the ranks: every rank's y is a summand of the whole, which AllReduce
    (parallel.py) adds up.

    Only rank 0 keeps the bias, so that the sum over ranks adds it once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.total = in_features
        self.in_features = divide(in_features, tp_size, "input features")
        self.start = tp_rank * self.in_features
        self.adds_bias = tp_rank == 0
        self.weight = new_parameter((out_features, self.in_features), dtype, device, self._load)
        self.bias = new_parameter((out_features,), dtype, device, self._load_bias) if bias else None

    def _load(self, parameter: nn.Parameter, tensor: Weight, part: str | None) -> None:
        expected = (parameter.shape[0], self.total)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"shape {tuple(tensor.shape)} does not fit {expected}")
        self.copy_rows(tensor.narrow(1, self.start, self.in_features), parameter)

    def _load_bias(self, parameter: nn.Parameter, tensor: Weight, part: str | None) -> None:
        copy_whole(parameter, tensor, part)
        if not self.adds_bias:
            parameter.data.zero_()


def divide(total: int, parts: int, what: str) -> int:
    """total / parts; ValueError when it does not come out even."""
    if total % parts:
        raise ValueError(f"{total} {what} do not divide evenly by {parts}")
    return total // parts
