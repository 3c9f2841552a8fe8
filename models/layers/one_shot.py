"""OneShot and SumNorm: sums over the ranks in one kernel, for messages so small that the time of an exchange is all
latency. SumNorm takes the norm behind the sum along.

Every rank puts its summand into memory that the others can read over NVLink; a kernel waits until all have done so, and
then each rank adds up all of them by itself, in the order of ranks: so what is replicated stays equal in every bit. An
exchange in rings or trees passes several times between the cards instead. OneShot's kernel is PyTorch's
(torch.ops.symm_mem): its signals are back at zero when it ends, so a graph that holds it can be replayed at will.
SumNorm's is our own (models/kernels/sum_norm.py).

PyTorch's variant that copies the summand by itself is not used: it signals before all of its threads have copied. Here
the product before writes the summand to its place, so there is nothing to copy.

NVLink multicast is not used, and a rank's environment switches it off (engine/rank.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.layers.layernorm import Normed, RMSNorm
from models.layers.parallel import AllReduce, any_rank

if TYPE_CHECKING:  # its import needs triton
    from models.kernels.sum_norm import Ranks

T = TypeVar("T")

# Bytes of the largest message, by the number of ranks: every rank reads all of every other one's.
_MOST_BYTES = {2: 2**20, 3: 2**19, 4: 2**19}
_MOST_BYTES_OF_MANY = 2**18
# Likewise with a norm. Of two ranks each reads no more than a ring would pass it, and the norm comes for nothing.
_MOST_NORMED_BYTES = _MOST_BYTES | {2: 2**24}
_ALIGNMENT = 16  # bytes that the kernels move at once
_MOST_NORMED_ROWS = 8192  # each of which tells the other ranks by itself
_PATIENCE = 5_000_000  # looks at what another rank tells, in a trial: some seconds


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


class SumNorm:
    """RMSNorms of the residual and a sum over the ranks. place: a rank's summands, as many as `ranks` has room for."""

    def __init__(self, kernel: Any, place: Tensor, ranks: Ranks) -> None:
        self._kernel = kernel
        self._place = place
        self._ranks = ranks

    def room(self, rows: int) -> Tensor | None:
        """Where a summand of so many rows is to be put, [rows, width], before the call; None where it is too large."""
        return self._place[:rows] if rows <= self._place.shape[0] else None

    def __call__(self, rows: int, norm: RMSNorm, residual: Tensor, patience: int = 0) -> Normed:
        """Of what stands in room() on every rank, and the residual [rows, width]. patience: see the kernel."""
        begun = self._kernel.Norm(norm.weight, norm.eps, residual)
        normed, total = self._kernel.sum_norm(self._ranks, rows, begun, patience)
        return Normed(total, normed)


