"""What a step computes, who goes first, who gives way, and how requests that do not fit end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.llm_engine import LLMEngine
from engine.outputs import RequestPriority
from engine.sampling_params import SamplingParams
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from history_model import history_engine, next_token


@dataclass
class Result:
    """ids sampled, and the number of the step that brought each."""

    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    preemptions: int = 0
    cached: int = 0


def tokens(count: int) -> SamplingParams:
    """Exactly that many tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What an engine with room enough must sample."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class Driver:
    """Steps an engine, checks its books after every step, and keeps what each request got."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.results: dict[int, Result] = {}
        self.plans: list[StepPlan] = []
        self.order: list[int] = []  # requests as they ended
        launch = engine.runner.launch

        def recording(plan: StepPlan) -> object:
            self.plans.append(plan)
            return launch(plan)

        engine.runner.launch = recording  # type: ignore[method-assign]

    def add(self, prompt: list[int], count: int, priority: RequestPriority = RequestPriority.NORMAL) -> int:
        request_id = self.engine.add_request(prompt, tokens(count), priority)
        self.results[request_id] = Result()
        return request_id

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs = self.engine.step()
            self.engine.check_integrity()
            for output in outputs:
                result = self.results[output.request_id]
                assert result.reason is None, "an output after the last one"
                result.ids += output.new_token_ids
                result.steps += [len(self.plans)] * len(output.new_token_ids)
                result.reason, result.error = output.finish_reason, output.error
                result.preemptions = output.metrics.num_preemptions
                result.cached = output.num_cached_tokens
                if output.finish_reason is not None:
                    self.order.append(output.request_id)

    def drain(self) -> None:
        for _ in range(1000):
            if self.engine.is_finished():
                assert self.engine.blocks.num_active == 0
                return
            self.step()
        raise AssertionError("requests hang")


# -- what a step computes ---------------------------------------------------------------------------------


def test_decodes_come_before_prompt_tokens_and_a_step_keeps_to_its_budget() -> None:
    driver = Driver(history_engine(64, 4, max_num_seqs=4, max_num_batched_tokens=8))
    for i in range(6):
        driver.add([i] * (5 + 6 * i), 12)
    driver.drain()
    mixed = 0
    for plan in driver.plans:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items) <= 8
        assert len(plan.items) <= 4
        assert all(item.num_tokens == 1 and item.samples for item in plan.items[: plan.num_decodes])
        mixed += 0 < plan.num_decodes < len(plan.items)
    assert mixed > 3, "no step mixed decodes with prompt tokens"
    assert [len(r.ids) for r in driver.results.values()] == [12] * 6


def test_long_prompts_that_keep_arriving_never_make_a_running_stream_wait() -> None:
    driver = Driver(history_engine(200, 4, max_num_seqs=8, max_num_batched_tokens=16))
    stream = driver.add([1, 2, 3], 40)
    driver.step()
    for i in range(39):
        driver.add([i % 7, *range(50)], 2)
        driver.step()
    assert driver.results[stream].reason == "length"
    assert driver.results[stream].steps == list(range(1, 41)), "a step passed without a token for the stream"
    driver.drain()


def test_many_short_prompts_are_read_in_several_steps_and_longer_ones_in_steps_that_they_fill() -> None:
    """The first of a burst have their tokens while the others are read; beyond 2,048 tokens a step is computed as if it
    had the next power of two of them."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 2048}
    driver = Driver(history_engine(4096, 16, **limits))
    ids = [driver.add([i, i, *range(3, 66)] * 2, 2) for i in range(40)]
    driver.drain()
    prompts = [(len(plan.items) - plan.num_decodes, plan.num_tokens - plan.num_decodes) for plan in driver.plans]
    assert [count for count, _ in prompts if count] == [15, 15, 10]
    assert all(tokens <= 2048 for _, tokens in prompts)
    assert [driver.results[i].steps[0] for i in (ids[0], ids[15], ids[30])] == [1, 2, 3]

    # Prompts of so many tokens, in steps of their own and beside a decode.
    for length, alone, beside in (
        (88 * 10, [8, 2], [9, 1]),
        (88 * 6, [8, 8, 8], [15, 9]),
        (88 * 4, [8, 8, 8], [11, 11, 2]),
    ):
        for steps, decodes in ((alone, 0), (beside, 1)):
            driver = Driver(history_engine(4096, 16, **limits))
            for i in range(decodes):
                driver.add([90 + i], 40)
                driver.step()
            for i in range(sum(steps)):
                driver.add([i, *range(3, 90)] * (length // 88), 1)
            driver.drain()
            found = [len(plan.items) - plan.num_decodes for plan in driver.plans if plan.num_decodes == decodes]
            assert [count for count in found if count] == steps


def test_a_lowered_budget_bounds_prompt_tokens_but_no_decode_and_prompts_still_advance() -> None:
    driver = Driver(history_engine(64, 4, max_num_seqs=8, max_num_batched_tokens=32))
    for i in range(4):
        driver.add([i, i], 20)
    driver.step()
    driver.engine.scheduler.token_budget = 2
    late = driver.add(list(range(6)), 1)
    driver.step(6)
    for plan in driver.plans[1:]:
        assert plan.num_decodes == 4
        assert plan.num_tokens == 5
    assert driver.results[late].ids == continuation(list(range(6)), 1)
    driver.drain()


def test_two_identical_prompts_in_one_step_both_come_right_and_stay_findable() -> None:
    driver = Driver(history_engine(32, 4, max_num_batched_tokens=32))
    prompt = list(range(9))
    twins = [driver.add(prompt, 6), driver.add(prompt, 6)]
    driver.step()
    assert len(driver.plans[0].items) == 2
    driver.drain()
    third = driver.add(prompt, 6)
    driver.drain()
    for request_id in (*twins, third):
        assert driver.results[request_id].ids == continuation(prompt, 6)
    assert driver.results[third].cached == 8


def test_a_prompt_hits_what_another_has_written_of_the_same_prompt_so_far() -> None:
    driver = Driver(history_engine(32, 4, max_num_batched_tokens=8))
    prompt = list(range(30))
    first = driver.add(prompt, 3)
    driver.step(2)
    second = driver.add(prompt, 3)
    driver.drain()
    assert driver.results[second].cached >= 16
    assert driver.results[first].ids == driver.results[second].ids == continuation(prompt, 3)


@pytest.mark.parametrize("length", range(1, 14))
def test_the_second_turn_hits_every_full_block_of_the_first_the_reply_included(length: int) -> None:
    """The last token sampled is the one whose keys and values were never computed."""
    driver = Driver(history_engine(32, 4))
    prompt = list(range(length))
    first = driver.add(prompt, 7)
    driver.drain()
    turn = prompt + driver.results[first].ids + [50, 51]
    second = driver.add(turn, 5)
    driver.drain()
    assert driver.results[second].cached == (length + 7 - 1) // 4 * 4
    assert driver.results[second].ids == continuation(turn, 5)


# -- who goes first, who gives way ------------------------------------------------------------------------


def test_requests_are_admitted_by_priority_then_by_arrival() -> None:
    driver = Driver(history_engine(32, 4, max_num_seqs=1))
    P = RequestPriority
    added = [(p, driver.add([i], 2, p)) for i, p in enumerate((P.BACKGROUND, P.LOW, P.HIGH, P.NORMAL, P.LOW, P.HIGH))]
    driver.drain()
    assert driver.order == [request_id for p, request_id in sorted(added, key=lambda a: (-a[0], a[1]))]


def test_an_urgent_prompt_does_not_wait_until_a_long_one_of_lower_priority_is_read() -> None:
    driver = Driver(history_engine(64, 4, max_num_batched_tokens=8))
    long = driver.add(list(range(60)), 1, RequestPriority.LOW)
    driver.step(2)
    urgent = driver.add([9, 9, 9], 4, RequestPriority.HIGH)
    driver.drain()
    assert driver.results[urgent].steps[0] == 3
    assert driver.results[long].ids == continuation(list(range(60)), 1)


def test_the_lowest_priority_then_the_latest_arrival_is_preempted_first() -> None:
    driver = Driver(history_engine(14, 4, max_num_seqs=4))
    low = driver.add([1] * 7, 20, RequestPriority.LOW)
    high = driver.add([2] * 7, 20, RequestPriority.HIGH)
    early = driver.add([3] * 7, 20)
    late = driver.add([4] * 7, 20)
    driver.drain()
    preempted = [e.request_id for e in driver.engine.events.since(0) if e.kind == "preempt"]
    assert preempted[:2] == [low, late]
    assert driver.results[high].preemptions == driver.results[early].preemptions == 0
    for request_id, prompt in ((low, 1), (high, 2), (early, 3), (late, 4)):
        assert driver.results[request_id].ids == continuation([prompt] * 7, 20)


def test_a_decode_that_is_preempted_for_one_behind_it_leaves_the_plan_that_it_was_in_already() -> None:
    """Low runs first and is planned first, with room in its block; normal then needs a block that only low has."""
    driver = Driver(history_engine(4, 4, max_num_seqs=2, max_num_batched_tokens=16))
    scheduler, left = driver.engine.scheduler, []
    unplan = scheduler._unplan

    def watched(plan: StepPlan, seq: Sequence) -> None:
        before = len(plan.items)
        unplan(plan, seq)
        left.extend([seq.request_id] * (before - len(plan.items)))

    scheduler._unplan = watched  # type: ignore[method-assign]
    low = driver.add([1] * 4, 9, RequestPriority.LOW)
    driver.step()
    normal = driver.add([2] * 6, 9)
    driver.drain()
    assert left == [low]
    assert driver.results[low].ids == continuation([1] * 4, 9)
    assert driver.results[normal].ids == continuation([2] * 6, 9)
    for plan in driver.plans:
        assert plan.num_tokens == sum(item.num_tokens for item in plan.items)
        assert all(item.num_tokens == 1 and item.samples for item in plan.items[: plan.num_decodes])


def test_a_preempted_request_hits_its_own_blocks_and_ends_as_if_never_interrupted() -> None:
    driver = Driver(history_engine(10, 4, max_num_seqs=4))
    prompts = [[i, i + 1, i + 2, i, i] for i in range(4)]
    ids = [driver.add(p, 24) for p in prompts]
    driver.drain()
    assert sum(driver.results[i].preemptions for i in ids) > 2
    assert [driver.results[i].ids for i in ids] == [continuation(p, 24) for p in prompts]
    preempted = {e.request_id for e in driver.engine.events.since(0) if e.kind == "preempt"}
    assert preempted & {e.request_id for e in driver.engine.events.since(0) if e.kind == "hit"}


def test_a_preempted_request_still_reports_the_hits_of_its_first_admission() -> None:
    """What came out of the cache again afterwards was its own work, not a reuse of another turn."""
    driver = Driver(history_engine(10, 4, max_num_seqs=4))
    ids = [driver.add([i] * 6, 24) for i in range(3)]
    driver.drain()
    assert driver.engine.stats.num_preemptions > 0
    assert [driver.results[i].cached for i in ids] == [0, 0, 0]
    assert driver.engine.stats.cached_tokens == 0


# -- what does not fit ------------------------------------------------------------------------------------


def test_a_prompt_longer_than_max_model_len_ends_at_once_with_both_numbers_and_others_go_on() -> None:
    driver = Driver(history_engine(32, 4, max_model_len=20))
    other = driver.add([5, 6], 4)
    driver.step()
    refused = driver.add([1] * 20, 4)
    driver.step()
    result = driver.results[refused]
    assert result.reason == "error"
    assert "20 tokens" in result.error and "19" in result.error
    driver.drain()
    assert driver.results[other].ids == continuation([5, 6], 4)


def test_a_prompt_longer_than_the_pool_ends_at_once_with_both_numbers_and_others_go_on() -> None:
    driver = Driver(history_engine(3, 4))
    other = driver.add([5, 6], 4)
    refused = driver.add([1] * 13, 4)
    driver.step()
    result = driver.results[refused]
    assert result.reason == "error"
    assert "13 tokens" in result.error and "holds 12" in result.error
    driver.drain()
    assert driver.results[other].ids == continuation([5, 6], 4)


def test_a_prompt_that_fills_the_pool_exactly_yields_a_token() -> None:
    driver = Driver(history_engine(3, 4))
    full = driver.add([1] * 12, 4)
    driver.drain()
    assert driver.results[full].ids == continuation([1] * 12, 1)
    assert driver.results[full].reason == "length"


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_that_outgrows_the_pool_ends_with_length(caching: bool) -> None:
    driver = Driver(history_engine(3, 4, enable_prefix_caching=caching))
    big, small = driver.add([1] * 5, 50), driver.add([2], 3)
    driver.drain()
    assert driver.results[big].reason == "length"
    assert driver.results[big].ids == continuation([1] * 5, 8)  # 12 slots, and the token sampled from the last one
    assert driver.results[small].ids == continuation([2], 3)


def test_several_sequences_that_each_outgrow_the_pool_all_end() -> None:
    driver = Driver(history_engine(4, 4, max_num_seqs=3))
    ids = [driver.add([i] * 5, 50) for i in range(3)]
    driver.drain()
    for i, request_id in enumerate(ids):
        assert driver.results[request_id].reason == "length"
        assert driver.results[request_id].ids == continuation([i] * 5, 12)


@pytest.mark.parametrize(("length", "yields"), [(19, 1), (18, 2), (1, 19)])
def test_prompt_and_output_never_pass_max_model_len(length: int, yields: int) -> None:
    driver = Driver(history_engine(32, 4, max_model_len=20))
    request = driver.add([3] * length, 50)
    driver.drain()
    assert driver.results[request].ids == continuation([3] * length, yields)
    assert driver.results[request].reason == "length"


# -- abort ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "steps"), [("waiting", 0), ("mid-prefill", 2), ("mid-decode", 9)])
def test_an_abort_frees_the_blocks_once_and_leaves_the_others_alone(moment: str, steps: int) -> None:
    driver = Driver(history_engine(40, 4, max_num_seqs=2, max_num_batched_tokens=8))
    other = driver.add([8, 8, 8], 25)
    victim = driver.add(list(range(30)), 20)
    driver.step(steps)
    seq = driver.engine.requests.live[victim]
    assert {
        "waiting": not seq.block_table,
        "mid-prefill": 0 < seq.num_computed_tokens < 30,
        "mid-decode": seq.num_output_tokens > 0,
    }[moment]
    driver.engine.abort(victim)
    driver.engine.check_integrity()
    assert driver.engine.blocks.num_active == len(driver.engine.requests.live[other].block_table)
    driver.engine.abort(victim)
    driver.engine.abort(10**9)
    driver.engine.check_integrity()
    driver.step()
    assert driver.results[victim].reason == "abort"
    driver.drain()
    driver.engine.abort(victim)
    driver.engine.abort(other)
    assert driver.engine.is_finished(), "an abort after the end left something to do"
    assert driver.results[other].ids == continuation([8, 8, 8], 25)
    assert [e.kind for e in driver.engine.events.since(0) if e.request_id == victim].count("abort") == 1


def test_an_abort_while_preempted_ends_it() -> None:
    driver = Driver(history_engine(8, 4, max_num_seqs=3))
    ids = [driver.add([i] * 6, 20) for i in range(3)]
    while not driver.engine.scheduler.waiting:
        driver.step()
    victim = driver.engine.scheduler.waiting[0].request_id
    driver.engine.abort(victim)
    driver.drain()
    assert driver.results[victim].reason == "abort"
    assert [driver.results[i].reason for i in ids if i != victim] == ["length"] * 2


# -- a step that fails ------------------------------------------------------------------------------------


def test_a_step_that_is_interrupted_can_be_run_again() -> None:
    """Ctrl-C arrives in the forward pass: nothing that was planned counts as computed."""
    driver = Driver(history_engine(10, 4, max_num_seqs=4, max_num_batched_tokens=8))
    prompts = [list(range(i, i + 11)) for i in range(3)]
    ids = [driver.add(p, 12) for p in prompts]
    launch = driver.engine.runner.launch

    def interrupted(plan: StepPlan) -> object:
        launch(plan)
        raise KeyboardInterrupt

    for round_ in range(12):
        driver.engine.runner.launch = interrupted  # type: ignore[method-assign]
        if round_ == 5:
            driver.engine.abort(ids[2])
        with pytest.raises(KeyboardInterrupt):
            driver.engine.step()
        driver.engine.check_integrity()
        driver.engine.runner.launch = launch  # type: ignore[method-assign]
        driver.step()
    driver.drain()
    assert [driver.results[i].ids for i in ids[:2]] == [continuation(p, 12) for p in prompts[:2]]
    assert driver.results[ids[2]].reason == "abort", "the output of an abort was lost with the step"
