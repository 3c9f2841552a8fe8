"""The token embedding and the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.linear import Linear, copy_whole, new_parameter
from models.layers.packed import can_pack, pack, packed_linear


class Embedding(nn.Module):
    """Token ids int64 [T] -> hidden states [T, hidden]."""

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter((vocab_size, hidden), dtype, device, copy_whole)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(Linear):
    """Hidden states [R, hidden] -> logits float32 [R, vocab]. Tied to an embedding it shares that weight.

    On a CPU half-precision weights are multiplied in fp32: a product that ends in bf16 would round logits near 25
    to steps of 0.125, and the best tokens of a small model lie closer than that.
    """

    weight_fp32: Tensor | None = None

    def __init__(
        self, vocab_size: int, hidden: int, dtype: torch.dtype, device: torch.device, tied_to: Embedding | None
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.bias = None
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            self.weight = new_parameter((vocab_size, hidden), dtype, device, copy_whole)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_linear(x.float(), self.packed, None)
        if self.weight_fp32 is not None:
            return F.linear(x.float(), self.weight_fp32)
        return F.linear(x, self.weight).float()

    def pack_weight(self) -> None:
        if self.weight.device.type != "cpu" or self.weight.dtype == torch.float32:
            return
        full = self.weight.float()
        if can_pack(full):
            self.packed = pack(full)
        else:
            self.weight_fp32 = full
        self.release_weight()

    def release_weight(self) -> None:
        if not self.tied:  # the embedding still reads it
            super().release_weight()
