"""The token embedding and the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.int4 import dense
from models.layers.linear import Linear, Weight, copy_whole, new_parameter
from models.layers.packed import pack


class Embedding(nn.Module):
    """Token ids int64 [T] -> hidden states [T, hidden]. Whole on every rank: a lookup costs nothing, and a sharded
    one would cost an exchange."""

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter((vocab_size, hidden), dtype, device, copy_whole)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(Linear):
    """Hidden states [R, hidden] -> logits float32 [R, vocab]. Tied to an embedding it shares that weight.

    Of several ranks each computes its shard of the vocabulary (see GatherVocab): a quarter of what a small model
    reads in a decode is its head, and to send a row of logits costs less than to read all of it on every rank.

    A half-precision product on a CPU ends in half precision: logits near 25 come in steps of 0.125, and the best
    tokens of a small model lie closer than that. So the products of the likeliest tokens are taken again in fp32;
    to do it for all would read twice the bytes of what is the largest matrix of a small model.
    """

    num_exact = 64

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.bias = None
        self.vocab_size = vocab_size
        shard_size = -(-vocab_size // tp_size)
        self.start = min(tp_rank * shard_size, vocab_size)
        self.rows = min(shard_size, vocab_size - self.start)
        if tied_to is None:
            self.weight = new_parameter((self.rows, hidden), dtype, device, self._load)
        elif tp_size == 1:
            self.weight = tied_to.weight
        else:
            # A view, not a parameter of its own: it is filled with the embedding.
            self.weight = tied_to.weight.data.narrow(0, self.start, self.rows)  # type: ignore[assignment]

    @property
    def out_dtype(self) -> torch.dtype:
        """The type in which logits lose nothing: float32 where some are exact, otherwise that of the product."""
        return torch.float32 if self.weight.device.type == "cpu" else self.weight.dtype

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: [R, vocab] of out_dtype to be filled and returned; None: a new tensor, float32."""
        if out is not None and out.dtype == x.dtype:
            if self.few_rows is not None and self.few_rows.takes(x.shape[0], normed=False):
                return self.few_rows(x, out=out)[0]
            if self.is_plain(x.shape[0]):
                return torch.mm(x, self.weight.t(), out=out)
        product = super().forward(x)
        logits = product.float() if out is None else out.copy_(product)
        if x.device.type == "cpu" and x.dtype != torch.float32:
            likeliest = logits.topk(min(self.num_exact, logits.shape[1]), sorted=False).indices
            exact = torch.bmm(self.weight[likeliest].float(), x.float().unsqueeze(2)).squeeze(2)
            logits.scatter_(1, likeliest, exact)
        return logits

    def is_plain(self, rows: int) -> bool:
        """Whether forward() of so many is one product of matrices."""
        few = self.few_rows is not None and self.few_rows.takes(rows, normed=False)
        return self.int4 is None and self.packed is None and not few

    def _load(self, parameter: nn.Parameter, tensor: Weight, part: str | None) -> None:
        expected = (self.vocab_size, *parameter.shape[1:])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"shape {tuple(tensor.shape)} does not fit {expected}")
        share = tensor if self.rows == self.vocab_size else tensor.narrow(0, self.start, self.rows)
        parameter.data.copy_(dense(share))

    def pack_dense(self) -> None:
        self.packed = pack(self.weight, prompt_rows=False)

    def release_weight(self) -> None:
        """Keeps it: the embedding, where tied, and the exact products read it row by row."""
