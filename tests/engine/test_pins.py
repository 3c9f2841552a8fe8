"""Pinned conversations stay in the cache, within a limit, and never at the cost of a request."""

from __future__ import annotations

import pytest

from engine.block_manager import BlockManager
from engine.block_records import CACHED
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from history_model import history_engine
from perilous_runner import perilous_engine
from tests.engine.test_scheduler import continuation


def say(
    engine: LLMEngine, prompt: list[int], count: int = 1, *, owner: int = 0, turn: int = 0
) -> tuple[list[int], int]:
    """Run one request alone; returns its tokens and how many of the prompt's came out of the cache."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    engine.add_request(prompt, params, owner=owner)
    ids, cached = [], 0
    while not engine.is_finished():
        for output in engine.step():
            assert output.error is None
            ids += output.new_token_ids
            cached = output.num_cached_tokens
        engine.check_integrity()
    return ids, cached


def crowd(engine: LLMEngine, prompts: int = 12) -> None:
    """Other people's prompts, enough to evict whatever may be evicted."""
    for i in range(prompts):
        say(engine, [60 + i] * 9)


CHAT = list(range(17))  # four full blocks of four


def test_a_pinned_conversation_survives_what_evicts_an_unpinned_one() -> None:
    engine = history_engine(12, 4)
    say(engine, CHAT, owner=3)
    crowd(engine)
    assert say(engine, CHAT, owner=3)[1] == 0
    assert engine.pin(3) == 4
    crowd(engine)
    assert say(engine, CHAT, owner=3)[1] == 16
    assert engine.unpin(3) == 4
    crowd(engine)
    assert say(engine, CHAT, owner=3)[1] == 0


def test_a_pinned_block_that_nobody_holds_counts_as_cached_but_cannot_be_taken() -> None:
    engine = history_engine(12, 4)
    say(engine, CHAT, owner=3)
    engine.pin(3)
    blocks = engine.blocks
    assert (blocks.num_cached, blocks.num_free, blocks.num_active, blocks.num_available) == (4, 8, 0, 8)
    snapshot = blocks.snapshot()
    assert snapshot.pinned.sum() == 4 and set(snapshot.state[snapshot.pinned]) == {CACHED}
    assert blocks.clear_cache() == 0


def test_pinning_takes_the_chain_before_a_conversations_blocks_whoever_wrote_it() -> None:
    """A pinned tail behind an evicted head could never be found."""
    engine = history_engine(12, 4)
    say(engine, CHAT[:9], owner=1)
    say(engine, CHAT, owner=2)
    assert engine.pin(2) == 4
    crowd(engine)
    assert say(engine, CHAT)[1] == 16


def test_what_a_pinned_conversation_writes_later_is_pinned_too() -> None:
    engine = history_engine(16, 4)
    assert engine.pin(5) == 0
    say(engine, CHAT, owner=5)
    crowd(engine)
    assert say(engine, CHAT, owner=5)[1] == 16


def test_a_block_stays_pinned_until_the_last_conversation_lets_go() -> None:
    engine = history_engine(16, 4)
    say(engine, [*CHAT[:8], 50, 51, 52, 53, 54], owner=1)
    say(engine, [*CHAT[:8], 40, 41, 42, 43, 44], owner=2)
    assert (engine.pin(1), engine.pin(2)) == (3, 3)
    assert engine.blocks.pins.num_blocks == 4
    assert engine.unpin(1) == 1
    crowd(engine)
    assert say(engine, [*CHAT[:8], 40, 41, 42, 43, 44])[1] == 12
    engine.check_integrity()


def test_no_more_than_half_of_the_pool_may_be_pinned_and_the_refusal_says_what_to_do() -> None:
    engine = history_engine(12, 4)
    say(engine, CHAT, owner=1)
    say(engine, [90, *CHAT], owner=2)
    assert engine.pin(1) == 4
    with pytest.raises(ValueError, match=r"conversation 2 takes 4 more blocks; 2 are left of the 6 .* unpin another"):
        engine.pin(2)
    assert 2 not in engine.blocks.pins and engine.blocks.pins.num_blocks == 4
    say(engine, [*CHAT, *range(30)], owner=1)  # what it writes beyond the limit is cached, not pinned
    assert engine.blocks.pins.num_blocks == 6
    engine.check_integrity()


@pytest.mark.parametrize("owner", [0, -1, 2**31, 1.5, "3", None, True])
def test_an_owner_that_cannot_be_pinned_is_refused(owner: object) -> None:
    engine = history_engine(8, 4)
    with pytest.raises(ValueError, match="owner="):
        engine.pin(owner)  # type: ignore[arg-type]


def test_unpinning_what_is_not_pinned_is_a_no_op() -> None:
    assert history_engine(8, 4).unpin(7) == 0


