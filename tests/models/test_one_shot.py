"""Which sums over ranks are taken in one shot, and that the product before puts its summand where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import one_shot, parallel
from models.layers.linear import RowLinear
from models.layers.one_shot import OneShot
from models.layers.parallel import AllReduce

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that were summed by torch.distributed, where each of two ranks has the same."""
    summed: list[tuple[int, ...]] = []

    def all_reduce(x: Tensor, **_: Any) -> None:
        summed.append(tuple(x.shape))
        x.mul_(2)

    monkeypatch.setattr(parallel.dist, "all_reduce", all_reduce)
    return summed


@pytest.fixture
def in_one_shot(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Likewise by the kernel."""
    summed: list[tuple[int, ...]] = []

    def kernel(summand: Tensor, how: str, group: str, out: Tensor) -> Tensor:
        assert how == "sum" and group == "ours" and out.data_ptr() != summand.data_ptr()
        summed.append(tuple(summand.shape))
        return torch.add(summand, summand, out=out)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", kernel, raising=False)
    return summed


@pytest.mark.parametrize("bias", [False, True])
def test_small_sums_are_taken_in_one_shot_and_large_ones_by_the_library(
    bias: bool, library: list[tuple[int, ...]], in_one_shot: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(3)
    linear = RowLinear(24, 8, bias, torch.float32, CPU, 0, 2)
    torch.nn.init.normal_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    layer = AllReduce(0, 2)
    buffer = torch.full((40,), 9.0)
    layer.one_shot = OneShot(buffer, 8, "ours")
    for rows in (1, 5, 6, 0, 2):
        x = torch.randn(rows, 12)
        y = layer(linear, x)
        torch.testing.assert_close(y, 2 * F.linear(x, linear.weight, linear.bias) if rows else y)
        assert y.shape == (rows, 8) and not buffer.data_ptr() <= y.data_ptr() < buffer.data_ptr() + 160
    assert in_one_shot == [(1, 8), (5, 8), (2, 8)]
    assert library == [(6, 8)]
    assert layer.num_calls == 4, "a step without rows has no exchange"


def test_rows_that_the_kernel_cannot_move_whole_are_the_librarys() -> None:
    assert OneShot(torch.zeros(64, dtype=torch.bfloat16), 6, "ours").room(1) is None
    assert OneShot(torch.zeros(64, dtype=torch.bfloat16), 8, "ours").room(8) is not None


def test_one_rank_sums_nothing(library: list[tuple[int, ...]]) -> None:
    linear = RowLinear(4, 8, False, torch.float32, CPU)
    torch.nn.init.ones_(linear.weight)
    assert torch.equal(AllReduce()(linear, torch.ones(3, 4)), torch.full((3, 8), 4.0))
    assert library == []


def test_what_fails_on_one_rank_is_used_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the other rank is fine at first, and then cannot map the memory."""
    told: list[bool] = []

    def any_rank(flag: bool, device: torch.device) -> bool:
        told.append(flag)
        return len(told) == 2

    layer = AllReduce(0, 2)
    monkeypatch.setattr(one_shot, "any_rank", any_rank)
    monkeypatch.setattr(one_shot, "_why_not", lambda dtype, device: None)
    monkeypatch.setattr(one_shot, "_set_up", lambda width, dtype, device: OneShot(torch.zeros(64), 8, "ours"))
    monkeypatch.setattr(one_shot, "_adds_up", lambda *args: True)
    assert one_shot.install(layer, 8, torch.float32, CPU) == "another rank cannot"
    assert layer.one_shot is None and told == [False, False]
    assert one_shot.install(layer, 8, torch.float32, CPU) is None
    assert layer.one_shot is not None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_that_adds_up_wrongly_is_not_used(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AllReduce(0, 2)
    monkeypatch.setattr(one_shot, "any_rank", lambda flag, device: flag)
    monkeypatch.setattr(one_shot, "_why_not", lambda dtype, device: None)
    monkeypatch.setattr(one_shot, "_set_up", lambda width, dtype, device: OneShot(torch.zeros(8 * 64), 8, "ours"))
    monkeypatch.setattr(one_shot.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(one_shot.dist, "get_world_size", lambda: 2)

    def kernel(summand: Tensor, how: str, group: str, out: Tensor) -> Tensor:
        """The other rank, 0, has one less in every place."""
        torch.add(summand, summand - 1, out=out)
        return out.add_(wrong and len(out) == 64)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", kernel, raising=False)
    why = one_shot.install(layer, 8, torch.float32, CPU)
    assert why == ("a trial gave a wrong sum" if wrong else None)
    assert (layer.one_shot is None) == wrong
