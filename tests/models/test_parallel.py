"""What ranks tell each other, as far as it needs no second rank; the rest: tests/engine/test_tensor_parallel.py."""

from __future__ import annotations

import pytest
import torch

from models.layers.parallel import _copy_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "wide", "at"), [(64, 128, 64), (64, 128, 0), (63, 128, 0), (64, 127, 0), (64, 128, 3)]
)
def test_rows_are_copied_whole_and_nothing_beside_them(width: int, wide: int, at: int, dtype: torch.dtype) -> None:
    """However they stand: with a width, a distance or a beginning that no wide element fits, too."""
    source = torch.randn(5, 80).to(dtype)[:, :width]
    source[2, 1] = torch.nan
    whole = torch.full((5, wide), 7.0, dtype=dtype)
    place = whole[:, at : at + width]
    _copy_rows(source, place)
    torch.testing.assert_close(place, source, rtol=0, atol=0, equal_nan=True)
    place.fill_(7)
    assert whole.eq(7).all()


def test_rows_of_another_type_are_converted() -> None:
    source = torch.randn(5, 64)
    place = torch.zeros(5, 64, dtype=torch.int32)
    _copy_rows(source * 9, place)
    assert torch.equal(place, (source * 9).to(torch.int32)) and place.any()
