"""EngineThread's questions about the cache: asked from anywhere, answered between two steps, never left open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine_thread import EngineDead, EngineNotReady, EngineThread
from engine.llm import AsyncLLM
from tests.engine.test_engine_thread import Bench, read, tokens


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr("engine.llm_engine.LLMEngine", bench.build)
    return bench


@pytest.fixture
def engine(bench: Bench) -> Iterator[EngineThread]:
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    yield thread
    thread.shutdown()


async def test_owner_turn_and_salt_reach_the_blocks(engine: EngineThread) -> None:
    await read(engine.submit(list(range(9)), tokens(1), owner=7, turn=3, cache_salt="ann"))
    snapshot = engine.kv_snapshot()
    assert snapshot is not None
    written = snapshot.owner == 7
    assert written.sum() == 3 and set(snapshot.turn[written]) == {3}
    ann = await asyncio.to_thread(engine.explain, list(range(9)), "ann")
    bob = await asyncio.to_thread(engine.explain, list(range(9)), "bob")
    assert (ann.num_hit_tokens, bob.num_hit_tokens) == (8, 0)


@pytest.mark.parametrize("bad", [{"owner": -1}, {"turn": 2**31}, {"cache_salt": 5}])
async def test_a_bad_origin_is_refused_where_it_is_submitted(engine: EngineThread, bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        engine.submit([1], tokens(3), **bad)
    assert await read(engine.submit([1], tokens(3)))


async def test_questions_are_answered_between_the_steps_of_running_requests(engine: EngineThread, bench: Bench) -> None:
    bench.pause = 0.002
    await read(engine.submit(list(range(9)), tokens(1), owner=7))
    stream = engine.submit([50], tokens(200))
    asked = [asyncio.to_thread(engine.explain, [*range(9), 60, 61]) for _ in range(20)]
    assert {answer.num_hit_tokens for answer in await asyncio.gather(*asked)} == {8}
    assert await asyncio.to_thread(engine.pin, 7) == 2
    assert await asyncio.to_thread(engine.unpin, 7) == 2
    stream.abort()
    await read(stream)


def test_a_wrong_question_is_refused_to_the_asker_and_hurts_nobody(engine: EngineThread) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        engine.explain([])
    with pytest.raises(ValueError, match="owner=0"):
        engine.pin(0)
    assert list(engine.submit_blocking([1], tokens(3)))


def test_before_the_model_is_loaded_there_is_nothing_to_ask() -> None:
    with pytest.raises(EngineNotReady):
        EngineThread(EngineConfig()).explain([1])


def test_a_question_that_waits_when_the_engine_dies_is_answered_with_the_cause(
    engine: EngineThread, bench: Bench
) -> None:
    """It is in the inbox behind the step that never comes back well."""
    in_step, answer = threading.Event(), []

    def fail(meanwhile: object) -> list:
        in_step.set()
        time.sleep(0.2)
        raise MemoryError("the pool is on fire")

    bench.engines[-1].step = fail  # type: ignore[method-assign]

    def ask() -> None:
        in_step.wait(5)
        try:
            answer.append(engine.explain([1]))
        except EngineDead as error:
            answer.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    list(engine.submit_blocking([1], tokens(3)))
    asker.join(5)
    assert not asker.is_alive(), "the asker hangs"
    assert isinstance(answer[0], EngineDead) and "on fire" in str(answer[0])


async def test_the_async_engine_takes_a_salt(bench: Bench) -> None:
    async with AsyncLLM("whatever") as llm:
        first = await llm.generate(list(range(9)), tokens(1), cache_salt="ann")
        other = await llm.generate(list(range(9)), tokens(1), cache_salt="bob")
        again = await llm.generate(list(range(9)), tokens(1), cache_salt="ann")
        assert [o.num_cached_tokens for o in (first, other, again)] == [0, 0, 8]
        assert [d async for d in llm.stream(list(range(9)), tokens(2), cache_salt="bob")][-1].num_cached_tokens == 8
