"""What the ranks of a tensor-parallel model tell each other in a step. With one rank none of it does anything.

The group is torch.distributed's default one, which a rank's process joins before it runs the model. Two kinds of
exchange suffice: a sum wherever a matrix is split by columns, and the logits' way to rank 0, which samples.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Collective(nn.Module):
    """An exchange among all ranks. num_calls counts those that this rank has completed: ranks whose counts are
    equal stand at the same place of the model, and may go on together after a step that failed."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.num_calls = 0


class AllReduce(Collective):
    """The sum over ranks of what RowLinear leaves on each: x [T, hidden] -> x, on every rank, in place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_size > 1 and x.shape[0]:  # a step that samples nothing ends without a row, on every rank
            dist.all_reduce(x)
            self.num_calls += 1
        return x


class GatherVocab(Collective):
    """Logits [R, shard] of every rank's share of the vocabulary -> [R, vocab_size] on rank 0, None elsewhere.

    A shard is shard_size wide, on the last ranks perhaps less.
    """

    def __init__(self, vocab_size: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__(tp_rank, tp_size)
        self.vocab_size = vocab_size
        self.shard_size = -(-vocab_size // tp_size)

    def forward(self, logits: Tensor) -> Tensor | None:
        if self.tp_size == 1:
            return logits
        # A gather takes tensors of one shape.
        own = F.pad(logits, (0, self.shard_size - logits.shape[1])).contiguous()
        shards = [torch.empty_like(own) for _ in range(self.tp_size)] if self.tp_rank == 0 else None
        dist.gather(own, shards, dst=0)
        self.num_calls += 1
        return None if shards is None else torch.cat(shards, dim=1)[:, : self.vocab_size]
