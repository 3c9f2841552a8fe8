"""Sums over ranks with the norm behind them, against their reference. Collected as kernel_cases.py is.

Ranks are launches that share memory of one device. Where they cannot run at once, as in the interpreter, each is told
beforehand what the others would tell it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from models.kernels import sum_norm
from models.kernels.rmsnorm import Norm
from models.kernels.sum_norm import Ranks
from tests.models.kernel_cases import DEVICE, ELEMENTWISE_DTYPES, ON_CARD, close

MOST_ROWS = 9

in_all_types = pytest.mark.parametrize("dtype", ELEMENTWISE_DTYPES, ids=str)


class Group:
    """Ranks with a place and flags each."""

    def __init__(self, size: int, width: int, dtype: torch.dtype, first: int = 0) -> None:
        self.places = torch.full((size, MOST_ROWS, width), torch.nan, dtype=dtype, device=DEVICE)
        self.told = torch.full((size, MOST_ROWS, size), first, dtype=torch.int32, device=DEVICE)
        self.exchanges = torch.full((size, MOST_ROWS), first, dtype=torch.int32, device=DEVICE)
        at, flags = (
            torch.tensor([part.data_ptr() for part in whole], dtype=torch.int64, device=DEVICE)
            for whole in (self.places, self.told)
        )
        self.ranks = [Ranks(i, at, flags, self.told[i].view(-1), self.exchanges[i]) for i in range(size)]


def norm_of(rows: int, width: int, dtype: torch.dtype) -> Norm:
    residual = (torch.randn(rows, width) * 3).to(dtype).to(DEVICE)
    return Norm((torch.rand(width) + 0.5).to(dtype).to(DEVICE), 1e-5, residual)


@in_all_types
@pytest.mark.parametrize("at_once", [2**20, 2], ids=["a row each", "row after row"])
@pytest.mark.parametrize("first", [0, 2**31 - 3], ids=["new", "wrapping around"])
@pytest.mark.parametrize(("size", "width"), [(2, 1024), (3, 576), (4, 8)])
def test_every_rank_has_the_same_sum_and_its_norm(
    size: int, width: int, first: int, at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_norm, "_at_once", lambda device, warps: at_once)
    torch.manual_seed(size)
    group = Group(size, width, dtype, first)
    for rows in (1, 7, 2, MOST_ROWS):
        norm = norm_of(rows, width, dtype)
        group.places[:, :rows] = (torch.randn(size, rows, width) * 3).to(dtype)
        expected = sum_norm.reference(list(group.places[:, :rows]), norm)
        found = []
        for rank in group.ranks:
            now = group.exchanges[rank.rank] + 1
            others = [other for other in range(size) if other != rank.rank]
            group.told[rank.rank, :rows, others] = now[:rows, None]
            found.append(sum_norm.sum_norm(rank, rows, norm))
            assert torch.equal(group.exchanges[rank.rank, :rows], now[:rows])
            for other in others:
                assert torch.equal(group.told[other, :rows, rank.rank], now[:rows])
        for normed, total in found:
            close(normed, expected[0])
            close(total, expected[1])
            assert torch.equal(normed, found[0][0]) and torch.equal(total, found[0][1])


@in_all_types
def test_a_wait_in_vain_ends_when_patience_does(dtype: torch.dtype) -> None:
    group = Group(2, 64, dtype)
    group.places.zero_()
    norm = norm_of(3, 64, dtype)
    for _ in range(2):
        normed, total = sum_norm.sum_norm(group.ranks[0], 3, norm, patience=5)
        assert normed.isnan().all() and total.isnan().all()
    assert group.told[1].view(MOST_ROWS, 2)[:, 0].tolist() == [2] * 3 + [0] * (MOST_ROWS - 3)
    # Whoever comes late has been told, and counts the same exchanges from then on.
    for patience in (5, 0):
        _, total = sum_norm.sum_norm(group.ranks[1], 3, norm, patience)
        assert torch.equal(total, norm.residual)


@in_all_types
@pytest.mark.skipif(not ON_CARD, reason="the interpreter runs one kernel after the other")
@pytest.mark.parametrize("at_once", [2**20, 2], ids=["a row each", "row after row"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_run_at_once_wait_for_each_other(
    size: int, at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On streams of one card. Places are used by turns: a summand is written anew right after the other exchange."""
    monkeypatch.setattr(sum_norm, "_at_once", lambda device, warps: at_once)
    torch.manual_seed(17)
    width, rounds, rows = 1024, 200, MOST_ROWS
    groups = [Group(size, width, dtype) for _ in range(2)]
    ranks = [[group.ranks[i] for group in groups] for i in range(size)]
    for i in range(size):  # one count of exchanges, and one place to be told of them
        ranks[i][1] = Ranks(i, ranks[i][1].places, ranks[i][0].flags, ranks[i][0].told, ranks[i][0].exchanges)
    norm = norm_of(rows, width, dtype)
    summands = (torch.randn(size, rounds, rows, width) * 3).to(dtype).to(DEVICE)
    streams = [torch.cuda.Stream() for _ in range(size)]
    sum_norm.sum_norm(ranks[0][0], rows, norm, patience=1)  # compiled now: its first launch would hold the others up
    for i in range(1, size):
        sum_norm.sum_norm(ranks[i][0], rows, norm, patience=1)
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for turn in range(rounds):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (turn + i) % 5 == 0:
                    torch.cuda._sleep(20_000 * (i + 1))  # by turns one is late
                groups[turn % 2].places[i].copy_(summands[i, turn])
                found[i].append(sum_norm.sum_norm(ranks[i][turn % 2], rows, norm)[1])
    torch.cuda.synchronize()
    for turn in range(rounds):
        expected = sum_norm.reference(list(summands[:, turn]), norm)[1]
        for i in range(size):
            close(found[i][turn], expected)
            assert torch.equal(found[i][turn], found[0][turn]), f"round {turn}"
