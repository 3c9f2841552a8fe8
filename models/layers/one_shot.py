"""OneShot: sums over the ranks in one kernel, for messages so small that the time of an exchange is all latency.

Every rank puts its summand into memory that the others can read over NVLink; a kernel waits until all have done so, and
then each rank adds up all of them by itself, in the order of ranks: so what is replicated stays equal in every bit. An
exchange in rings or trees passes several times between the cards instead. The kernel is PyTorch's
(torch.ops.symm_mem): its signals are back at zero when it ends, so a graph that holds it can be replayed at will.

Its variant that copies the summand by itself is not used: it signals before all of its threads have copied. Here the
product before writes the summand to its place, so there is nothing to copy.

NVLink multicast is not used, and a rank's environment switches it off (engine/rank.py).
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.layers.parallel import AllReduce, any_rank

logger = logging.getLogger("pageturn.engine")

# Bytes of the largest message, by the number of ranks: every rank reads all of every other one's.
_MOST_BYTES = {2: 2**20, 3: 2**19, 4: 2**19}
_MOST_BYTES_OF_MANY = 2**18
_ALIGNMENT = 16  # bytes that the kernel moves at once


class OneShot:
    """Sums of [T, width] over the ranks. buffer: as many bytes as the largest message, which the others can read."""

    def __init__(self, buffer: Tensor, width: int, group_name: str) -> None:
        self._buffer = buffer
        self._width = width
        self._group_name = group_name
        self._is_aligned = width * buffer.element_size() % _ALIGNMENT == 0

    def room(self, rows: int) -> Tensor | None:
        """Where a summand of so many rows is to be put, [rows, width], before sum(); None where it is too large."""
        size = rows * self._width
        if size > self._buffer.numel() or not self._is_aligned:
            return None
        return self._buffer[:size].view(rows, self._width)

    def sum(self, summand: Tensor) -> Tensor:
        """Of what stands in room() on every rank; a new tensor. When it is there, all have read the summand."""
        out = torch.empty_like(summand)
        return torch.ops.symm_mem.one_shot_all_reduce_out(summand, "sum", self._group_name, out)


def install(model: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Let the model's sums of small messages be taken in one shot; called by every rank. Returns what keeps them from
    it, on any rank; the sums are NCCL's then."""
    layers = [module for module in model.modules() if isinstance(module, AllReduce)]
    why = _why_not(dtype, device)
    if any_rank(why is not None, device):
        return why or "another rank cannot"
    try:
        one_shot = _set_up(width, dtype, device)
        why = None if _adds_up(one_shot, width, dtype, device) else "a trial gave a wrong sum"
    except Exception as error:  # of drivers, of permissions to share memory: whatever it is, NCCL serves
        one_shot, why = None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if any_rank(why is not None, device):
        return why or "another rank cannot"
    for layer in layers:
        layer.one_shot = one_shot
    return None


def _why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """What can be said beforehand; later a rank that gives up would let the others wait for it."""
    if device.type != "cuda":
        return f"a {device.type} has no peers"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the kernel does not add {str(dtype).removeprefix('torch.')}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has no kernel for it"
    others = [card for card in range(dist.get_world_size()) if card != device.index]
    unreachable = [card for card in others if not torch.cuda.can_device_access_peer(device.index, card)]
    return f"cuda:{device.index} cannot read cuda:{unreachable[0]}" if unreachable else None


def _set_up(width: int, dtype: torch.dtype, device: torch.device) -> OneShot:
    from torch.distributed import _symmetric_memory as symmetric

    size = _MOST_BYTES.get(dist.get_world_size(), _MOST_BYTES_OF_MANY) // dtype.itemsize
    buffer = symmetric.empty(size, dtype=dtype, device=device)
    group = dist.group.WORLD
    assert group is not None, "the process has joined its group"
    symmetric.rendezvous(buffer, group.group_name)
    return OneShot(buffer, width, group.group_name)


def _adds_up(one_shot: OneShot, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether sums are right: of one row, of many, and with other summands in the same place, which the one before must
    have been read from by then. The summands are small integers, which every type holds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = True
    for turn, rows in enumerate([1, 2, 64, 1, 64, 64]):
        room = one_shot.room(rows)
        if room is None:
            continue
        index = torch.arange(rows * width, device=device).view(rows, width) % 7
        room.copy_(index + rank + turn)
        expected = ranks * (index + turn) + ranks * (ranks - 1) // 2
        right &= torch.equal(one_shot.sum(room), expected.to(dtype))
    return right
