"""EngineThread and its asyncio faces: submitting from anywhere, slow readers, aborts, death and recovery."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

import history_model
from engine import engine_thread, heap, watchdog
from engine.config import EngineConfig
from engine.engine_thread import EngineDead, EngineNotReady, EngineThread, QueueFull
from engine.llm import AsyncLLM
from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.outputs import Delta, StepOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import StepPlan
from history_model import history_engine, next_token


def tokens(count: int) -> SamplingParams:
    """Exactly that many tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True)


def continuation(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class Bench:
    """What the patched LLMEngine builds: stand-in engines whose steps last `pause` seconds, every one kept."""

    def __init__(self) -> None:
        self.engines: list[LLMEngine] = []
        self.pause = 0.0
        self.may_load = threading.Event()
        self.may_load.set()
        self.load_error: Exception | None = None

    def build(self, config: EngineConfig, progress: Callable[[str, float], None]) -> LLMEngine:
        progress("loading weights", 12.5)
        while not self.may_load.wait(0.01):
            progress("loading weights", 12.5)
        if self.load_error is not None:
            raise self.load_error
        engine = history_engine(512, 4, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=1500)
        launch = engine.runner.launch

        def slowly(plan: object) -> object:
            time.sleep(self.pause)
            return launch(plan)  # type: ignore[arg-type]

        engine.runner.launch = slowly  # type: ignore[method-assign,assignment]
        self.engines.append(engine)
        return engine

    def break_down(self, error: Exception) -> None:
        """From now on every step of the newest engine fails, and not for what is in it."""

        def fail(meanwhile: object) -> list:
            raise error

        self.engines[-1].step = fail  # type: ignore[method-assign]

    def fail_every_launch(self, error: Exception) -> None:
        def fail(plan: object) -> object:
            raise error

        self.engines[-1].runner.launch = fail  # type: ignore[method-assign,assignment]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Its engines are ready without the collector's search of all that this process holds, a second of every test."""
    bench = Bench()
    monkeypatch.setattr(engine_thread, "settled_heap", nullcontext)
    monkeypatch.setattr("engine.llm_engine.LLMEngine", bench.build)
    return bench


@pytest.fixture
def engine(bench: Bench) -> Iterator[EngineThread]:
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    yield thread
    thread.shutdown()


async def read(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until the condition held; fails after `seconds`."""
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.005)
    return time.perf_counter() - started


# -- submitting -------------------------------------------------------------------------------------------


async def test_a_request_from_an_event_loop_streams_its_tokens(engine: EngineThread) -> None:
    stream = engine.submit([1, 2, 3], tokens(20))
    deltas = await read(stream)
    assert [t for d in deltas for t in d.token_ids] == continuation([1, 2, 3], 20)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].num_output_tokens) == ("length", 20)
    assert next(d.block_table for d in deltas if d.block_table)
    assert stream.output().metrics.ttft > 0


async def test_readers_are_woken_when_the_next_step_has_been_launched_and_before_the_wait_for_this_one(
    engine: EngineThread, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, calls = bench.engines[-1].runner, []
    runner.leads = True  # type: ignore[misc]
    launch, collect, deliver = runner.launch, runner.collect, engine._outbox.deliver
    monkeypatch.setattr(runner, "launch", lambda plan: (calls.append("launch"), launch(plan))[1])
    monkeypatch.setattr(runner, "collect", lambda handle: (calls.append("collect"), collect(handle))[1])
    monkeypatch.setattr(
        engine._outbox, "deliver", lambda outputs: (calls.extend(["tell"] * bool(outputs)), deliver(outputs))[1]
    )
    deltas = await read(engine.submit([1, 2, 3], tokens(4)))
    assert [t for d in deltas for t in d.token_ids] == continuation([1, 2, 3], 4)
    assert calls[:8] == ["launch", "launch", "collect", "launch", "tell", "collect", "launch", "tell"]
    assert calls[8:] == ["collect", "tell", "collect", "tell"]


async def test_a_request_that_a_token_ends_while_the_next_step_runs_is_told_so_at_once(
    engine: EngineThread, bench: Bench
) -> None:
    bench.engines[-1].runner.leads = True  # type: ignore[misc]
    reply = continuation([1, 2, 3], 3)
    stop = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=reply[2:])
    deltas = await asyncio.wait_for(read(engine.submit([1, 2, 3], stop)), 5)
    assert [t for d in deltas for t in d.token_ids] == reply[:2] and deltas[-1].finish_reason == "stop"


def test_a_request_from_a_plain_thread_streams_its_tokens(engine: EngineThread) -> None:
    deltas = list(engine.submit_blocking([1, 2, 3], tokens(20)))
    assert [t for d in deltas for t in d.token_ids] == continuation([1, 2, 3], 20)
    assert deltas[-1].finish_reason == "length"


def test_event_loops_and_threads_submit_at_the_same_time(engine: EngineThread) -> None:
    got: dict[int, list[int]] = {}

    async def in_a_loop(prompts: list[int]) -> None:
        streams = {p: engine.submit([p], tokens(30)) for p in prompts}
        await asyncio.gather(*(read(s) for s in streams.values()))
        got.update((p, s.output().token_ids) for p, s in streams.items())

    def in_a_thread(prompt: int) -> None:
        got[prompt] = [t for d in engine.submit_blocking([prompt], tokens(30)) for t in d.token_ids]

    workers = [threading.Thread(target=asyncio.run, args=(in_a_loop(list(range(n, n + 5))),)) for n in (0, 10)]
    workers += [threading.Thread(target=in_a_thread, args=(p,)) for p in (20, 21)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert got == {p: continuation([p], 30) for p in (*range(5), *range(10, 15), 20, 21)}


async def test_a_slow_reader_gets_everything_in_few_merged_deltas(engine: EngineThread) -> None:
    stream = engine.submit([1, 2, 3], tokens(60))
    first = await anext(stream)
    await until(lambda: stream.output().finish_reason is not None, 20)
    rest = await read(stream)
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == continuation([1, 2, 3], 60)
    assert rest[0].finish_reason == "length"


async def test_an_event_loop_is_woken_once_a_step_however_many_streams_it_reads(
    engine: EngineThread, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    by_engine: list[object] = []

    def counting(callback: Callable, *args: object, **kwargs: object) -> object:
        if threading.current_thread().name == "engine":
            by_engine.append(callback)
        return wake(callback, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    bench.pause = 0.002
    streams = [engine.submit([i], tokens(25)) for i in range(12)]
    await asyncio.gather(*(read(s) for s in streams))
    assert [len(s.output().token_ids) for s in streams] == [25] * 12
    assert 25 <= len(by_engine) <= bench.engines[0].stats.num_steps


async def test_hundreds_of_streams_at_once_each_get_their_own_tokens(engine: EngineThread) -> None:
    streams = [engine.submit([i % 90, i // 90, 5], tokens(10)) for i in range(400)]
    await asyncio.gather(*(read(s) for s in streams))
    for i, stream in enumerate(streams):
        assert stream.output().token_ids == continuation([i % 90, i // 90, 5], 10)
    assert (engine.status().running, engine.status().waiting, engine.status().kv["active"]) == (0, 0, 0)


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named"), [([], "0 tokens"), ([1, 97], "token id 97"), ([-1], "token id -1"), ([1.5], "1.5")]
)
async def test_a_bad_prompt_is_refused_where_it_is_submitted(engine: EngineThread, prompt: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine.submit(prompt, tokens(3))
    assert await read(engine.submit([1], tokens(3)))


async def test_a_bad_priority_is_refused_where_it_is_submitted_and_hurts_nobody(engine: EngineThread) -> None:
    with pytest.raises(ValueError, match="priority=99"):
        engine.submit([1], tokens(3), priority=99)  # type: ignore[arg-type]
    assert (await read(engine.submit([1], tokens(3))))[-1].finish_reason == "length"


async def test_too_long_a_prompt_ends_with_an_error_that_has_both_numbers_and_others_go_on(
    engine: EngineThread,
) -> None:
    other = engine.submit([1], tokens(30))
    (delta,) = await read(engine.submit([2] * 1500, tokens(3)))
    assert delta.finish_reason == "error"
    assert "1500 tokens" in delta.error and "1499" in delta.error
    assert len(await read(other)) > 0 and other.output().token_ids == continuation([1], 30)


async def test_a_full_queue_refuses_with_the_limit_and_takes_requests_again_later(
    engine: EngineThread, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "MAX_UNFINISHED", 3)
    bench.pause = 0.01
    streams = [engine.submit([i], tokens(20)) for i in range(3)]
    with pytest.raises(QueueFull, match="limit is 3"):
        engine.submit([9], tokens(20))
    await asyncio.gather(*(read(s) for s in streams))
    assert await read(engine.submit([9], tokens(2)))


async def test_a_request_before_the_model_is_loaded_is_told_the_stage(bench: Bench) -> None:
    bench.may_load.clear()
    engine = EngineThread(EngineConfig())
    with pytest.raises(EngineNotReady):
        engine.submit([1], tokens(2))
    engine.start()
    await until(lambda: engine.status().load.stage == "loading weights", 5)
    assert not engine.status().ready
    with pytest.raises(EngineNotReady, match="loading weights"):
        engine.submit([1], tokens(2))
    with pytest.raises(EngineNotReady):
        engine.encode([1])
    bench.may_load.set()
    assert await asyncio.to_thread(engine.wait_until_settled, 5)
    assert engine.status().ready
    assert await read(engine.submit([1], tokens(2)))
    engine.shutdown()


def test_an_engine_is_ready_and_says_so_at_the_same_moment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    collecting, may_go_on = threading.Event(), threading.Event()

    @contextmanager
    def slowly() -> Iterator[None]:
        collecting.set()
        assert may_go_on.wait(10)
        yield

    monkeypatch.setattr(engine_thread, "settled_heap", slowly)
    engine = EngineThread(EngineConfig())
    engine.start()
    assert collecting.wait(10)
    status = engine.status()
    assert (status.ready, status.load.stage) == (False, "loading weights")
    may_go_on.set()
    assert engine.wait_until_settled(10)
    status = engine.status()
    assert (status.ready, status.load.stage) == (True, "ready")
    engine.shutdown()


# -- abort ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stream", "engine"])
async def test_an_abort_frees_the_engine_at_once_and_keeps_the_figures(
    engine: EngineThread, bench: Bench, how: str
) -> None:
    bench.pause = 0.02
    stream = engine.submit([1, 2, 3, 4, 5], tokens(1000))
    await anext(stream)
    stream.abort() if how == "stream" else engine.abort(stream.request_id)
    await until(lambda: engine.status().running == 0, 5)
    assert engine.status().kv["active"] == 0
    last = (await read(stream))[-1]
    assert (last.finish_reason, last.num_prompt_tokens) == ("abort", 5)
    assert last.num_output_tokens == len(stream.output().token_ids) > 0
    stream.abort()
    engine.abort(stream.request_id)
    engine.abort(10**9)
    assert await read(engine.submit([1], tokens(2)))


async def test_an_abort_right_after_submitting_ends_the_stream(engine: EngineThread) -> None:
    stream = engine.submit([1], tokens(1000))
    stream.abort()
    assert (await asyncio.wait_for(read(stream), 20))[-1].finish_reason == "abort"


def test_requests_of_an_event_loop_that_was_closed_are_given_up(engine: EngineThread, bench: Bench) -> None:
    bench.pause = 0.005

    async def leave() -> None:
        await anext(engine.submit([1], tokens(1000)))

    asyncio.run(leave())
    asyncio.run(until(lambda: engine.status().running == 0, 10))
    assert list(engine.submit_blocking([2], tokens(2)))


# -- death and recovery -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
async def test_when_the_engine_dies_every_stream_gets_the_root_cause_and_a_retry_serves_again(
    engine: EngineThread, bench: Bench
) -> None:
    bench.pause = 0.01
    streams = [engine.submit([i], tokens(1000)) for i in range(80)]  # more than run at once
    blocking = engine.submit_blocking([7], tokens(1000))
    await anext(streams[0])
    bench.break_down(RuntimeError("the device fell off the bus"))
    ends = await asyncio.wait_for(asyncio.gather(*(read(s) for s in streams)), 20)
    ends.append(list(blocking))
    for deltas in ends:
        assert deltas[-1].finish_reason == "error"
        assert deltas[-1].error == "RuntimeError: the device fell off the bus"
    with pytest.raises(EngineDead, match="fell off the bus"):
        engine.submit([1], tokens(2))
    status = engine.status()
    assert (status.ready, status.running) == (False, 0)
    assert "fell off the bus" in status.error

    engine.retry()
    assert await asyncio.to_thread(engine.wait_until_settled, 5)
    assert engine.status().ready and engine.status().error is None
    again = engine.submit([1, 2], tokens(20))
    await read(again)
    assert again.output().token_ids == continuation([1, 2], 20)
    assert len(bench.engines) == 2


async def test_who_cannot_be_told_of_the_engine_s_end_keeps_nothing_from_being_released(
    engine: EngineThread, bench: Bench
) -> None:
    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    engine.on_death = fail
    released = threading.Event()
    ends = bench.engines[0].exit
    bench.engines[0].exit = lambda: (ends(), released.set())  # type: ignore[method-assign]
    bench.break_down(RuntimeError("the device fell off the bus"))
    assert (await read(engine.submit([1], tokens(5))))[-1].finish_reason == "error"
    assert await asyncio.to_thread(released.wait, 5)


async def test_when_every_launch_fails_whatever_is_in_it_everybody_gets_the_root_cause_within_a_second(
    engine: EngineThread, bench: Bench
) -> None:
    bench.pause = 0.01
    died: list[str | None] = []
    engine.on_death = lambda: died.append(engine.status().error)
    streams = [engine.submit([i], tokens(1000)) for i in range(80)]  # more than run at once
    await anext(streams[0])
    bench.fail_every_launch(RuntimeError("the weights are gone"))
    for deltas in await asyncio.wait_for(asyncio.gather(*(read(s) for s in streams)), 20):
        assert deltas[-1].error == "RuntimeError: the weights are gone"
    with pytest.raises(EngineDead, match="weights are gone"):
        engine.submit([1], tokens(2))
    await until(lambda: bool(died), 10)
    assert died == ["RuntimeError: the weights are gone"]


async def test_a_stream_s_last_word_at_the_engine_s_death_keeps_its_figures(engine: EngineThread, bench: Bench) -> None:
    bench.pause = 0.005
    await read(engine.submit([1] * 9, tokens(2)))
    stream = engine.submit([1] * 9, tokens(1000))
    blocking = engine.submit_blocking([1] * 9, tokens(1000))
    first = await anext(stream)
    next(iter(blocking))
    bench.break_down(RuntimeError("gone"))
    for last in ((await read(stream))[-1], list(blocking)[-1]):
        assert (last.finish_reason, last.error) == ("error", "RuntimeError: gone")
        assert (last.num_prompt_tokens, last.num_computed_tokens, last.num_cached_tokens) == (9, 9, 8)
        assert last.metrics.ttft > 0 and last.num_output_tokens > 0
    assert first.num_prompt_tokens == 9


async def test_a_step_that_never_ends_ends_every_stream_with_the_deadline_and_nothing_waits_for_it(
    engine: EngineThread, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "MARGIN", 1)
    died = threading.Event()
    engine.on_death = died.set
    bench.pause = 0.01
    streams = [engine.submit([i], tokens(1000)) for i in range(5)]
    await anext(streams[0])
    stuck, launch = threading.Event(), bench.engines[0].runner.launch

    def hang(plan: StepPlan) -> StepHandle:
        stuck.wait(20)
        return launch(plan)

    bench.engines[0].runner.launch = hang  # type: ignore[method-assign]
    for deltas in await asyncio.wait_for(asyncio.gather(*(read(s) for s in streams)), 20):
        assert deltas[-1].finish_reason == "error" and "did not end within its deadline" in deltas[-1].error
    await until(died.is_set, 10)
    assert "deadline" in (engine.status().error or "") and not engine.status().ready
    with pytest.raises(EngineDead, match="deadline"):
        engine.submit([1], tokens(2))
    # It comes back after all: its thread ends, delivers nothing, and a retry serves again.
    stuck.set()
    await until(lambda: not any(t.name == "engine" for t in threading.enumerate()), 5)
    assert "deadline" in (engine.status().error or "")
    engine.retry()
    assert await asyncio.to_thread(engine.wait_until_settled, 5)
    assert [t for d in await read(engine.submit([5], tokens(20))) for t in d.token_ids] == continuation([5], 20)


def test_a_step_s_deadline_grows_with_its_work_and_with_what_steps_took_before() -> None:
    executor = history_engine(4, 4).executor
    dog = watchdog.Watchdog(executor, lambda error: None, seconds_per_token=0.5)
    dog.end()
    assert dog.deadline(256) == watchdog.PATIENCE_SECONDS + 128
    executor.longest = (2.0, 100)
    assert dog.deadline(1) == watchdog.PATIENCE_SECONDS + 2.0 * watchdog.MARGIN
    assert dog.deadline(300) == watchdog.PATIENCE_SECONDS + 6.0 * watchdog.MARGIN


async def test_a_slow_load_is_never_taken_for_a_stuck_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    bench.may_load.clear()
    engine = EngineThread(EngineConfig())
    engine.start()
    await asyncio.sleep(0.3)
    bench.may_load.set()
    assert await asyncio.to_thread(engine.wait_until_settled, 5)
    await asyncio.sleep(0.3)  # nor is an idle engine
    assert engine.status().ready
    engine.shutdown()


async def test_a_late_abort_of_a_request_that_died_with_the_engine_does_not_hit_a_new_one_nor_are_its_events_missed(
    engine: EngineThread, bench: Bench
) -> None:
    bench.break_down(RuntimeError("gone"))
    old = engine.submit([1], tokens(5))
    await read(old)
    last_event = bench.engines[0].events.last_seq
    engine.retry()
    await asyncio.to_thread(engine.wait_until_settled, 5)
    bench.pause = 0.002
    new = engine.submit([2], tokens(40))
    await anext(new)
    engine.abort(old.request_id)
    assert (await read(new))[-1].finish_reason == "length"
    kinds = [e.kind for e in engine.events(last_event)]
    assert kinds[0] == "allocate" and kinds[-1] == "finish", "events of the new engine are numbered as old ones"


async def test_a_request_in_the_moment_of_death_is_never_left_hanging(engine: EngineThread, bench: Bench) -> None:
    """Submissions race the dying thread: each is refused or ends with the cause."""
    bench.break_down(RuntimeError("gone"))
    streams, refused = [], 0
    async with asyncio.timeout(5):
        while refused < 50:
            try:
                streams.append(engine.submit([len(streams) % 90], tokens(5)))
            except EngineDead:
                refused += 1
            except QueueFull:  # it dies slowly on a busy machine
                pass
            await asyncio.sleep(0)
    for deltas in await asyncio.wait_for(asyncio.gather(*(read(s) for s in streams)), 20):
        assert deltas[-1].error == "RuntimeError: gone"
    assert streams


async def test_books_that_do_not_balance_stop_the_engine(
    engine: EngineThread, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_IDLE_CHECK_SECONDS", 0.02)
    await read(engine.submit([1, 2, 3, 4, 5], tokens(3)))
    bench.engines[0].blocks._records.refcount[3] += 1
    await read(engine.submit([1, 2, 3, 4, 5], tokens(3)))
    await until(lambda: engine.status().error is not None, 10)
    assert "block 3 has refcount" in engine.status().error


def test_a_model_that_cannot_be_served_is_said_in_one_line_and_may_be_tried_again(bench: Bench) -> None:
    bench.load_error = ValueError("no such model: nowhere")
    engine = EngineThread(EngineConfig(model="nowhere"))
    engine.start()
    assert engine.wait_until_settled(5)
    assert engine.status().error == "no such model: nowhere"
    assert engine.cause is bench.load_error
    with pytest.raises(EngineDead, match="no such model: nowhere"):
        engine.submit_blocking([1], tokens(2))
    bench.load_error = None
    engine.retry()
    assert engine.wait_until_settled(5)
    assert list(engine.submit_blocking([1], tokens(2)))
    engine.shutdown()


def test_a_retry_while_all_is_well_changes_nothing(engine: EngineThread, bench: Bench) -> None:
    engine.retry()
    engine.start()
    assert list(engine.submit_blocking([1], tokens(2)))
    assert len(bench.engines) == 1


# -- shutdown ---------------------------------------------------------------------------------------------


async def test_a_shutdown_ends_every_stream_with_abort_also_the_ones_not_taken_in_yet(
    engine: EngineThread, bench: Bench
) -> None:
    bench.pause = 0.05
    streams = [engine.submit([i], tokens(1000)) for i in range(5)]
    await anext(streams[0])
    streams += [engine.submit([i], tokens(1000)) for i in range(5)]
    engine.shutdown()
    for deltas in await asyncio.wait_for(asyncio.gather(*(read(s) for s in streams)), 20):
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("abort", None)
    assert len(streams[0].output().token_ids) > 0
    with pytest.raises(EngineDead, match="shut down"):
        engine.submit([1], tokens(2))
    assert not engine.status().ready
    engine.shutdown()


def test_a_shutdown_in_the_middle_of_loading_ends_the_thread(bench: Bench) -> None:
    bench.may_load.clear()
    engine = EngineThread(EngineConfig())
    engine.start()
    engine.shutdown()
    assert not any(t.name == "engine" for t in threading.enumerate())
    assert "shut down" in (engine.status().error or "")


def test_a_shutdown_of_an_engine_that_never_started_does_nothing() -> None:
    EngineThread(EngineConfig()).shutdown()


# -- AsyncLLM ---------------------------------------------------------------------------------------------


async def test_async_llm_generates_and_streams(bench: Bench) -> None:
    async with AsyncLLM("stand-in") as llm:
        out = await llm.generate([1, 2, 3], tokens(20))
        assert (out.token_ids, out["finish_reason"]) == (continuation([1, 2, 3], 20), "length")
        streamed = [t async for d in llm.stream([1, 2, 3], tokens(20)) for t in d.token_ids]
        assert streamed == out.token_ids
        outs = await asyncio.gather(*(llm.generate([i], tokens(12)) for i in range(30)))
        assert [o.token_ids for o in outs] == [continuation([i], 12) for i in range(30)]


async def test_async_llm_serves_three_hundred_streams_from_one_event_loop(bench: Bench) -> None:
    async def one(llm: AsyncLLM, i: int) -> list[int]:
        return [t async for d in llm.stream([i % 90, i // 90, 3], tokens(12)) for t in d.token_ids]

    async with AsyncLLM("stand-in") as llm:
        got = await asyncio.gather(*(one(llm, i) for i in range(300)))
        assert got == [continuation([i % 90, i // 90, 3], 12) for i in range(300)]
        status = llm.engine.status()
        assert (status.running, status.waiting, status.kv["active"]) == (0, 0, 0)


@pytest.mark.parametrize("blocking", [False, True], ids=["event loop", "thread"])
async def test_a_reader_that_never_reads_holds_its_reply_and_no_object_a_step(
    monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    count = 5000
    monkeypatch.setattr(
        "engine.llm_engine.LLMEngine",
        lambda config, progress: history_engine(1300, 4, max_model_len=count + 10, max_num_batched_tokens=64),
    )
    monkeypatch.setattr(history_model, "next_token", lambda history: len(history) % 90)  # at a step's cost, not n
    thread = EngineThread(EngineConfig())
    thread.start()
    assert await asyncio.to_thread(thread.wait_until_settled, 10)
    stream = (thread.submit_blocking if blocking else thread.submit)([1, 2, 3], tokens(count))
    unread: list[int] = []
    generated = thread._engine.stats  # type: ignore[union-attr]
    for share in (0.2, 1.0):
        await until(lambda share=share: generated.output_tokens >= count * share, 60)
        await asyncio.sleep(0.05)
        gc.collect()
        unread.append(sum(type(o) in (Delta, StepOutput) for o in gc.get_objects()))
    assert max(unread) < 500, unread  # what is on its way to the loop; a thousand steps had passed, or five
    deltas = await asyncio.to_thread(list, stream) if blocking else await read(stream)  # type: ignore[arg-type]
    assert len(deltas) == 1 and deltas[0].token_ids == [n % 90 for n in range(3, count + 3)]
    assert deltas[0].finish_reason == "length"
    thread.shutdown()


def test_what_is_loaded_is_kept_from_the_collector_while_the_engine_lives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "settled_heap", heap.settled_heap)
    thread, others = EngineThread(EngineConfig()), heap._num_frozen
    thread.start()
    assert thread.wait_until_settled(10)
    assert gc.get_freeze_count() > 1000 and heap._num_frozen == others + 1
    thread.shutdown()
    assert heap._num_frozen == others


async def test_a_reader_that_has_given_up_waiting_reads_on(engine: EngineThread, bench: Bench) -> None:
    bench.pause = 0.05
    stream = engine.submit([1, 2, 3], tokens(4))
    for _ in range(2):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.005)
    deltas = await asyncio.wait_for(read(stream), 10)
    assert [t for d in deltas for t in d.token_ids] == continuation([1, 2, 3], 4)


async def test_a_second_reader_beside_the_first_is_refused_and_the_first_reads_on(
    engine: EngineThread, bench: Bench
) -> None:
    bench.pause = 0.05
    stream = engine.submit([1, 2, 3], tokens(4))
    first = asyncio.create_task(read(stream))
    await asyncio.sleep(0.005)
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(stream)
    deltas = await asyncio.wait_for(first, 10)
    assert [t for d in deltas for t in d.token_ids] == continuation([1, 2, 3], 4)


async def test_cancelling_a_generate_aborts_its_request(bench: Bench) -> None:
    bench.pause = 0.02
    async with AsyncLLM("stand-in") as llm:
        task = asyncio.create_task(llm.generate([1], tokens(1000)))
        await until(lambda: llm.engine.status().running == 1, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: llm.engine.status().running == 0, 5)


async def test_leaving_a_stream_aborts_its_request(bench: Bench) -> None:
    bench.pause = 0.02
    async with AsyncLLM("stand-in") as llm:
        async for _ in llm.stream([1], tokens(1000)):
            break
        await until(lambda: llm.engine.status().running == 0, 5)


async def test_a_chat_with_an_engine_that_was_not_started_says_so() -> None:
    with pytest.raises(EngineNotReady, match="waiting to start"):
        await AsyncLLM("stand-in").chat([{"role": "user", "content": "Hi"}])


async def test_async_llm_raises_what_kept_the_model_from_loading(bench: Bench) -> None:
    bench.load_error = ValueError("no such model: nowhere")
    with pytest.raises(ValueError, match="no such model: nowhere"):
        await AsyncLLM("nowhere").__aenter__()