@pytest.mark.parametrize("pool", range(2, 9))
def test_a_prompt_that_fits_only_without_the_pins_gets_in_and_the_longest_pinned_goes_first(pool: int) -> None:
    engine = history_engine(pool, 4)
    owners = list(range(1, pool // 2 + 1))
    for owner in owners:
        say(engine, [owner] * 5, owner=owner)
        assert engine.pin(owner) == 1
    prompt = [9] * (4 * pool - 3)
    assert say(engine, prompt)[0] == continuation(prompt, 1)
    assert engine.blocks.pins.owners() == []
    unpinned = [event for event in engine.events.since(0) if event.kind == "unpin"]
    assert [event.owner for event in unpinned] == owners
    assert all("needed the room" in event.detail for event in unpinned)


def test_only_as_many_pins_as_a_prompt_needs_are_given_up() -> None:
    engine = history_engine(8, 4)
    for owner in (1, 2, 3, 4):
        say(engine, [owner] * 5, owner=owner)
        engine.pin(owner)
    say(engine, [9] * 22)  # six blocks
    assert engine.blocks.pins.owners() == [3, 4]


def test_a_stream_that_outgrows_the_unpinned_rest_goes_on_to_the_end_of_the_pool() -> None:
    engine = history_engine(6, 4, max_model_len=64)
    say(engine, [1] * 9, owner=1)
    engine.pin(1)
    ids, _ = say(engine, [2] * 4, 60)
    assert ids == continuation([2] * 4, 24 - 4 + 1), "every slot of the pool, and the token sampled from the last"
    assert engine.blocks.pins.owners() == []


def test_pins_held_only_by_the_running_request_itself_are_not_given_up_for_nothing() -> None:
    engine = history_engine(4, 4, max_model_len=64)
    say(engine, [1] * 9, owner=1)
    engine.pin(1)
    ids, cached = say(engine, [1] * 9, 60, owner=1)
    assert cached == 8 and ids == continuation([1] * 9, 16 - 9 + 1)
    assert engine.blocks.pins.owners() == [1]


def test_a_request_waits_for_others_rather_than_take_a_pin() -> None:
    engine = history_engine(8, 4, max_num_seqs=4)
    say(engine, CHAT[:9], owner=1)
    engine.pin(1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (engine.add_request([i] * 13, params) for i in (2, 3))
    ids: dict[int, list[int]] = {first: [], second: []}
    while not engine.is_finished():
        for output in engine.step():
            ids[output.request_id] += output.new_token_ids
    assert ids == {first: continuation([2] * 13, 8), second: continuation([3] * 13, 8)}
    assert engine.blocks.pins.owners() == [1]


def test_no_pin_is_given_up_for_a_request_that_would_only_overtake() -> None:
    engine = history_engine(8, 4)
    say(engine, CHAT[:9], owner=1)
    engine.pin(1)
    say(engine, [50] * 9)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add_request([60] * 5, params)
    engine.add_request([*([50] * 8), *range(17)], params)  # its head is resident, but it fits only without the pins
    outputs = engine.step()
    assert [output.num_prompt_tokens for output in outputs] == [5]
    assert engine.blocks.pins.owners() == [1]


def test_a_block_whose_content_is_withdrawn_loses_its_pin() -> None:
    engine = history_engine(8, 4, max_num_seqs=2)
    say(engine, CHAT[:9], owner=1)
    engine.pin(1)
    engine.add_request(CHAT[:9], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.blocks._forget([min(engine.blocks.pins.blocks(1))])
    engine.check_integrity()
    assert len(engine.blocks.pins.blocks(1)) == engine.blocks.pins.num_blocks == 1


def test_a_conversation_that_goes_on_over_blocks_that_are_withdrawn_meanwhile_does_not_pin_them_again() -> None:
    """It shares them with a request whose logits are not finite."""
    engine, runner = perilous_engine(12, 4)
    say(engine, CHAT, owner=3)
    assert engine.pin(3) == 4
    runner.bad.add(engine.add_request([*CHAT, 5]))
    engine.add_request(CHAT, SamplingParams(max_tokens=8, ignore_eos=True), owner=3)
    while not engine.is_finished():
        engine.step()
        engine.check_integrity()
    assert not engine.blocks.pins.blocks(3)


def test_the_integrity_check_finds_a_pin_that_was_lost() -> None:
    engine = history_engine(8, 4)
    say(engine, CHAT[:9], owner=1)
    engine.pin(1)
    block = next(iter(engine.blocks.pins.blocks(1)))
    for damage in (
        lambda b: b.pins.counts.__setitem__(block, 0),
        lambda b: b._idle.cached.__setitem__(block, None),
        lambda b: b._index.contents.__setitem__(block, None),
        lambda b: setattr(b.pins, "limit", 1),
    ):
        damaged = _copy(engine.blocks)
        damaged.check_integrity([])
        damage(damaged)
        with pytest.raises(RuntimeError, match=r"pinned|evictable"):
            damaged.check_integrity([])


def _copy(blocks: BlockManager) -> BlockManager:
    import copy

    return copy.deepcopy(blocks)
