"""What a rank makes of the messages is what the engine planned, and the messages stay small."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.llm_engine import LLMEngine
from engine.outputs import RequestMetrics, StepOutput
from engine.sampling_params import BeamSearchParams, SamplingParams
from history_model import EOS, expected_output, history_engine
from wired_runner import wired_engine

MAX_MODEL_LEN = 64


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_knows_only_the_messages_computes_what_the_engine_means(seed: int) -> None:
    """Random arrivals and aborts over a tiny pool: chunks, shared prefixes, preemptions, requests that end."""
    rng = random.Random(seed)
    engine, _ = wired_engine(
        rng.randrange(6, 14), rng.choice([1, 4, 8]), max_num_seqs=4, max_num_batched_tokens=rng.randrange(4, 24)
    )
    prompts: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    for _ in range(400):
        if len(prompts) < 40 and rng.random() < 0.3:
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randrange(9)] * 2 + [rng.randrange(90)]
            request_id = engine.add_request(prompt, SamplingParams(max_tokens=rng.randrange(1, 16)))
            prompts[request_id], got[request_id] = prompt, []
        if prompts and rng.random() < 0.05:
            engine.abort(rng.choice(list(prompts)))
        for output in engine.step():
            got[output.request_id] += [token for token in output.new_token_ids if token != EOS]
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()
    assert len(ended) == len(prompts) == 40
    room = engine.blocks.num_blocks * engine.blocks.block_size
    assert {r for r, reason in ended.items() if reason == "error"} == {r for r, p in prompts.items() if len(p) > room}
    for request_id, tokens in got.items():
        assert tokens == expected_output(prompts[request_id], len(tokens), MAX_MODEL_LEN)
    assert engine.stats.num_preemptions > 0 or engine.blocks.block_size == 8


def random_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    """Continuations, searches, log-probabilities of output and prompt, in every mixture."""
    if rng.random() < 0.3:
        return BeamSearchParams(rng.randrange(1, 4), rng.randrange(1, 9), early_stopping=rng.random() < 0.7)
    return SamplingParams(
        max_tokens=rng.randrange(1, 12),
        n=rng.choice([1, 1, 2, 3, 6]),
        seed=rng.randrange(100),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
    )


def without_times(outputs: list[StepOutput]) -> list[StepOutput]:
    return [replace(output, metrics=RequestMetrics()) for output in outputs]


@pytest.mark.parametrize("faulty", [False, True], ids=["", "steps fail"])
@pytest.mark.parametrize("seed", range(8))
def test_forks_beams_and_logprobs_are_the_same_behind_the_messages_step_by_step(seed: int, faulty: bool) -> None:
    """Beside an engine whose runner sees the sequences themselves: aborts of a request and of one continuation, pools
    that preempt a search in its midst, more continuations than run at once. A step that fails is run again in parts,
    of sequences that the ranks have forgotten."""
    rng = random.Random(seed)
    shape = rng.randrange(8, 16), rng.choice([1, 4, 8])
    settings = {"max_num_seqs": rng.randrange(3, 6), "max_num_batched_tokens": rng.randrange(6, 24)}
    wired, runner = wired_engine(*shape, **settings)
    engines: tuple[LLMEngine, ...] = (wired, history_engine(*shape, **settings))
    if faulty:
        runner.faults.update(range(5, 5000, 7))
    requests: list[int] = []
    for _ in range(500):
        if len(requests) < 30 and rng.random() < 0.3:
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randrange(9)] * 2 + [rng.randrange(90)]
            params = random_params(rng)
            requests.append(*{engine.add_request(prompt, params) for engine in engines})
        if requests and rng.random() < 0.06:
            request_id, index = rng.choice(requests), rng.choice([None, 0, 1])
            for engine in engines:
                engine.abort(request_id, index=index)
        there, here = (without_times(engine.step()) for engine in engines)
        if faulty:  # what runs first of a step's parts is told first
            there.sort(key=lambda o: (o.request_id, o.index))
            here.sort(key=lambda o: (o.request_id, o.index))
        assert there == here
        wired.check_integrity()
    assert len(requests) == 30 and all(engine.is_finished() for engine in engines)
    assert not runner._encoder._sent and not runner._encoder._of_request, "the encoder remembers what has ended"


def test_the_prompt_of_continuations_and_beams_goes_over_once() -> None:
    engine, runner = wired_engine(700, 16, max_num_batched_tokens=2048, max_model_len=11_000)
    for params in (SamplingParams(n=4, max_tokens=4, ignore_eos=True, seed=1), BeamSearchParams(4, 4)):
        engine.add_request([7] * 10_000, params)
        runner.sizes.clear()
        while not engine.is_finished():
            engine.step()
        first, *_ = runner.sizes
        assert first > 10_000
        # The step that starts them names their blocks: 625 numbers each. What follows is a few bytes a beam.
        assert max(runner.sizes[1:]) < 4 * 625 * 3 + 1000
        assert runner.sizes[-1] < 400


def test_a_decode_costs_the_same_bytes_after_ten_tokens_and_after_ten_thousand() -> None:
    engine, runner = wired_engine(700, 16, max_num_batched_tokens=2048, max_model_len=11_000)
    for length in (10, 10_000):
        engine.add_request([7] * length, SamplingParams(max_tokens=3, ignore_eos=True))
        runner.sizes.clear()
        while not engine.is_finished():
            engine.step()
        first, *_, last = runner.sizes
        assert last < 80
        assert first > length  # the prompt went over once, with the first chunk


def test_a_preempted_request_that_comes_back_in_the_same_step_has_its_new_blocks() -> None:
    """Its table is another list, perhaps with the same length and the same last block."""
    from engine.plan_deltas import PlanDecoder, PlanEncoder
    from engine.scheduler import ScheduledSequence, StepPlan
    from engine.sequence import Sequence, SequenceStatus

    seq = Sequence(1, [5, 6, 7], SamplingParams(), seed=0, max_tokens=9, stop_ids=frozenset())
    seq.status = SequenceStatus.RUNNING
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for table in ([3, 4], [8, 4], [8, 4, 2]):
        seq.block_table = list(table)
        plan, _ = decoder.decode(encoder.encode(StepPlan([ScheduledSequence(seq, 2, 1, True)], 1, 1)))
        assert plan.items[0].seq.block_table == table
        seq.token_ids.append(9)


def test_requests_that_gave_way_keep_no_row_from_those_that_run() -> None:
    """More are known to a rank than may run in a step: background requests that are paused, with their blocks."""
    from engine.plan_deltas import PlanDecoder, PlanEncoder
    from engine.scheduler import ScheduledSequence, StepPlan
    from engine.sequence import Sequence, SequenceStatus

    encoder, decoder = PlanEncoder(), PlanDecoder()
    known: dict[int, Sequence] = {}
    for planned in ([1, 2], [3, 4], [2, 3]):
        for request_id in planned:
            if request_id not in known:
                seq = Sequence(request_id, [5, 6], SamplingParams(), seed=0, max_tokens=9, stop_ids=frozenset())
                seq.block_table = [request_id]
                known[request_id] = seq
        items = [ScheduledSequence(known[request_id], 0, 2, True) for request_id in planned]
        plan, ended = decoder.decode(encoder.encode(StepPlan(items, 0, 4)))
        assert not ended
        running = [seq.request_id for seq in decoder._sequences.values() if seq.status is SequenceStatus.RUNNING]
        assert sorted(running) == planned == [item.seq.request_id for item in plan.items]
        assert [item.seq.block_table for item in plan.items] == [[request_id] for request_id in planned]
