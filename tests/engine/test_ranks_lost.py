"""The ranks die under the engine: every request is computed again and ends with the tokens that it would have had."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import Any

import pytest

from engine import EngineConfig
from engine.engine_thread import EngineThread
from engine.llm_engine import LLMEngine
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.tensor_parallel import RanksLost
from history_model import EOS, expected_beams, expected_output, fork_token, likeliest, prompt_entries
from wired_runner import wired_engine


def run(engine: LLMEngine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    order = [engine.add_request(p, SamplingParams(max_tokens=max_tokens)) for p in prompts]
    got: dict[int, list[int]] = {request_id: [] for request_id in order}
    ended = set()
    while not engine.is_finished():
        for output in engine.step():
            assert output.request_id not in ended
            got[output.request_id] += [token for token in output.new_token_ids if token != EOS]
            if output.finish_reason:
                assert output.finish_reason in ("stop", "length")
                ended.add(output.request_id)
        engine.check_integrity()
    assert ended == set(order)
    return [got[request_id] for request_id in order]


@pytest.mark.parametrize("in_collect", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_lost_doubled_or_changed_when_the_ranks_are(seed: int, in_collect: bool) -> None:
    """Mid-prefill, mid-decode, with cached prefixes that are gone too, and with some preempted already."""
    rng = random.Random(seed)
    losses = sorted(rng.sample(range(0, 60, 2), 8))
    engine, runner = wired_engine(12, 4, losses, in_collect, max_num_batched_tokens=rng.randrange(8, 20))
    prompts = [[1, 2, 3, 4, 5] * rng.randrange(1, 4) + [rng.randrange(90)] for _ in range(10)]
    expected = [expected_output(p, 12, 64) for p in prompts]
    assert run(engine, prompts, 12) == expected
    assert runner.num_rebuilt == len([n for n in losses if n < len(runner.sizes)]) > 1
    assert run(engine, prompts, 12) == expected  # what is cached by now is right, too


@pytest.mark.parametrize("in_collect", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_forks_searches_and_logprobs_survive_the_loss_of_the_ranks(seed: int, in_collect: bool) -> None:
    """Lost between a prompt's chunks, before its forks are born and after, in the midst of a search, with copies on
    write still to be done, and with some of it preempted already."""
    rng = random.Random(seed)
    losses = sorted(rng.sample(range(0, 60, 2), 10))
    engine, runner = wired_engine(24, 4, losses, in_collect, max_num_batched_tokens=rng.randrange(8, 20))
    asked: dict[int, tuple[list[int], SamplingParams | BeamSearchParams]] = {}
    for i in range(9):
        prompt = [1, 2, 3, 4, 5] * rng.randrange(1, 4) + [rng.randrange(90)]
        plain = SamplingParams(max_tokens=10, ignore_eos=True, n=1 + i % 4, logprobs=2, prompt_logprobs=i % 3)
        params = BeamSearchParams(3, 7, early_stopping=True) if i % 3 == 2 else plain
        asked[engine.add_request(prompt, params)] = (prompt, params)
    tokens, logprobs = defaultdict[tuple[int, int], list[int]](list), defaultdict[tuple[int, int], list[Any]](list)
    num_ended = 0
    while not engine.is_finished():
        for output in engine.step():
            prompt, params = asked[output.request_id]
            key = output.request_id, output.index
            tokens[key] += output.new_token_ids
            logprobs[key] += output.logprobs or []
            is_first = len(output.new_token_ids) == len(tokens[key]) == 1
            if isinstance(params, SamplingParams) and output.index == 0 and is_first:
                wanted = prompt_entries(prompt, range(len(prompt) - 1), params.prompt_logprobs or 0)
                assert output.prompt_logprobs == [None, *wanted]
            if output.finish_reason is None:
                continue
            num_ended += 1
            if isinstance(params, BeamSearchParams):
                found = [(beam.token_ids, beam.score) for beam in output.beams or []]
                assert found == expected_beams(prompt, params, 64)
        engine.check_integrity()
    for (request_id, index), got in tokens.items():
        prompt, params = asked[request_id]
        if isinstance(params, SamplingParams):
            histories = [[*prompt, *got[:i]] for i in range(10)]
            assert got == [fork_token(history, index) for history in histories]
            assert logprobs[request_id, index] == [likeliest(history, 2) for history in histories]
    assert num_ended == sum(p.n if isinstance(p, SamplingParams) else 1 for _, p in asked.values())
    assert runner.num_rebuilt == len([n for n in losses if n < len(runner.sizes)]) > 3


def test_what_was_cached_before_the_loss_is_not_found_after_it() -> None:
    engine, runner = wired_engine(32, 4)
    prompt = list(range(20))
    run(engine, [prompt], 4)
    assert engine.blocks.num_cached > 0
    runner.loss = lambda: RanksLost("rank 1 died") if not runner.num_rebuilt else None  # type: ignore[method-assign]
    engine.watch()
    assert runner.num_rebuilt == 1
    assert engine.blocks.num_cached == 0
    assert run(engine, [prompt], 4) == [expected_output(prompt, 4, 64)]


def test_a_pinned_conversation_loses_its_blocks_too_and_is_pinned_again_in_what_it_writes() -> None:
    engine, runner = wired_engine(32, 4)
    prompt = list(range(20))
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), owner=7)
    while not engine.is_finished():
        engine.step()
    assert engine.pin(7) == 5
    runner.loss = lambda: RanksLost("rank 1 died") if not runner.num_rebuilt else None  # type: ignore[method-assign]
    engine.watch()
    engine.check_integrity()
    assert engine.blocks.num_free == 32 and not engine.blocks.pins.num_blocks
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), owner=7)
    got = []
    while not engine.is_finished():
        got += [token for output in engine.step() for token in output.new_token_ids]
    assert got[:1] == expected_output(prompt, 1, 64)
    assert engine.blocks.pins.num_blocks == 5


def test_a_second_loss_with_no_step_between_gives_up_with_the_cause() -> None:
    engine, runner = wired_engine(32, 4, losses=(2, 3))
    engine.add_request(list(range(9)), SamplingParams(max_tokens=9))
    with pytest.raises(RanksLost, match="a rank died"):
        for _ in range(9):
            engine.step()
    assert runner.num_rebuilt == 1


def test_a_later_loss_is_met_again() -> None:
    engine, runner = wired_engine(32, 4, losses=(2, 4))
    assert run(engine, [[1, 2, 3]], 9) == [expected_output([1, 2, 3], 9, 64)]
    assert runner.num_rebuilt == 2


def test_a_server_with_nothing_to_do_replaces_dead_ranks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = wired_engine(32, 4)
    monkeypatch.setattr("engine.llm_engine.LLMEngine", lambda config, progress: engine)
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(5)
    time.sleep(0.1)
    runner.loss = lambda: RanksLost("rank 1 died") if not runner.num_rebuilt else None  # type: ignore[method-assign]
    died = time.monotonic()
    while not runner.num_rebuilt:
        assert time.monotonic() - died < 10
        time.sleep(0.01)
    assert thread.status().ready
    thread.shutdown()


def test_ranks_that_could_not_be_replaced_are_started_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as where one is killed while it loads."""
    engine, runner = wired_engine(32, 4, [2])
    rebuild, once = runner.rebuild, iter([RanksLost("rank 1 was killed by SIGKILL")])

    def rebuilt(*what: Any) -> None:
        if (fault := next(once, None)) is not None:
            raise fault
        rebuild(*what)

    monkeypatch.setattr(runner, "rebuild", rebuilt)
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=12))
    tokens: list[int] = []
    losses = 0
    while not engine.is_finished():
        try:
            tokens += [token for output in engine.step() for token in output.new_token_ids if token != EOS]
        except RanksLost:
            losses += 1
            runner._losses.add(len(runner.sizes))  # a group that has been ended says so to whoever sends
    assert losses == 1 and request and tokens == expected_output([1, 2, 3], 12, 64)
