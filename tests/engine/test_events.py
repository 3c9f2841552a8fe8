"""The event log: every kind, bounded, in order, and cheap enough to be always on."""

from __future__ import annotations

import timeit

import pytest

from engine.events import BlockEvent, EventLog
from engine.sampling_params import SamplingParams
from history_model import history_engine
from tests.engine.test_scheduler import Driver


def test_readers_get_what_is_new_oldest_first() -> None:
    log = EventLog()
    for i in range(5):
        log.add("hit", 1, 2, i)
    assert [e.count for e in log.since(0)] == [0, 1, 2, 3, 4]
    assert [e.seq for e in log.since(3)] == [4, 5]
    assert log.since(5) == log.since(9) == []
    assert isinstance(log.since(4)[0], BlockEvent)


def test_the_ring_is_bounded_and_keeps_the_newest() -> None:
    log = EventLog(capacity=8)
    for i in range(100):
        log.add("allocate", 0, i, 1)
    assert [e.request_id for e in log.since(0)] == list(range(92, 100))
    assert [e.request_id for e in log.since(97)] == [97, 98, 99]


def test_numbers_go_on_after_an_earlier_logs_last_one() -> None:
    log = EventLog()
    log.continue_after(40)
    log.add("hit", 0, 1, 1)
    assert [e.seq for e in log.since(0)] == [e.seq for e in log.since(40)] == [41]
    assert log.since(41) == []


def counted(driver: Driver, kind: str, request_id: int) -> int:
    events = driver.engine.events.since(0)
    return sum(e.count for e in events if e.kind == kind and e.request_id == request_id)


def test_allocations_hits_and_shares_are_told_with_their_counts() -> None:
    driver = Driver(history_engine(32, 4, max_num_batched_tokens=64))
    first = driver.add(list(range(13)), 8)
    driver.step(2)
    second = driver.add(list(range(13)), 1)  # while the first runs: its three blocks are shared
    driver.drain()
    third = driver.add(list(range(13)), 1)  # afterwards: a hit that nobody else holds
    driver.drain()
    assert [counted(driver, "hit", i) for i in (first, second, third)] == [0, 3, 3]
    assert [counted(driver, "share", i) for i in (first, second, third)] == [0, 3, 0]
    # 13 + 8 tokens, of which the last is never computed: five blocks.
    assert [counted(driver, "allocate", i) for i in (first, second, third)] == [5, 1, 1]


def test_evictions_preemptions_and_aborts_are_told() -> None:
    driver = Driver(history_engine(6, 4, max_num_seqs=3))
    engine = driver.engine
    engine.add_request([1] * 9, SamplingParams(max_tokens=1), owner=5)
    engine.step()
    ids = [driver.add([i] * 6, 12) for i in (2, 3)]
    driver.step(14)
    engine.abort(ids[1])
    driver.drain()
    events = engine.events.since(0)
    assert sum(e.count for e in events if e.kind == "evict" and e.owner == 5) == 2
    assert [e.request_id for e in events if e.kind == "preempt"] and [e.kind for e in events].count("abort") == 1


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_a_step_of_decodes_writes_no_more_events_than_blocks_it_takes(sequences: int) -> None:
    driver = Driver(history_engine(1000, 4, max_num_seqs=64, max_num_batched_tokens=256))
    for i in range(sequences):
        driver.add([i], 30)
    driver.step(2)
    for _ in range(16):
        before, blocks = driver.engine.events.last_seq, driver.engine.blocks.num_active
        driver.step()
        assert driver.engine.events.last_seq - before == driver.engine.blocks.num_active - blocks


def test_an_event_costs_about_a_microsecond() -> None:
    """The best of many short runs, which a busy machine disturbs least; tests/support/event_log_cost.py measures the
    share of real steps."""
    log = EventLog()
    best = min(timeit.repeat(lambda: log.add("allocate", 3, 12345, 1), number=200, repeat=50)) / 200
    assert best < 5e-6
