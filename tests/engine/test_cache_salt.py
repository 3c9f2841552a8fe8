"""A salt keeps requests apart in the cache, and blocks remember who wrote and who hit them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from history_model import history_engine
from tests.engine.test_scheduler import continuation

PROMPT = list(range(13))


def run(engine: LLMEngine, prompt: list[int], count: int = 1, **origin: object) -> tuple[list[int], int]:
    engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True), **origin)  # type: ignore[arg-type]
    ids, cached = [], 0
    while not engine.is_finished():
        for output in engine.step():
            ids += output.new_token_ids
            cached = output.num_cached_tokens
    engine.check_integrity()
    return ids, cached


def test_blocks_serve_requests_of_their_salt_only() -> None:
    engine = history_engine(32, 4)
    for salt in ("", "ann", "bob", "ann bob"):
        assert run(engine, PROMPT, cache_salt=salt) == (continuation(PROMPT, 1), 0)
    for salt in ("", "ann", "bob", "ann bob"):
        assert run(engine, PROMPT, cache_salt=salt) == (continuation(PROMPT, 1), 12)


@pytest.mark.parametrize("salt", [None, b"ann", 3, "x" * 257])
def test_a_bad_salt_is_refused_and_nothing_is_queued(salt: object) -> None:
    engine = history_engine(8, 4)
    with pytest.raises(ValueError, match=r"cache_salt=.* must be text of at most 256 characters"):
        engine.add_request([1], SamplingParams(), cache_salt=salt)  # type: ignore[arg-type]
    assert engine.is_finished()


@pytest.mark.parametrize("name", ["owner", "turn"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.0, "1", None, True])
def test_a_bad_stamp_is_refused(name: str, value: object) -> None:
    engine = history_engine(8, 4)
    with pytest.raises(ValueError, match=f"{name}=.* must be an integer from 0 to 2147483647"):
        engine.add_request([1], SamplingParams(), **{name: value})  # type: ignore[arg-type]
    assert engine.is_finished()


@settings(max_examples=100, deadline=None)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    requests=st.lists(
        st.tuples(st.sampled_from(["", "a", "ab", "b"]), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=12)),
        min_size=2,
        max_size=12,
    ),
)
def test_a_hit_is_always_a_prefix_that_the_same_salt_has_written(
    block_size: int, requests: list[tuple[str, int, list[int]]]
) -> None:
    """In a pool with room for all, and exactly the longest such prefix in whole blocks."""
    engine = history_engine(400, block_size, max_model_len=64)
    written: list[tuple[str, list[int]]] = []
    for salt, head, tail in requests:
        prompt = [7, 8] * head + tail or [7]
        _, cached = run(engine, prompt, cache_salt=salt)
        shared = [_common(prompt, tokens) for its, tokens in written if its == salt]
        most = min(max(shared, default=0), len(prompt) - 1)
        assert cached == most // block_size * block_size
        written.append((salt, prompt))


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_every_block_knows_who_wrote_it_and_how_often_and_when_it_was_hit() -> None:
    engine = history_engine(16, 4)
    began = time.time()
    run(engine, PROMPT, owner=7, turn=1)
    blocks = [b for b, o in enumerate(engine.blocks.snapshot().owner) if o == 7]
    written = [b for b in blocks if engine.blocks.snapshot().state[b]]
    snapshot = engine.blocks.snapshot()
    assert len(written) == 3
    for b in written:
        assert (snapshot.owner[b], snapshot.turn[b], snapshot.request[b], snapshot.hits[b]) == (7, 1, 1, 0)
        assert snapshot.last_hit[b] == 0
    run(engine, [*PROMPT, *range(50, 60)], owner=8, turn=2)
    snapshot = engine.blocks.snapshot()
    for b in written:
        assert (snapshot.owner[b], snapshot.turn[b], snapshot.request[b], snapshot.hits[b]) == (7, 1, 1, 1)
        assert began <= snapshot.last_hit[b] <= snapshot.last_use[b] <= time.time()
    new = [b for b in range(16) if snapshot.state[b] and b not in written]
    assert {(snapshot.owner[b], snapshot.turn[b], snapshot.request[b], snapshot.hits[b]) for b in new} == {(8, 2, 2, 0)}
