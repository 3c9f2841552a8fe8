"""Several continuations of one prompt: what they share, what each is, and how they end, wait and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import history_model
from byte_model import replying_engine
from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.llm_engine import LLMEngine
from engine.noise import fork_seed
from engine.outputs import StepOutput
from engine.sampler import BAD_TOKEN
from engine.status import EngineStatus, LoadStatus
from history_model import fork_token, history_engine

PROMPT = [5, 6, 7, 8, 9, 10]


def tokens(count: int, n: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, n=n)


def continuations(prompt: list[int], count: int, n: int) -> list[list[int]]:
    """What each must be."""
    histories = [list(prompt) for _ in range(n)]
    for index, history in enumerate(histories):
        for _ in range(count):
            history.append(fork_token(history, index))
    return [history[len(prompt) :] for history in histories]


def drain(engine: LLMEngine) -> tuple[dict[tuple[int, int], list[int]], list[StepOutput]]:
    """Ids by (request, continuation), and the outputs that ended one."""
    ids: dict[tuple[int, int], list[int]] = {}
    ends = []
    for _ in range(2000):
        if engine.is_finished():
            assert engine.blocks.num_active == 0
            return ids, ends
        for output in engine.step():
            ids.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
            if output.finish_reason:
                ends.append(output)
        engine.check_integrity()
    raise AssertionError("requests hang")


def kinds(engine: LLMEngine, kind: str) -> int:
    return sum(e.count for e in engine.events.since(0) if e.kind == kind)


def test_the_prompt_is_computed_once_and_only_its_partial_block_is_copied() -> None:
    engine = history_engine(32, 4)
    request = engine.add_request(PROMPT, tokens(2))
    engine.step()
    tables = [seq.block_table for seq in engine.scheduler.running]
    assert len(tables) == 3 and tables[0] == tables[1] == tables[2], "they share the whole prompt"
    assert engine.blocks.num_active == 2
    engine.step()
    engine.check_integrity()
    assert engine.stats.prefill_tokens == len(PROMPT)
    assert kinds(engine, "copy") == 2, "of three writers the last has the block for itself"
    assert engine.blocks.num_active == 0 and engine.is_finished()
    assert kinds(engine, "allocate") == 2
    ids, _ = drain(engine)
    assert request and not ids


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy() -> None:
    engine = history_engine(32, 4)
    request = engine.add_request(PROMPT[:4], tokens(6))
    ids, _ = drain(engine)
    assert kinds(engine, "copy") == 0
    assert [ids[request, i] for i in range(3)] == continuations(PROMPT[:4], 6, 3)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_each_continuation_is_its_own_whatever_the_blocks(block_size: int, caching: bool) -> None:
    engine = history_engine(64, block_size, max_num_batched_tokens=9, enable_prefix_caching=caching)
    requests = [engine.add_request([i, *PROMPT], tokens(9, n)) for i, n in enumerate((1, 2, 4))]
    ids, ends = drain(engine)
    for i, n in enumerate((1, 2, 4)):
        assert [ids[requests[i], k] for k in range(n)] == continuations([i, *PROMPT], 9, n)
    assert sorted(e.request_id for e in ends if e.ends_request) == requests
    assert len(ends) == 7


def test_more_continuations_than_run_at_once_take_turns() -> None:
    engine = history_engine(64, 4, max_num_seqs=2)
    request = engine.add_request(PROMPT, tokens(7, 5))
    other = engine.add_request([1, 2], tokens(3, 1))
    ids, ends = drain(engine)
    assert [ids[request, i] for i in range(5)] == continuations(PROMPT, 7, 5)
    assert ids[other, 0] == continuations([1, 2], 3, 1)[0]
    assert [e.index for e in ends if e.request_id == request and e.ends_request] == [ends[-1].index]


def test_a_preempted_continuation_is_computed_again() -> None:
    engine = history_engine(9, 4)
    first = engine.add_request(PROMPT, tokens(14, 2))
    second = engine.add_request(PROMPT[::-1], tokens(14, 2))
    ids, _ = drain(engine)
    assert engine.stats.num_preemptions > 0
    for request, prompt in ((first, PROMPT), (second, PROMPT[::-1])):
        assert [ids[request, i] for i in range(2)] == continuations(prompt, 14, 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_continuations(steps: int) -> None:
    engine = history_engine(32, 4, max_num_seqs=4, max_num_batched_tokens=4)
    request = engine.add_request(PROMPT, tokens(20))
    other = engine.add_request([1, 2], tokens(10, 1))
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.check_integrity()
    engine.abort(request)
    _, ends = drain(engine)
    aborted = [e for e in ends if e.request_id == request]
    assert [(e.index, e.finish_reason) for e in aborted] == [(i, "abort") for i in range(3)]
    assert [e.ends_request for e in aborted] == [False, False, True]
    assert [e.finish_reason for e in ends if e.request_id == other] == ["length"]
    assert len([e for e in engine.events.since(0) if e.kind == "abort"]) == 1


def test_one_continuation_can_be_ended_alone() -> None:
    engine = history_engine(32, 4)
    request = engine.add_request(PROMPT, tokens(6))
    first = {output.index: output.new_token_ids for output in engine.step()}
    engine.abort(request, "stop", 0)
    ids, ends = drain(engine)
    assert [(e.index, e.finish_reason) for e in ends] == [(0, "stop"), (1, "length"), (2, "length")]
    assert [first[i] + ids[request, i] for i in (1, 2)] == continuations(PROMPT, 6, 3)[1:]


def test_several_continuations_are_one_request_that_runs_and_ends() -> None:
    engine = history_engine(32, 4, max_num_seqs=2)
    several, single = engine.add_request(PROMPT, tokens(6)), engine.add_request([1, 2], tokens(4, 1))
    engine.step()
    status = EngineStatus.of(engine, LoadStatus())
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 2
    assert (status.running, status.waiting) == (1, 1)
    drain(engine)
    finished = {event.request_id: event.count for event in engine.events.since(0) if event.kind == "finish"}
    assert finished == {several: 3 * 6, single: 4}


def test_broken_logits_end_every_continuation_that_is_drawn_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_model, "fork_token", lambda history, index: BAD_TOKEN if history[0] == PROMPT[0] else 7)
    engine = history_engine(32, 4)
    request, other = engine.add_request(PROMPT, tokens(6)), engine.add_request([1, 2], tokens(4, 1))
    ids, ends = drain(engine)
    assert [(e.index, e.finish_reason) for e in ends if e.request_id == request] == [(i, "error") for i in range(3)]
    assert ids[other, 0] == [7] * 4


def test_a_prompt_that_cannot_be_served_ends_every_continuation() -> None:
    engine = history_engine(8, 4)
    engine.add_request([1] * 70, tokens(2))
    _, ends = drain(engine)
    assert [(e.index, e.finish_reason, e.ends_request) for e in ends] == [
        (0, "error", False),
        (1, "error", False),
        (2, "error", True),
    ]


# -- what reaches the reader ------------------------------------------------------------------------------


def test_generate_returns_all_continuations_and_the_first_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.llm.LLMEngine", lambda config: history_engine(64, 4))
    llm = LLM("stand-in")
    out, single = llm.generate([PROMPT, [1, 2]], [tokens(8), tokens(3, 1)], use_tqdm=False)
    assert [o.token_ids for o in out.outputs] == continuations(PROMPT, 8, 3)
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert (out.token_ids, out.finish_reason) == (out.outputs[0].token_ids, "length")
    assert len(single.outputs) == 1 and llm.is_finished()


def test_a_stop_string_ends_its_own_continuation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replying_engine(monkeypatch, "hello world")  # the second begins a letter later
    monkeypatch.setattr("engine.llm.LLMEngine", lambda config: engine)
    out = LLM("stand-in").generate_single("hi\n", SamplingParams(n=2, stop="hello"))
    assert [(o.text, o.finish_reason, o.stop_reason) for o in out.outputs] == [
        ("", "stop", "hello"),
        ("ello world", "stop", None),
    ]


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    """Its steps take 2 ms, so that a reader has a chance to be first."""
    engine = history_engine(128, 4)
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: time.sleep(0.002) or launch(plan))
    monkeypatch.setattr("engine.llm_engine.LLMEngine", lambda config, progress: engine)
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    yield thread
    thread.shutdown()


async def test_a_stream_tells_its_continuations_apart_and_ends_with_the_last(thread: EngineThread) -> None:
    stream = thread.submit(PROMPT, tokens(9))
    got: dict[int, list[int]] = {}
    reasons = {}
    async for delta in stream:
        got.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason:
            reasons[delta.index] = delta.finish_reason
    assert [got[i] for i in range(3)] == continuations(PROMPT, 9, 3)
    assert reasons == dict.fromkeys(range(3), "length")
    assert [o.token_ids for o in stream.output().outputs] == continuations(PROMPT, 9, 3)


async def test_a_slow_reader_gets_one_delta_for_each_continuation(thread: EngineThread) -> None:
    stream = thread.submit(PROMPT, tokens(9))
    while not stream.output().finish_reason:  # noqa: ASYNC110  nothing is to be read meanwhile
        await asyncio.sleep(0.01)
    assert [(d.index, d.num_output_tokens) for d in [d async for d in stream]] == [(0, 9), (1, 9), (2, 9)]


async def test_an_aborted_stream_ends_with_every_continuation(thread: EngineThread) -> None:
    stream = thread.submit(PROMPT, tokens(50))
    assert (await anext(stream)).finish_reason is None
    stream.abort()
    assert {d.index: d.finish_reason async for d in stream if d.finish_reason} == dict.fromkeys(range(3), "abort")


def test_a_thread_without_an_event_loop_reads_them_too(thread: EngineThread) -> None:
    stream = thread.submit_blocking(PROMPT, tokens(5))
    assert {d.index for d in stream} == {0, 1, 2}
    assert [o.token_ids for o in stream.output().outputs] == continuations(PROMPT, 5, 3)


# -- the real model ---------------------------------------------------------------------------------------


def test_fork_seeds_are_all_different_and_in_range() -> None:
    seeds = [fork_seed(s, i) for s in (0, 1, 2**63 - 1) for i in range(16)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)
    assert fork_seed(7, 0) == 7


def test_a_seed_gives_every_continuation_the_same_tokens_alone_mixed_chunked_and_preempted(tiny_llama: Path) -> None:
    """Each is also what its own seed gives to a request of one continuation, whose block nobody shares."""
    prompt = [(i * 37) % 500 + 3 for i in range(21)]
    wanted = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "max_tokens": 10}
    more = {"logit_bias": {5: 3.0, 9: -100.0}, "logprobs": 2, "min_tokens": 4, "presence_penalty": 0.5}
    others = [SamplingParams(n=2, temperature=1.3, logprobs=5, max_tokens=12), SamplingParams(logit_bias={3: 5.0})]

    def run(batch: list[SamplingParams], **settings: int) -> list[list[int]]:
        llm = LLM(tiny_llama, device="cpu", dtype="float32", kvcache_block_size=4, **settings)
        prompts = [prompt] + [[i, *prompt[:9]] for i in range(len(batch) - 1)]
        outs = llm.generate(prompts[::-1], batch[::-1], use_tqdm=False)[-1]
        llm.engine.check_integrity()
        llm.exit()
        return [o.token_ids for o in outs.outputs]

    for extra in ({}, more):
        several = SamplingParams(seed=11, n=3, **wanted, **extra)  # type: ignore[arg-type]
        singles = [SamplingParams(seed=fork_seed(11, i), **wanted, **extra) for i in range(3)]  # type: ignore[arg-type]
        expected = [run([one], num_kvcache_blocks=64)[0] for one in singles]
        assert len({tuple(e) for e in expected}) == 3
        assert run([several], num_kvcache_blocks=64) == expected
        assert run([several, *others], num_kvcache_blocks=64, max_num_seqs=4, max_num_batched_tokens=7) == expected
        assert run([several, *others], num_kvcache_blocks=13) == expected
