"""Who is admitted next: ageing, and requests whose prefix is resident overtaking others, within bounds."""

from __future__ import annotations

import random
from array import array

import pytest

from engine import prefix_index
from engine.block_manager import BlockManager
from engine.outputs import RequestPriority
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.waiting_queue import AGING_STEPS, MAX_OVERTAKEN, WINDOW
from history_model import history_engine
from tests.engine.test_scheduler import Driver, Result, continuation

P = RequestPriority
WARM = list(range(40, 56))  # four blocks of four


def busy_driver(warm: int, **limits: int) -> tuple[Driver, int]:
    """One slot, taken for `warm` more steps, and WARM's blocks in the cache; with the blocker's id."""
    driver = Driver(history_engine(64, 4, max_num_seqs=1, max_num_batched_tokens=32, **limits))
    driver.add([*WARM, 1], 1)
    driver.drain()
    blocker = driver.add([2, 3], warm)
    driver.step()
    return driver, blocker


# -- ageing -----------------------------------------------------------------------------------------------


def test_a_low_request_gets_its_turn_although_urgent_ones_never_stop_coming() -> None:
    driver = Driver(history_engine(32, 4, max_num_seqs=1))
    driver.add([1], 2, P.HIGH)
    driver.step()
    low = driver.add([2, 2], 1, P.LOW)
    levels = P.HIGH - P.LOW
    for _ in range(levels * AGING_STEPS + 10):
        driver.add([3], 1, P.HIGH)
        driver.step()
    assert driver.results[low].ids == continuation([2, 2], 1)
    served = driver.results[low].steps[0]
    assert levels * AGING_STEPS <= served <= levels * AGING_STEPS + 5, "it yields to what came in that time, no more"


