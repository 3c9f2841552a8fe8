"""Which kernel multiplies a weight with few rows, and up to how many rows one is faster than a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels import gemv, skinny
from models.kernels.rmsnorm import Norm
from models.kernels.skinny import Added

# A product with as many rows of W is at the memory's rate without us.
_MOST_SKINNY_OUTPUTS = 65_536
# In which a sum has room before its norm is taken (see skinny.add_skinny).
_WIDE_TYPES = (torch.bfloat16, torch.float32)


class FewRows:
    """Products of one weight [N, K], and bias [N] or None, in half precision. gated: see gemv.gemv.

    Up to gemv.MAX_ROWS rows every program takes the norm of x anew, which costs it nothing. With more a norm is begun
    where x is made: add() in front of a norm leaves what the product behind it takes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._gated = gated
        self._arrived = skinny.counters(weight)
        is_skinny = weight.shape[0] <= _MOST_SKINNY_OUTPUTS and weight.shape[1] % 64 == 0
        self.max_rows = skinny.MAX_ROWS if is_skinny else gemv.MAX_ROWS

    def takes(self, rows: int, *, normed: bool) -> bool:
        """Whether to call this with x of so many rows, and with a norm."""
        return 0 < rows <= (gemv.MAX_ROWS if normed else self.max_rows)

    def takes_added(self, rows: int) -> bool:
        """Whether add() is there for so many rows, and the call with what it leaves."""
        return gemv.MAX_ROWS < rows <= self.max_rows and self._weight.dtype in _WIDE_TYPES

    def add(self, x: Tensor, norm: Norm) -> Added:
        """The product and norm.residual, added, and the norm of that, begun."""
        return skinny.add_skinny(x, self._weight, self._bias, self._arrived, norm)

    def __call__(self, x: Tensor | Added, norm: Norm | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(y, sum) as gemv.gemv has them, of an Added one that of its norm. out: y's memory, contiguous; None: a new
        tensor."""
        if isinstance(x, Added):
            return skinny.skinny(x, self._weight, self._bias, self._arrived, gated=self._gated, out=out), x.total
        if x.shape[0] <= gemv.MAX_ROWS:
            return gemv.gemv(x, self._weight, self._bias, norm=norm, gated=self._gated, out=out)
        return skinny.skinny(x, self._weight, self._bias, self._arrived, gated=self._gated, out=out), x