def install(model: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Let the model's sums of small messages be taken in one shot; called by every rank. Returns what is used, and what
    keeps them from more, on any rank; the other sums are NCCL's."""
    layers = [module for module in model.modules() if isinstance(module, AllReduce)]
    one_shot, why = _agreed(_why_not(dtype, device), lambda: _one_shot(width, dtype, device), device)
    if one_shot is None:
        return f"NCCL's or gloo's (no one shot: {why})"
    pair, why = _tried_sum_norms(width, dtype, device)
    for i, layer in enumerate(layers):
        layer.one_shot = one_shot
        # By turns: until a layer writes to its place again, the other's exchange has told that its summand was read.
        layer.sum_norm = pair[i % 2] if pair is not None else None
    how = "with the norm behind them" if pair is not None else f"without norms ({why})"
    return f"one shot, {how}; large ones by NCCL"


def _agreed(why: str | None, build: Callable[[], T], device: torch.device) -> tuple[T | None, str | None]:
    """(what build() returns, None), or (None, what keeps a rank from it). Where one rank cannot, none does: nobody
    begins with what others would have to take part in, nor keeps it."""
    if any_rank(why is not None, device):
        return None, why or "another rank cannot"
    built: T | None = None
    try:
        built = build()
    except Exception as error:  # of drivers, of permissions to share memory: whatever it is, NCCL serves
        first_line = str(error).strip().partition("\n")[0]
        why = first_line if isinstance(error, _WrongSum) else f"{type(error).__name__}: {first_line}"
    if any_rank(why is not None, device):
        return None, why or "another rank cannot"
    return built, None


class _WrongSum(Exception):
    pass


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


def _one_shot(width: int, dtype: torch.dtype, device: torch.device) -> OneShot:
    size = _most_bytes(_MOST_BYTES) // dtype.itemsize
    buffer, _ = _shared(size, dtype, device)
    one_shot = OneShot(buffer, width, _group().group_name)
    if not _adds_up(one_shot, width, dtype, device):
        raise _WrongSum("a trial gave a wrong sum")
    return one_shot


def _adds_up(one_shot: OneShot, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether sums are right: of one row, of many, and with other summands in the same place, which the one before must
    have been read from by then."""
    right = True
    for turn, rows in enumerate([1, 2, 64, 1, 64, 64]):
        room = one_shot.room(rows)
        if room is None:
            continue
        summands = _summands(rows, width, turn, dtype, device)
        room.copy_(summands[dist.get_rank()])
        right &= torch.equal(one_shot.sum(room), sum(summands[1:], summands[0]))
    return right


def _summands(rows: int, width: int, turn: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """[rows, width] of every rank: small integers, whose sums every type holds, and others in every turn."""
    index = torch.arange(rows * width, device=device).view(rows, width) % 7
    return [(index + rank + turn).to(dtype) for rank in range(dist.get_world_size())]


def _tried_sum_norms(
    width: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[SumNorm, SumNorm] | None, str | None]:
    """As _agreed() returns them."""
    pair, why = _agreed(_why_no_norm(width, dtype, device), lambda: _sum_norms(width, dtype, device), device)
    if pair is None:
        return None, why
    trial = _NormTrial(width, dtype, device)
    # First the ranks compile it, each in its own time: what comes of that may be wrong.
    _, why = _agreed(None, lambda: trial.is_right(pair[1], 1, 0), device)
    _, why = _agreed(why, lambda: trial.run(pair), device)
    return (pair if why is None else None), why


def _why_no_norm(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    why = kernels.why_unusable(device.type)
    if why is None and width * dtype.itemsize % _ALIGNMENT:
        why = f"rows of {width} are not aligned"
    return why


def _sum_norms(width: int, dtype: torch.dtype, device: torch.device) -> tuple[SumNorm, SumNorm]:
    """Two that share their flags, and have places of their own."""
    kernel = kernels.load("sum_norm", device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows = min(_MOST_NORMED_ROWS, _most_bytes(_MOST_NORMED_BYTES) // (width * dtype.itemsize))
    told, flags = _shared(rows * num_ranks, torch.int32, device)
    told.zero_()
    exchanges = torch.zeros(rows, dtype=torch.int32, device=device)
    pair = []
    for _ in range(2):
        place, places = _shared(rows * width, dtype, device)
        pair.append(SumNorm(kernel, place.view(rows, width), kernel.Ranks(rank, places, flags, told, exchanges)))
    return pair[0], pair[1]


class _NormTrial:
    """Likewise of SumNorm's, and norms near enough. Who waits for another rank in vain gets NaN."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width = width
        self._norm = RMSNorm(width, 1e-5, dtype, device)
        self._norm.weight.data.copy_(torch.arange(width, device=device) % 3 + 1)

    def run(self, pair: tuple[SumNorm, SumNorm]) -> None:
        right = True
        for turn, rows in enumerate([1, 2, 64, 1, 64, 64, 64, 300, 300, 1100]):
            if pair[turn % 2].room(rows) is not None:
                right &= self.is_right(pair[turn % 2], rows, turn)
        if not right:
            raise _WrongSum("a trial gave a wrong sum")

    def is_right(self, sum_norm: SumNorm, rows: int, turn: int) -> bool:
        room, weight = sum_norm.room(rows), self._norm.weight
        assert room is not None
        summands = _summands(rows, self._width, turn, weight.dtype, weight.device)
        residual = summands[0] % 3
        room.copy_(summands[dist.get_rank()])
        found = sum_norm(rows, self._norm, residual, _PATIENCE)
        total = sum(summands, residual)
        normed = F.rms_norm(total.float(), (self._width,), weight.float(), self._norm.eps).to(weight.dtype)
        return torch.equal(found.total, total) and torch.allclose(found.normed, normed, rtol=0.02)


def _most_bytes(by_ranks: dict[int, int]) -> int:
    return by_ranks.get(dist.get_world_size(), _MOST_BYTES_OF_MANY)


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the process has joined its group"
    return group


def _shared(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(so many elements that every rank can read and write, int64 [ranks]: the address of each rank's)."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer = symmetric.empty(size, dtype=dtype, device=device)
    memory = symmetric.rendezvous(buffer, _group().group_name)
    all_ranks = [memory.get_buffer(rank, (size,), dtype).data_ptr() for rank in range(dist.get_world_size())]
    return buffer, torch.tensor(all_ranks, dtype=torch.int64, device=device)
