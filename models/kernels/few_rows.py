"""Which kernel multiplies a weight with few rows, and up to how many rows one is faster than a matrix product."""

from __future__ import annotations

from torch import Tensor

from models.kernels import gemv, skinny
from models.kernels.rmsnorm import Norm

# A product with as many rows of W is at the memory's rate without us.
_MOST_SKINNY_OUTPUTS = 65_536


class FewRows:
    """Products of one weight [N, K], and bias [N] or None, in half precision. gated: see gemv.gemv.

    Up to gemv.MAX_ROWS rows every program takes the norm of x anew, which costs it nothing; tensor cores want x as it
    lies in memory, and a norm on the way to them costs three times the product (measured on an H200).
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

    def __call__(self, x: Tensor, norm: Norm | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(y, sum) as gemv.gemv has them. out: y's memory, contiguous; None: a new tensor."""
        if x.shape[0] <= gemv.MAX_ROWS:
            return gemv.gemv(x, self._weight, self._bias, norm=norm, gated=self._gated, out=out)
        return skinny.skinny(x, self._weight, self._bias, self._arrived, gated=self._gated, out=out), x
