"""What the ranks of a tensor-parallel model tell each other in a step. With one rank none of it does anything.

The group is torch.distributed's default one, which a rank's process joins before it runs the model. Three kinds of
exchange suffice: a sum wherever a matrix is split by columns, the logits' way to rank 0, which samples, and, in steps
that are captured, the way of what it drew to all. Every one of them may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.layers.layernorm import Hidden, RMSNorm
    from models.layers.linear import Linear
    from models.layers.one_shot import OneShot, SumNorm


class Collective(nn.Module):
    """An exchange among all ranks. num_calls counts those that this rank has completed: ranks whose counts are
    equal stand at the same place of the model, and may go on together after a step that failed."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.num_calls = 0


class AllReduce(Collective):
    """The sum over ranks of what a RowLinear leaves on each. For sums that they are faster for, if any: sum_norm, where
    a norm comes next, and one_shot."""

    one_shot: OneShot | None = None
    sum_norm: SumNorm | None = None

    def forward(self, linear: Linear, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Hidden:
        """x [T, in] -> linear(x) [T, out], added up, on every rank. norm: the one that comes next, of that and the
        residual, which may be begun or done already (RMSNorm.after, sum_norm)."""
        if self.tp_size == 1 and norm is not None and residual is not None:
            return norm.after(linear, x, residual)
        rows = x.shape[0]
        if self.tp_size == 1 or not rows:  # a step that samples nothing ends without a row, on every rank
            return linear(x)
        summed = self._sum(linear, x, rows, norm, residual)
        self.num_calls += 1
        return summed

    def _sum(self, linear: Linear, x: Tensor, rows: int, norm: RMSNorm | None, residual: Tensor | None) -> Hidden:
        if self.sum_norm is not None and norm is not None and residual is not None:
            room = self.sum_norm.room(rows)
            if room is not None:
                linear.put(x, room)
                return self.sum_norm(rows, norm, residual)
        if self.one_shot is not None:
            room = self.one_shot.room(rows)
            if room is not None:
                return self.one_shot.sum(linear.put(x, room))
        y = linear(x)
        dist.all_reduce(y)
        return y


class GatherVocab(Collective):
    """Logits [R, shard] of every rank's share of the vocabulary -> [R, vocab_size] on rank 0, None elsewhere.

    A shard is shard_size wide, on the last ranks perhaps less.
    """

    def __init__(self, vocab_size: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__(tp_rank, tp_size)
        self.vocab_size = vocab_size
        self.shard_size = -(-vocab_size // tp_size)

    def forward(self, logits: Tensor, out: Tensor | None = None) -> Tensor | None:
        """out: where they are to stand on rank 0, of the same type; None: in a new tensor."""
        # A gather takes tensors of one shape.
        own = F.pad(logits, (0, self.shard_size - logits.shape[1])).contiguous()
        shards = [torch.empty_like(own) for _ in range(self.tp_size)] if self.tp_rank == 0 else None
        dist.gather(own, shards, dst=0)
        self.num_calls += 1
        if shards is None:
            return None
        if out is None:
            return torch.cat(shards, dim=1)[:, : self.vocab_size]
        for shard, place in zip(shards, out.split(self.shard_size, dim=1), strict=False):  # of few ids some have none
            _copy_rows(shard[:, : place.shape[1]], place)
        return out


def _copy_rows(source: Tensor, place: Tensor) -> None:
    """place.copy_(source), of rows that stand apart from each other: PyTorch copies those element by
    element, so they go as wide elements where they are made of such."""
    width = torch.complex128.itemsize // source.itemsize
    parts = [(x.stride(0), x.storage_offset(), x.shape[1], x.data_ptr() // source.itemsize) for x in (source, place)]
    is_wide = source.stride(1) == place.stride(1) == 1 and not any(part % width for x in parts for part in x)
    if is_wide and source.dtype == place.dtype:
        source, place = source.view(torch.complex128), place.view(torch.complex128)
    place.copy_(source)


def broadcast_from_first(x: Tensor) -> None:
    """What rank 0 has in x, on every rank; in place."""
    dist.broadcast(x, src=0)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is so on any rank: the same answer on all of them. Waits for the device."""
    told = torch.tensor([int(flag)], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())
