"""Which sums over ranks are taken in one shot, and that the product before puts its summand where it belongs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import kernels
from models.layers import one_shot, parallel
from models.layers.layernorm import Normed, RMSNorm
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


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is rank 1 of two that can do everything."""
    monkeypatch.setattr(one_shot, "any_rank", lambda flag, device: flag)
    monkeypatch.setattr(one_shot, "_why_not", lambda dtype, device: None)
    monkeypatch.setattr(one_shot, "_group", lambda: SimpleNamespace(group_name="ours"))
    monkeypatch.setattr(one_shot, "_shared", lambda size, dtype, device: (torch.zeros(size, dtype=dtype), None))
    monkeypatch.setattr(one_shot.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(one_shot.dist, "get_world_size", lambda: 2)


def test_what_fails_on_one_rank_is_used_on_none(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the other rank is fine at first, and then cannot map the memory."""
    told: list[bool] = []

    def any_rank(flag: bool, device: torch.device) -> bool:
        told.append(flag)
        return flag or len(told) == 2

    layer = AllReduce(0, 2)
    monkeypatch.setattr(one_shot, "any_rank", any_rank)
    monkeypatch.setattr(one_shot, "_adds_up", lambda *args: True)
    assert one_shot.install(layer, 8, torch.float32, CPU) == "NCCL's or gloo's (no one shot: another rank cannot)"
    assert layer.one_shot is None and told == [False, False]
    how = one_shot.install(layer, 8, torch.float32, CPU)
    assert how == "one shot, without norms (triton compiles nothing for a cpu); large ones by NCCL"
    assert layer.one_shot is not None and layer.sum_norm is None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_that_adds_up_wrongly_is_not_used(
    wrong: bool, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = AllReduce(0, 2)

    def kernel(summand: Tensor, how: str, group: str, out: Tensor) -> Tensor:
        """The other rank, 0, has one less in every place."""
        torch.add(summand, summand - 1, out=out)
        return out.add_(wrong and len(out) == 64)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", kernel, raising=False)
    how = one_shot.install(layer, 8, torch.float32, CPU)
    assert ("a trial gave a wrong sum" in how) == wrong
    assert (layer.one_shot is None) == wrong


@pytest.mark.parametrize("fails", ["at first", "in the trial", "never"])
def test_layers_take_their_places_for_sums_with_norms_by_turns(
    fails: str, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel fails, by an exception, they have none; here it is a stand-in."""
    launches: list[int] = []

    class Kernel:
        Ranks = staticmethod(lambda *_: None)

        @staticmethod
        def Norm(weight: Tensor, eps: float, residual: Tensor) -> SimpleNamespace:
            return SimpleNamespace(weight=weight, eps=eps, residual=residual)

        @staticmethod
        def sum_norm(ranks: Any, rows: int, norm: Any, patience: int) -> tuple[Tensor, Tensor]:
            assert patience > 0
            launches.append(rows)
            if fails == "at first" or (fails == "in the trial" and len(launches) == 4):
                raise RuntimeError("out of registers\nand more")
            summand = places[len(launches) % 2 == 1][: rows * 8].view(rows, 8)  # the compiling launch is of the second
            total = summand + (summand - 1) + norm.residual
            return F.rms_norm(total, (8,), norm.weight, norm.eps), total

    places: list[Tensor] = []

    def shared(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        buffer = torch.zeros(size, dtype=dtype)
        if dtype == torch.float32:
            places.append(buffer)
        return buffer, torch.tensor([0, buffer.data_ptr()])

    monkeypatch.setattr(one_shot, "_shared", shared)
    monkeypatch.setattr(one_shot, "_one_shot", lambda *args: SimpleNamespace(room=lambda rows: None))
    monkeypatch.setattr(kernels, "why_unusable", lambda device_type: None)
    monkeypatch.setattr(kernels, "load", lambda name, device: Kernel if name == "sum_norm" else None)
    layers = nn.ModuleList(AllReduce(1, 2) for _ in range(4))
    how = one_shot.install(layers, 8, torch.float32, CPU)
    if fails != "never":
        assert how == "one shot, without norms (RuntimeError: out of registers); large ones by NCCL"
        assert all(layer.sum_norm is None for layer in layers)
        return
    assert how == "one shot, with the norm behind them; large ones by NCCL"
    first, second, third, fourth = (layer.sum_norm for layer in layers)
    assert first is third and second is fourth and first is not second
    assert first.room(3).data_ptr() == places[0].data_ptr() and second.room(3).data_ptr() == places[1].data_ptr()
    assert first.room(8192) is not None and first.room(8193) is None


def test_a_norm_behind_a_small_sum_is_taken_with_it(library: list[tuple[int, ...]]) -> None:
    """By a stand-in for the kernel; larger sums are the library's, and their norms come later."""
    torch.manual_seed(4)
    linear = RowLinear(24, 8, False, torch.float32, CPU, 0, 2)
    following = RowLinear(8, 6, False, torch.float32, CPU)
    norm = RMSNorm(8, 1e-5, torch.float32, CPU)
    for parameter in (linear.weight, following.weight, norm.weight):
        torch.nn.init.normal_(parameter)
    place = torch.zeros(4, 8)

    class Sums:
        def room(self, rows: int) -> Tensor | None:
            return place[:rows] if rows <= 4 else None

        def __call__(self, rows: int, norm: RMSNorm, residual: Tensor) -> Normed:
            total = 2 * place[:rows] + residual
            return Normed(total, norm(total))

    layer = AllReduce(0, 2)
    layer.sum_norm = Sums()  # type: ignore[assignment]
    for rows in (1, 4, 5):
        x, residual = torch.randn(rows, 12), torch.randn(rows, 8)
        y, total = norm.into(following, layer(linear, x, norm, residual), residual)
        expected = 2 * F.linear(x, linear.weight) + residual
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(y, F.linear(norm(expected), following.weight))
    assert library == [(5, 8)] and layer.num_calls == 3
