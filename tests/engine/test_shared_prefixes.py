"""What decodes have in common: found whatever their order, never more than is true, and what saves most."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine import shared_prefixes
from engine.shared_prefixes import SharedPrefixFinder, find, num_tiles


def tables(*rows: list[int], width: int = 40) -> np.ndarray:
    """Behind a row's blocks stands what a sequence before it has left there."""
    return np.array([row + [7] * (width - len(row)) for row in rows], np.int32)


def limits(*rows: list[int]) -> np.ndarray:
    return np.array([len(row) for row in rows])


def test_conversations_over_one_system_prompt_are_found_among_others() -> None:
    system = list(range(100, 132))
    rows = [[*system, 200 + 10 * i, 201 + 10 * i] for i in range(6)]
    mixed = [rows[0], [1, 2, 3], rows[1], rows[2], [4], rows[3], [], rows[4], rows[5]]
    found = find(tables(*mixed), limits(*mixed), 4, 10, 32)
    assert sorted(len(members) for members, _ in found) == [2, 4]
    assert all(blocks == 32 for _, blocks in found)
    assert sorted(one for members, _ in found for one in members) == [0, 2, 3, 5, 7, 8]


def test_continuations_of_one_prompt_share_all_of_it_not_only_what_everybody_has() -> None:
    system = list(range(100, 108))
    first, second = system + list(range(300, 330)), system + list(range(400, 430))
    rows = [first, second, first, second, first, second, *([*system, one] for one in (9, 8, 6))]
    found = find(tables(*rows), limits(*rows), 8, 10, 32)
    assert {(tuple(sorted(members)), blocks) for members, blocks in found} == {
        ((0, 2, 4), 38), ((1, 3, 5), 38),
    }  # fmt: skip


def test_blocks_beyond_a_limit_are_nobody_s() -> None:
    row = list(range(10, 40))
    least = np.array([30, 12, 30])
    found = find(tables(row, row, row), least, 8, 10, 16)
    assert found and all(blocks <= least[members].min() for members, blocks in found)
    assert find(tables(row, row), np.array([0, 30]), 8, 10, 32) == []
    assert find(tables(row), np.array([30]), 8, 10, 32) == []
    assert find(np.zeros((0, 40), np.int32), np.zeros(0, np.int64), 8, 10, 32) == []


def test_little_is_left_alone() -> None:
    rows = [[1, 2, 3], [1, 2, 3]]  # 96 tokens once
    assert find(tables(*rows), limits(*rows), 8, 10, 32) == []


@pytest.mark.parametrize("seed", range(30))
def test_tiles_are_true_and_disjoint_and_those_that_save_most(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 16)
    draw = random.Random(seed)
    stems = [[draw.randrange(1000) for _ in range(draw.randrange(1, 30))] for _ in range(draw.randrange(1, 6))]
    rows = []
    for _ in range(draw.randrange(1, 40)):
        stem = draw.choice(stems)
        rows.append(stem[: draw.randrange(1, len(stem) + 1)] + [draw.randrange(1000) for _ in range(draw.randrange(6))])
    per_tile = draw.choice([2, 5, 8])
    everything = find(tables(*rows), limits(*rows), per_tile, 10**6, 1)
    seen: set[int] = set()
    for members, blocks in everything:
        assert 2 <= len(members) <= per_tile and not seen & set(members)
        seen |= set(members)
        assert len({tuple(rows[one][:blocks]) for one in members}) == 1
        assert all(len(rows[one]) >= blocks > 0 for one in members)
    saved = [(len(members) - 1) * blocks for members, blocks in everything]
    assert saved == sorted(saved, reverse=True)
    most = draw.randrange(1, 4)
    assert find(tables(*rows), limits(*rows), per_tile, most, 1) == everything[:most]

    finder = SharedPrefixFinder(per_tile, 64, 16)
    for count in (len(rows), max(1, len(rows) // 2)):
        finder.look(tables(*rows[:count]), limits(*rows[:count]))
        assert len(finder.lens) >= num_tiles(count, per_tile)
        skipped = np.zeros(64, np.int32)
        for members, length in zip(finder.members, finder.lens, strict=True):
            skipped[members[members >= 0]] = length
            assert (members >= 0).any() == (length > 0)
        assert (finder.skipped == skipped).all()
