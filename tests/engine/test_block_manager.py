"""BlockManager: what is found again, in which order blocks go, and that a hash alone is never believed."""

from __future__ import annotations

import pytest

from engine import prefix_index
from engine.block_manager import BlockManager
from engine.block_records import ACTIVE, CACHED, FREE
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def sequence(tokens: list[int], request_id: int = 1, owner: int = 0, salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id,
        tokens,
        SamplingParams(),
        seed=0,
        max_tokens=8,
        stop_ids=frozenset(),
        owner=owner,
        salt=salt,
    )


def run(blocks: BlockManager, seq: Sequence) -> Sequence:
    """Admit seq and pretend that its prompt was computed."""
    matched = blocks.match_prefix(seq)
    assert blocks.can_admit(seq, matched)
    blocks.admit(seq, matched)
    seq.num_computed_tokens = seq.num_planned_tokens = len(seq.token_ids)
    blocks.index_full_blocks(seq)
    return seq


def test_a_released_prompt_is_found_again() -> None:
    blocks = BlockManager(8, 4)
    first = run(blocks, sequence(list(range(10))))
    table = list(first.block_table)
    blocks.release(first)
    assert (blocks.num_cached, blocks.num_free) == (2, 6)
    assert blocks.match_prefix(sequence(list(range(10)), 2)) == table[:2]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_a_wholly_cached_prompt_leaves_a_token_to_compute(length: int) -> None:
    blocks = BlockManager(8, 4)
    blocks.release(run(blocks, sequence(list(range(length)))))
    matched = blocks.match_prefix(sequence(list(range(length)), 2))
    assert len(matched) == (length - 1) // 4


def test_another_prefix_before_the_same_block_does_not_hit() -> None:
    blocks = BlockManager(8, 4)
    blocks.release(run(blocks, sequence([1, 1, 1, 1, 5, 6, 7, 8, 9])))
    assert blocks.match_prefix(sequence([2, 2, 2, 2, 5, 6, 7, 8, 9], 2)) == []


def test_another_salt_does_not_hit() -> None:
    blocks = BlockManager(8, 4)
    blocks.release(run(blocks, sequence(list(range(9)), salt=b"a")))
    assert blocks.match_prefix(sequence(list(range(9)), 2, salt=b"b")) == []
    assert len(blocks.match_prefix(sequence(list(range(9)), 3, salt=b"a"))) == 2


def test_a_hash_collision_does_not_serve_another_prompts_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index.xxhash, "xxh3_128_digest", lambda data: b"same")
    blocks = BlockManager(8, 4)
    blocks.release(run(blocks, sequence([1, 2, 3, 4, 5])))
    assert blocks.match_prefix(sequence([9, 9, 9, 9, 5], 2)) == []
    assert len(blocks.match_prefix(sequence([1, 2, 3, 4, 5], 3))) == 1


def test_unused_blocks_go_before_cached_ones() -> None:
    blocks = BlockManager(4, 4)
    kept = run(blocks, sequence(list(range(5))))
    blocks.release(kept)
    run(blocks, sequence([50, 51, 52, 53, 54, 55, 56, 57, 58], 2))
    assert len(blocks.match_prefix(sequence(list(range(5)), 3))) == 1


def test_the_least_recently_released_go_first_and_tails_before_heads() -> None:
    blocks = BlockManager(5, 4)
    blocks.release(run(blocks, sequence([1] * 4 + [2] * 4 + [3])))  # 2 cached
    blocks.release(run(blocks, sequence([7] * 4 + [8] * 4 + [9], 2)))  # 2 cached, 1 free
    run(blocks, sequence([20, 21, 22, 23, 24], 3))  # the free one and one eviction: the first's tail
    assert len(blocks.match_prefix(sequence([1] * 4 + [2] * 4 + [3], 4))) == 1
    assert len(blocks.match_prefix(sequence([7] * 4 + [8] * 4 + [9], 5))) == 2


def test_evicting_one_copy_never_hides_the_other() -> None:
    blocks = BlockManager(5, 4)
    one, two = sequence([1, 2, 3, 4, 5], 1), sequence([1, 2, 3, 4, 5], 2)
    for seq in (one, two):  # both admitted before either is computed
        blocks.admit(seq, blocks.match_prefix(seq))
    for seq in (one, two):
        seq.num_computed_tokens = 5
        blocks.index_full_blocks(seq)
    blocks.release(one)
    blocks.release(two)
    filler = run(blocks, sequence([30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42], 3))  # takes 3 free + 1 cached
    assert len(filler.block_table) == 4
    assert len(blocks.match_prefix(sequence([1, 2, 3, 4, 5], 4))) == 1
    blocks.check_integrity([filler])


def test_shared_blocks_come_back_once_both_holders_are_done() -> None:
    blocks = BlockManager(8, 4)
    first = run(blocks, sequence(list(range(9))))
    second = run(blocks, sequence(list(range(9)), 2))
    assert first.block_table[:2] == second.block_table[:2]
    state = blocks.snapshot()
    assert state.refcount[first.block_table[0]] == 2
    assert state.state[first.block_table[0]] == ACTIVE
    blocks.release(first)
    blocks.check_integrity([second])
    assert blocks.num_active == 3
    blocks.release(second)
    assert (blocks.num_active, blocks.num_cached) == (0, 2)


def test_growing_beyond_the_pool_changes_nothing() -> None:
    blocks = BlockManager(2, 4)
    seq = run(blocks, sequence(list(range(8))))
    assert not blocks.grow(seq, 9)
    assert len(seq.block_table) == 2
    blocks.check_integrity([seq])


def test_the_snapshot_names_writer_and_position() -> None:
    blocks = BlockManager(4, 4)
    seq = run(blocks, sequence(list(range(9)), owner=7))
    snapshot = blocks.snapshot()
    assert [snapshot.position[b] for b in seq.block_table] == [0, 1, 2]
    assert [snapshot.owner[b] for b in seq.block_table] == [7, 7, 7]
    blocks.release(seq)
    assert sorted(blocks.snapshot().state.tolist()) == [FREE, FREE, CACHED, CACHED]


def test_a_lost_reference_is_found_by_the_integrity_check() -> None:
    blocks = BlockManager(4, 4)
    seq = run(blocks, sequence(list(range(9))))
    seq.block_table.pop()
    with pytest.raises(RuntimeError, match="refcount"):
        blocks.check_integrity([seq])


def test_clearing_the_cache_frees_what_nobody_holds() -> None:
    blocks = BlockManager(8, 4)
    blocks.release(run(blocks, sequence(list(range(9)))))
    held = run(blocks, sequence([40, 41, 42, 43, 44], 2))
    assert blocks.clear_cache() == 2
    blocks.check_integrity([held])
    assert blocks.match_prefix(sequence(list(range(9)), 3)) == []