def test_a_request_yields_to_a_more_urgent_one_that_comes_a_little_later() -> None:
    driver = Driver(history_engine(32, 4, max_num_seqs=1))
    driver.add([1], AGING_STEPS // 2, P.HIGH)
    driver.step()
    normal = driver.add([2], 1)
    driver.step(AGING_STEPS // 4)
    high = driver.add([3], 1, P.HIGH)
    driver.drain()
    assert driver.order[-2:] == [high, normal]


@pytest.mark.parametrize("seed", range(5))
def test_requests_of_one_priority_are_admitted_as_they_came_where_nothing_is_resident(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(history_engine(64, 4, max_num_seqs=2, enable_prefix_caching=False))
    ids = []
    for _ in range(30):
        ids.append(driver.add([rng.randrange(90) for _ in range(rng.randint(1, 12))], rng.randint(1, 4)))
        driver.step(rng.randint(0, 2))
    driver.drain()
    first = [driver.results[i].steps[0] for i in ids]
    assert first == sorted(first)


# -- cache-aware order ------------------------------------------------------------------------------------


def test_a_request_whose_prefix_is_resident_overtakes_one_that_hits_nothing() -> None:
    driver, _ = busy_driver(4)
    cold = driver.add(list(range(20)), 1)
    warm = driver.add([*WARM, 9], 1)
    driver.drain()
    assert driver.order[-2:] == [warm, cold]
    assert driver.results[warm].cached == len(WARM)
    assert driver.results[cold].ids == continuation(list(range(20)), 1)


def test_the_longest_resident_prefix_goes_first_and_equal_ones_keep_their_order() -> None:
    driver, _ = busy_driver(4)
    added = [driver.add(prompt, 1) for prompt in ([1, 1, 1, 1, 1], [*WARM[:9]], [*WARM, 5], [*WARM, 6], [*WARM[:9], 7])]
    driver.drain()
    cold, short, long, long_too, short_too = added
    assert driver.order[-5:] == [long, long_too, short, short_too, cold]


def test_any_one_request_is_overtaken_at_most_eight_times() -> None:
    driver, _ = busy_driver(4)
    cold = driver.add(list(range(20)), 1)
    for i in range(WINDOW + 10):
        driver.add([*WARM, i], 1)
    driver.drain()
    assert driver.order[2:].index(cold) == MAX_OVERTAKEN == 8


@pytest.mark.parametrize("seed", range(8))
def test_overtakings_are_bounded_for_every_request_of_a_random_workload(seed: int) -> None:
    """Counted from outside: who was admitted before whom although it stood behind."""
    rng = random.Random(seed)
    driver = Driver(history_engine(24, 4, max_num_seqs=2, max_num_batched_tokens=16))
    heads = [[i] * 12 for i in range(3)]
    arrived: dict[int, int] = {}
    for step in range(120):
        for _ in range(rng.choice((0, 0, 1, 2))):
            tail = [rng.randrange(90) for _ in range(rng.randint(1, 5))]
            prompt = rng.choice(heads)[: rng.choice((0, 4, 8, 12))] + tail
            arrived[driver.add(prompt, rng.randint(1, 5))] = step
        driver.step()
    driver.drain()
    first = {i: (driver.results[i].steps[0], i) for i in arrived}
    overtaken = {i: sum(j > i and first[j][0] < first[i][0] for j in arrived) for i in arrived}
    assert max(overtaken.values()) > 0, "nobody was ever overtaken"
    # Tokens come in the order of admission but for prompts of several chunks, which two slots may turn about once.
    assert max(overtaken.values()) <= MAX_OVERTAKEN + 1


def test_a_resident_prefix_does_not_overtake_a_more_urgent_request() -> None:
    driver, _ = busy_driver(4)
    urgent = driver.add(list(range(20)), 1, P.HIGH)
    warm = driver.add([*WARM, 9], 1)
    driver.drain()
    assert driver.order[-2:] == [urgent, warm]


def test_nothing_overtakes_a_stream_that_was_preempted() -> None:
    driver = Driver(history_engine(9, 4, max_num_seqs=3, max_num_batched_tokens=64))
    first, second = driver.add([1] * 17, 14), driver.add([2] * 9, 14)
    driver.step()
    while not driver.engine.scheduler.waiting:
        driver.step()
    assert [seq.request_id for seq in driver.engine.scheduler.waiting] == [second]
    warm = driver.add([1] * 17, 1)  # shares more blocks of the first one than the second has of its own, and would fit
    had = len(driver.results[second].ids)
    driver.drain()
    assert driver.results[second].steps[had] <= driver.results[warm].steps[0]
    assert driver.results[first].ids == continuation([1] * 17, 14)
    assert driver.results[second].ids == continuation([2] * 9, 14)


def test_a_request_that_fits_thanks_to_its_resident_prefix_does_not_wait_behind_one_that_does_not_fit() -> None:
    driver = Driver(history_engine(9, 4, max_num_seqs=3, max_num_batched_tokens=32))
    holder = driver.add([*WARM, 1], 7)  # five blocks, then six
    driver.step()
    large = driver.add(list(range(24)), 1)  # six blocks: not while the holder runs
    warm = driver.add([*WARM, 9], 1)  # one block beside the four that it shares
    driver.step()
    assert driver.results[warm].reason == "length"
    driver.drain()
    assert driver.results[large].ids == continuation(list(range(24)), 1)
    assert driver.results[holder].preemptions == 0


def test_waiting_costs_no_hashing_anew_and_a_bounded_number_of_looks_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(history_engine(14, 4, max_num_seqs=2, max_num_batched_tokens=64))
    driver.add([7] * 40, 20)
    driver.step()
    for i in range(100):
        driver.add([*([7] * 24), *range(i % 5, 20)], 1)  # ten blocks: no room beside the first, whose head it shares
    driver.step()
    hashes, looks = [], []
    real_hash, real_look = prefix_index.xxhash.xxh3_128_digest, driver.engine.blocks.resident_prefix
    monkeypatch.setattr(prefix_index.xxhash, "xxh3_128_digest", lambda data: hashes.append(1) or real_hash(data))
    monkeypatch.setattr(driver.engine.blocks, "resident_prefix", lambda seq: looks.append(1) or real_look(seq))
    for _ in range(8):
        looks.clear()
        hashes.clear()
        driver.step()
        assert len(driver.engine.scheduler.running) == 1, "one was admitted: the pool is too large for this test"
        assert 0 < len(looks) <= 2 * WINDOW  # the queue is looked at before and after prompts that are under way
        assert len(hashes) <= 2, "the running one fills a block and the head hashes one block further, at most"


# -- streams ----------------------------------------------------------------------------------------------


def test_over_many_random_workloads_no_stream_waits_more_than_two_steps_unless_it_is_preempted() -> None:
    """Counts steps from token to token, for every request but BACKGROUND ones, which give way by definition."""
    longest, streams, preemptions = 0, 0, 0
    for seed in range(150):
        rng = random.Random(seed)
        slots = rng.randint(1, 5)
        driver = Driver(
            history_engine(
                rng.randint(2, 24),
                rng.choice((1, 4, 16)),
                max_num_seqs=slots,
                max_num_batched_tokens=rng.randint(slots, 24),
                max_model_len=48,
            )
        )
        seen: dict[int, tuple[int, int]] = {}  # request -> step of its last token, preemptions by then
        for step in range(1, 60):
            if rng.random() < 0.4:
                prompt = [rng.randrange(3)] * rng.randint(1, 8) + [rng.randrange(90) for _ in range(rng.randint(1, 30))]
                params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
                request = driver.engine.add_request(prompt, params, rng.choice(list(P)))
                driver.results[request] = Result()
            if seen and rng.random() < 0.05:
                driver.engine.abort(rng.choice(list(seen)))
            driver.engine.scheduler.token_budget = rng.randint(1, driver.engine.scheduler.max_num_batched_tokens)
            before = {i: len(r.ids) for i, r in driver.results.items()}
            driver.step()
            for seq in list(driver.engine.requests.live.values()):
                if seq.priority == P.BACKGROUND or not seq.num_output_tokens:
                    continue
                if len(driver.results[seq.request_id].ids) > before[seq.request_id]:
                    seen[seq.request_id] = (step, seq.metrics.num_preemptions)
                    streams += 1
                elif seq.metrics.num_preemptions > seen[seq.request_id][1]:
                    preemptions += 1  # it has to be admitted and computed again first
                else:
                    longest = max(longest, step - seen[seq.request_id][0])
                    assert step - seen[seq.request_id][0] < 2, f"{seq} waits for its token (seed {seed})"
    assert streams > 5000 and preemptions > 100, (streams, preemptions)
    assert longest <= 1


def test_a_preempted_sequence_goes_on_from_what_is_still_cached_of_its_blocks() -> None:
    found = [resident for pool in range(6, 16) for resident in _resumptions(pool)]
    assert sum(resident > 0 for resident in found) >= 5, found


def _resumptions(pool: int) -> list[int]:
    """Three streams of up to six blocks each; for every resumption, how many blocks of its history were there."""
    driver = Driver(history_engine(pool, 4, max_num_seqs=3, max_num_batched_tokens=64))
    blocks = driver.engine.blocks
    resumed: dict[int, int] = {}  # request -> blocks of its history that stood in the pool when it was admitted again
    admit = blocks.admit

    def recording(seq: Sequence, matched: list[int]) -> None:
        if seq.metrics.num_preemptions:
            resumed[seq.request_id] = _resident(blocks, seq)
        admit(seq, matched)

    blocks.admit = recording  # type: ignore[method-assign]
    ids = [driver.add([i, i + 1, i, i], 18) for i in range(3)]
    found = []
    for _ in range(200):
        resumed.clear()
        driver.step()
        starts = {item.seq.request_id: item.start for item in driver.plans[-1].items}
        for request_id, resident in resumed.items():
            assert starts[request_id] == 4 * resident, "it computed again what was there"
            found.append(resident)
        if driver.engine.is_finished():
            break
    assert [driver.results[i].ids for i in ids] == [continuation([i, i + 1, i, i], 18) for i in range(3)]
    return found


def _resident(blocks: BlockManager, seq: Sequence) -> int:
    """How many leading blocks of seq are in the pool, found by walking the contents without the index."""
    count, parent = 0, b""
    while 4 * (count + 1) < len(seq.token_ids):
        wanted = array("i", seq.token_ids[4 * count : 4 * count + 4]).tobytes()
        found = [c for c in blocks._index.contents if c and (c.parent, c.tokens) == (parent, wanted)]
        if not found:
            break
        count, parent = count + 1, found[0].hash
    return count
