"""BACKGROUND requests: they run only while nothing else does, and give way within one step, whatever they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.outputs import RequestPriority
from engine.sampling_params import SamplingParams
from history_model import history_engine
from reference import assert_greedy
from tests.engine.test_scheduler import Driver, continuation

BACKGROUND = RequestPriority.BACKGROUND


def planned(driver: Driver) -> list[int]:
    """The requests of the last step."""
    return [item.seq.request_id for item in driver.plans[-1].items]


def kinds(driver: Driver, kind: str) -> list[int]:
    return [event.request_id for event in driver.engine.events.since(0) if event.kind == kind]


def test_background_work_in_every_slot_gives_way_in_one_step_keeps_its_blocks_and_goes_on_afterwards() -> None:
    driver = Driver(history_engine(64, 4, max_num_seqs=2, max_num_batched_tokens=16))
    slow = [driver.add([i] * 6, 20, BACKGROUND) for i in (1, 2)]
    driver.step(4)
    tables = [list(driver.engine.requests.live[i].block_table) for i in slow]
    urgent = [driver.add([i] * 5, 6) for i in (3, 4)]
    for _ in range(6):
        driver.step()
        assert sorted(planned(driver)) == urgent, "both slots are theirs, from the first step on"
        assert [list(driver.engine.requests.live[i].block_table) for i in slow] == tables
    driver.step()
    assert sorted(planned(driver)) == slow, "nothing else is left"
    driver.drain()
    assert not kinds(driver, "preempt")
    for request_id, prompt, count in (*zip(slow, (1, 2), (20, 20)), *zip(urgent, (3, 4), (6, 6))):  # noqa: B905
        assert driver.results[request_id].ids == continuation([prompt] * (6 if count == 20 else 5), count)


def test_background_work_that_holds_every_block_is_preempted_latest_first_and_only_as_needed() -> None:
    driver = Driver(history_engine(8, 4, max_num_seqs=4, max_num_batched_tokens=32))
    early, middle, late = (driver.add([i] * 6, 9, BACKGROUND) for i in (1, 2, 3))
    driver.step(3)
    assert driver.engine.blocks.num_active == 6
    urgent = driver.add([4] * 11, 6)
    driver.step()
    assert planned(driver) == [urgent]
    assert kinds(driver, "preempt") == [late]
    driver.drain()
    assert driver.results[early].preemptions == driver.results[urgent].preemptions == 0
    for request_id, prompt in ((early, 1), (middle, 2), (late, 3)):
        assert driver.results[request_id].ids == continuation([prompt] * 6, 9)
    assert driver.results[urgent].ids == continuation([4] * 11, 6)


@pytest.mark.parametrize("pool", range(2, 9))
def test_a_request_that_needs_the_whole_pool_gets_it_from_paused_background_work(pool: int) -> None:
    driver = Driver(history_engine(pool, 4, max_num_seqs=8, max_num_batched_tokens=64))
    slow = [driver.add([i], 4, BACKGROUND) for i in range(pool)]
    driver.step(2)
    urgent = driver.add([9] * (4 * pool - 2), 2)
    driver.step()
    assert planned(driver) == [urgent]
    driver.drain()
    assert driver.results[urgent].ids == continuation([9] * (4 * pool - 2), 2)
    assert [driver.results[i].ids for i in slow] == [continuation([i], 4) for i in range(pool)]


def test_a_growing_stream_takes_its_blocks_from_paused_background_work_before_anything_else() -> None:
    driver = Driver(history_engine(8, 4, max_num_seqs=3, max_num_batched_tokens=32))
    slow = driver.add([1] * 10, 10, BACKGROUND)
    driver.step(2)
    streams = [driver.add([i] * 4, 12) for i in (2, 3)]
    driver.drain()
    assert kinds(driver, "preempt") == [slow]
    assert [driver.results[i].preemptions for i in streams] == [0, 0]
    assert driver.results[slow].ids == continuation([1] * 10, 10)


def test_a_background_prompt_that_is_half_read_goes_on_where_it_was() -> None:
    driver = Driver(history_engine(64, 4, max_num_seqs=2, max_num_batched_tokens=8))
    slow = driver.add(list(range(40)), 3, BACKGROUND)
    driver.step(2)
    driver.add([5, 5], 3)
    driver.step(3)
    driver.step()
    item = driver.plans[-1].items[0]
    assert (item.seq.request_id, item.start) == (slow, 16)
    driver.drain()
    assert driver.results[slow].ids == continuation(list(range(40)), 3)


def test_background_work_waits_through_any_age_while_something_else_runs() -> None:
    driver = Driver(history_engine(100, 4, max_num_seqs=4, max_model_len=400))
    slow = driver.add([1], 2, BACKGROUND)
    stream = driver.add([2], 350)
    driver.step(350)
    assert driver.results[stream].reason == "length" and not driver.results[slow].ids
    driver.drain()
    assert driver.results[slow].ids == continuation([1], 2)


def test_aborting_a_paused_request_gives_its_blocks_back() -> None:
    driver = Driver(history_engine(16, 4, max_num_seqs=1))
    slow = driver.add([1] * 9, 9, BACKGROUND)
    driver.step(2)
    driver.add([2], 3)
    driver.step()
    driver.engine.abort(slow)
    driver.engine.check_integrity()
    assert driver.engine.blocks.num_active == 1
    driver.drain()
    assert driver.results[slow].reason == "abort"


def test_paused_requests_come_back_right_when_others_used_their_rows_of_the_runner(tiny_llama: Path) -> None:
    """More requests hold blocks than may run in one step; the real runner has a table row for each of the latter."""
    from transformers import AutoModelForCausalLM

    from engine import LLM

    llm = LLM(tiny_llama, device="cpu", dtype="float32", max_num_seqs=2, num_kvcache_blocks=64, kvcache_block_size=4)
    prompts = [[10 + i, 20 + i, 30 + i, 7] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    done: dict[int, Any] = {}

    def step() -> None:
        done.update({o.request_id: o.token_ids for o in llm.step() if o.finish_reason})

    ids = [llm.add_request(prompt, params, BACKGROUND) for prompt in prompts[:2]]
    for _ in range(3):
        step()
    ids += [llm.add_request(prompt, params) for prompt in prompts[2:]]
    while not llm.is_finished():
        step()
        llm.engine.check_integrity()
    llm.exit()
    reference = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float32").eval()
    assert_greedy(reference, prompts, [done[i] for i in ids])
