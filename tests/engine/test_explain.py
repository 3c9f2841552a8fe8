"""explain() tells beforehand what a request does to the cache, and changes nothing by telling."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from history_model import history_engine


def run(engine: LLMEngine, prompt: list[int], *, owner: int = 0, salt: str = "") -> int:
    """Run one request, of one token, alone; returns its cached tokens."""
    engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), owner=owner, cache_salt=salt)
    cached = 0
    while not engine.is_finished():
        for output in engine.step():
            assert output.error is None
            cached = output.num_cached_tokens
    return cached


CHAT = list(range(13))  # three full blocks of four


def test_it_tells_hits_and_new_blocks() -> None:
    engine = history_engine(16, 4)
    run(engine, CHAT)
    found = engine.explain([*CHAT, 50, 51, 52, 53])
    assert (found.num_prompt_tokens, found.num_hit_tokens, found.num_new_blocks) == (17, 12, 2)
    assert len(found.hit_blocks) == 3 and found.evicted == () and found.num_missing == 0


@pytest.mark.parametrize("place", range(12))
def test_it_names_the_first_token_that_differs_and_what_stands_there(place: int) -> None:
    engine = history_engine(16, 4)
    run(engine, CHAT)
    prompt = CHAT.copy()
    prompt[place] = 77
    found = engine.explain(prompt)
    assert found.first_difference == place
    assert list(found.found_instead) == CHAT[place : place // 4 * 4 + 4]
    assert found.num_hit_tokens == place // 4 * 4


def test_of_several_continuations_it_takes_the_one_that_agrees_for_longest() -> None:
    engine = history_engine(16, 4)
    run(engine, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    run(engine, [1, 2, 3, 4, 5, 6, 9, 9, 0])
    run(engine, [1, 2, 3, 4, 7, 7, 7, 7, 0])
    found = engine.explain([1, 2, 3, 4, 5, 6, 9, 8, 0])
    assert (found.first_difference, found.found_instead) == (7, (9,))


@pytest.mark.parametrize("prompt", [CHAT, CHAT[:12], CHAT[:11], CHAT[:1], [*CHAT, 1, 2, 3]])
def test_a_prompt_that_ends_before_it_differs_or_goes_beyond_the_chain_has_no_difference(prompt: list[int]) -> None:
    engine = history_engine(16, 4)
    run(engine, CHAT)
    found = engine.explain(prompt)
    assert (found.first_difference, found.found_instead, found.found_in) == (None, (), None)


def test_an_empty_cache_has_nothing_to_differ_from() -> None:
    assert history_engine(16, 4).explain(CHAT).first_difference is None


def test_another_salt_sees_nothing_not_even_what_differs() -> None:
    engine = history_engine(16, 4)
    run(engine, CHAT, salt="ann")
    for salt in ("", "bob"):
        found = engine.explain([*CHAT[:6], 77, 78, 79], salt)
        assert (found.num_hit_tokens, found.first_difference, found.found_instead) == (0, None, ())
    assert engine.explain([*CHAT[:6], 77, 78, 79], "ann").first_difference == 6


def test_it_names_the_blocks_that_would_be_evicted_with_their_owner_in_order() -> None:
    engine = history_engine(4, 4)
    run(engine, [1] * 5, owner=1)
    run(engine, [2] * 5, owner=2)
    found = engine.explain([9] * 13)
    assert [owner for _, owner in found.evicted] == [1, 2]
    assert found.num_missing == 0
    run(engine, [9] * 13)
    assert engine.explain([1] * 5).num_hit_tokens == engine.explain([2] * 5).num_hit_tokens == 0


def test_what_has_no_room_beside_running_requests_and_pins_is_told() -> None:
    engine = history_engine(8, 4)
    run(engine, CHAT, owner=1)
    engine.pin(1)
    engine.add_request([5] * 7, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    found = engine.explain([9] * 17)
    assert (found.num_new_blocks, found.num_missing, found.evicted) == (5, 2, ())


@pytest.mark.parametrize("prompt", [[], [-1], [97], "text"])
def test_a_prompt_that_no_request_could_have_is_refused(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prompt|tokenizer"):
        history_engine(8, 4).explain(prompt)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "longest"), [(16, 10, 9), (2, 64, 8)], ids=["max_model_len", "pool"]
)
def test_a_prompt_that_could_never_be_served_is_refused_in_the_words_its_request_ends_with(
    num_blocks: int, max_model_len: int, longest: int
) -> None:
    engine = history_engine(num_blocks, 4, max_model_len=max_model_len)
    assert engine.explain([1] * longest).num_missing == 0
    engine.add_request([1] * (longest + 1))
    (ended,) = engine.step()
    assert ended.finish_reason == "error" and ended.error is not None
    with pytest.raises(ValueError) as caught:
        engine.explain([1] * (longest + 1))
    assert str(caught.value) == ended.error


PROMPTS = st.builds(
    lambda head, middle, tail: [1, 2, 3, 4, 5, 6, 7, 8][:head] * middle + tail,
    st.integers(0, 8),
    st.integers(0, 2),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(2, 8),
    block_size=st.sampled_from([1, 4, 16]),
    earlier=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "a"]), st.integers(0, 2)), max_size=10),
    pinned=st.integers(0, 2),
    prompt=PROMPTS,
    salt=st.sampled_from(["", "a"]),
)
def test_what_it_tells_is_what_happens(
    num_blocks: int,
    block_size: int,
    earlier: list[tuple[list[int], str, int]],
    pinned: int,
    prompt: list[int],
    salt: str,
) -> None:
    engine = history_engine(num_blocks, block_size, max_model_len=64)
    if pinned:
        engine.pin(pinned)
    history = []
    for tokens, its_salt, owner in earlier:
        if len(tokens) <= num_blocks * block_size:
            run(engine, tokens, owner=owner, salt=its_salt)
            history.append((tokens, its_salt))
    if len(prompt) > num_blocks * block_size:
        return
    blocks = engine.blocks
    before = copy.deepcopy(blocks)
    found = engine.explain(prompt, salt)
    for name in ("empty", "cached", "kept"):
        assert list(getattr(blocks._idle, name)) == list(getattr(before._idle, name)), f"explain changed {name}"
    assert blocks._index.contents == before._index.contents and not blocks._index.problems()
    for name, records in vars(before._records).items():
        assert (getattr(blocks._records, name) == records).all(), f"explain changed {name}"

    # The difference, told from the pool's content alone: the longest agreement of any chain of this salt.
    agreed = found.num_hit_tokens if found.first_difference is None else found.first_difference
    if found.first_difference is not None:
        assert found.found_instead[0] != prompt[found.first_difference]
        assert found.num_hit_tokens <= found.first_difference < found.num_hit_tokens + block_size
    assert any(t[:agreed] == prompt[:agreed] and s == salt for t, s in history) or agreed == 0

    events, seen = engine.events, engine.events.last_seq
    owners = blocks.snapshot().owner
    cached = run(engine, prompt, salt=salt)
    assert cached == found.num_hit_tokens
    happened = events.since(seen)
    assert sum(e.count for e in happened if e.kind == "hit") == len(found.hit_blocks)
    assert sum(e.count for e in happened if e.kind == "allocate") == found.num_new_blocks
    evicted = {}
    for event in happened:
        if event.kind == "evict":
            evicted[event.owner] = evicted.get(event.owner, 0) + event.count
    if found.num_missing:
        assert any(e.kind == "unpin" for e in happened), "only pins could have kept it out of an idle pool"
        return
    told: dict[int, int] = {}
    for block, owner in found.evicted:
        assert owners[block] == owner
        told[owner] = told.get(owner, 0) + 1
    assert evicted == told
    # And they are those blocks: what they held is gone, and what all others held is not.
    held, holds = before._index.contents, blocks._index.contents
    lost = [b for b in range(num_blocks) if held[b] is not None and holds[b] != held[b]]
    assert set(lost) <= {block for block, _ in found.evicted}
