"""Faults in a step: who ends, who goes on with unchanged tokens, and when the engine itself is given up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import recovery
from engine.faults import DeviceLost, EngineBroken, is_out_of_memory, root_cause
from engine.llm_engine import LLMEngine
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import StepPlan
from faulty_runner import faulty_engine
from history_model import EOS, expected_output

MAX_LEN = 64
TOKENS = SamplingParams(max_tokens=12)


def prompt(i: int) -> list[int]:
    return [i % 90, 5, 7, i // 90, 11]


def drain(engine: LLMEngine, most_steps: int = 500) -> tuple[dict[int, list[int]], dict[int, StepOutput]]:
    """Step to the end; the tokens of each request, end of sequence left out, and its last output."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, StepOutput] = {}
    for _ in range(most_steps):
        if engine.is_finished():
            break
        for output in engine.step():
            assert output.request_id not in ends, "an output after the last one"
            tokens.setdefault(output.request_id, []).extend(t for t in output.new_token_ids if t != EOS)
            if output.finish_reason is not None:
                ends[output.request_id] = output
        engine.check_integrity()
    assert engine.is_finished(), "requests hang"
    assert engine.blocks.num_active == 0
    return tokens, ends


def holds(*request_ids: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.request_id in request_ids for item in plan.items)


def assert_whole(tokens: dict[int, list[int]], ends: dict[int, StepOutput], ids: dict[int, list[int]]) -> None:
    """Each of these requests has ended with exactly the tokens of an undisturbed run."""
    for request_id, ids_of_prompt in ids.items():
        assert ends[request_id].finish_reason in ("length", "stop"), ends[request_id].error
        assert tokens[request_id] == expected_output(ids_of_prompt, 12, MAX_LEN)


# -- an exception in a step -------------------------------------------------------------------------------


def test_an_exception_for_a_prompt_ends_every_continuation_that_waits_for_it() -> None:
    engine, runner = faulty_engine()
    request = engine.add_request(prompt(0), SamplingParams(max_tokens=12, n=3))
    other = engine.add_request(prompt(1), TOKENS)
    runner.fault = lambda plan: KeyError("a row that is not there") if holds(request)(plan) else None
    ends: list[StepOutput] = []
    for _ in range(20):
        ends += [output for output in engine.step() if output.finish_reason]
    assert engine.is_finished(), "continuations wait for a prompt that nobody computes"
    failed = [(e.index, e.finish_reason, e.ends_request) for e in ends if e.request_id == request]
    assert failed == [(0, "error", False), (1, "error", False), (2, "error", True)]
    assert [e.finish_reason for e in ends if e.request_id == other] == ["length"]
    assert engine.blocks.num_active == 0


@pytest.mark.parametrize("half_run", [False, True], ids=["before the step", "after it has written"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("culprit", [0, 3, 6])
def test_the_culprit_of_an_exception_is_found_and_the_others_go_on_unchanged(
    culprit: int, when: str, half_run: bool
) -> None:
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(7)}
    guilty = list(ids)[culprit]
    runner.half_run = half_run

    def fault(plan: StepPlan) -> Exception | None:
        for item in plan.items:
            if item.seq.request_id == guilty and item.seq.num_output_tokens >= (3 if when == "decode" else 0):
                return KeyError("a row that is not there")
        return None

    runner.fault = fault
    tokens, ends = drain(engine)
    assert ends[guilty].finish_reason == "error"
    assert ends[guilty].error == "KeyError: 'a row that is not there'"
    assert len(tokens[guilty]) == (3 if when == "decode" else 0)
    del ids[guilty]
    assert_whole(tokens, ends, ids)


def test_two_culprits_in_one_batch_are_both_found(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(8)}
    guilty = [list(ids)[1], list(ids)[6]]
    runner.fault = lambda plan: ValueError("bad row") if holds(*guilty)(plan) else None
    tokens, ends = drain(engine)
    for request_id in guilty:
        assert ends[request_id].error == "ValueError: bad row"
        assert f"request {request_id} is given up" in caplog.text
        del ids[request_id]
    assert_whole(tokens, ends, ids)


def test_a_fault_that_does_not_come_again_costs_nobody_anything() -> None:
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(5)}
    runner.fault = lambda plan: RuntimeError("once") if len(runner.launched) in (1, 6) else None
    assert_whole(*drain(engine), ids)


def test_a_lone_request_gets_a_second_try_and_then_its_error_and_the_next_one_is_served() -> None:
    engine, runner = faulty_engine()
    once = engine.add_request(prompt(1), TOKENS)
    runner.fault = lambda plan: RuntimeError("once") if len(runner.launched) == 1 else None
    assert_whole(*drain(engine), {once: prompt(1)})
    runner.fault = lambda plan: RuntimeError("always")
    bad = engine.add_request(prompt(2), TOKENS)
    assert drain(engine)[1][bad].error == "RuntimeError: always"
    runner.fault = lambda plan: None
    good = engine.add_request(prompt(3), TOKENS)
    assert_whole(*drain(engine), {good: prompt(3)})


def test_an_exception_in_every_part_is_the_engines_own_and_comes_out_after_a_bounded_number_of_tries() -> None:
    engine, runner = faulty_engine(512, 4, max_num_seqs=256, max_num_batched_tokens=2048)
    for i in range(256):
        engine.add_request(prompt(i), TOKENS)
    cause = RuntimeError("the weights are gone")
    runner.fault = lambda plan: cause
    with pytest.raises(EngineBroken, match="RuntimeError: the weights are gone") as caught:
        engine.step()
    assert caught.value.__cause__ is cause and root_cause(caught.value) == "RuntimeError: the weights are gone"
    assert len(runner.launched) <= recovery._MAX_FUTILE_TRIES
    engine.check_integrity()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_also_of_a_small_batch_nobody_is_blamed_when_all_fail(count: int) -> None:
    engine, runner = faulty_engine()
    for i in range(count):
        engine.add_request(prompt(i), TOKENS)
    runner.fault = lambda plan: RuntimeError("gone")
    with pytest.raises(EngineBroken, match="gone"):
        engine.step()
    assert len(runner.launched) <= 3 * count


def test_lone_requests_that_fail_one_after_the_other_show_that_it_is_the_engine() -> None:
    engine, runner = faulty_engine()
    runner.fault = lambda plan: RuntimeError("gone")
    for i in range(2):
        request_id = engine.add_request(prompt(i), TOKENS)
        assert drain(engine)[1][request_id].error == "RuntimeError: gone"
    engine.add_request(prompt(3), TOKENS)
    with pytest.raises(EngineBroken, match="gone"):
        engine.step()


def test_an_interrupt_in_a_step_passes_through_at_once_and_the_step_is_done_again() -> None:
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(4)}
    runner.fault = lambda plan: KeyboardInterrupt() if len(runner.launched) == 3 else None
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    with pytest.raises(KeyboardInterrupt):
        while True:
            for output in engine.step():
                tokens[output.request_id] += output.new_token_ids
    assert len(runner.launched) == 3
    more, ends = drain(engine)
    assert_whole({i: tokens[i] + more[i] for i in ids}, ends, ids)


# -- the device -------------------------------------------------------------------------------------------


def test_a_device_that_answers_no_more_ends_the_step_at_once_with_the_root_cause() -> None:
    engine, runner = faulty_engine()
    for i in range(8):
        engine.add_request(prompt(i), TOKENS)

    def fault(plan: StepPlan) -> Exception:
        runner.device_answers = False
        return RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` ...")

    runner.fault = fault
    with pytest.raises(DeviceLost) as caught:
        engine.step()
    assert root_cause(caught.value) == "RuntimeError: CUDA error: device-side assert triggered"
    assert len(runner.launched) == 1


# -- memory -----------------------------------------------------------------------------------------------


def out_of_memory(plan: StepPlan) -> Exception:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {plan.num_tokens} GiB")


@pytest.mark.parametrize("room", [1, 2, 5, 20])
def test_a_step_too_large_for_the_memory_is_halved_until_it_fits_and_nobody_loses_a_token(room: int) -> None:
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(8)}
    runner.fault = lambda plan: out_of_memory(plan) if plan.num_tokens > room else None
    assert_whole(*drain(engine), ids)
    assert runner.buffers_released >= 1
    # Once is enough to learn it: what follows keeps below.
    failed = [tokens for _, tokens in runner.launched if tokens > room]
    assert len(failed) <= 10, failed


def test_a_lone_long_prompt_too_large_for_the_memory_is_computed_in_shorter_chunks() -> None:
    engine, runner = faulty_engine()
    long = [7, 8, 9] * 10
    request_id = engine.add_request(long, TOKENS)
    runner.fault = lambda plan: out_of_memory(plan) if plan.num_tokens > 4 else None
    assert_whole(*drain(engine), {request_id: long})
    assert max(tokens for _, tokens in runner.launched) == 30
    assert [tokens for _, tokens in runner.launched][:4] == [30, 15, 7, 3]


def test_after_many_good_steps_the_full_size_is_tried_again() -> None:
    engine, runner = faulty_engine(128, 4, max_model_len=400)
    for i in range(4):
        engine.add_request(prompt(i), SamplingParams(max_tokens=100, ignore_eos=True))
    runner.fault = lambda plan: out_of_memory(plan) if plan.num_tokens > 2 and len(runner.launched) < 10 else None
    drain(engine)
    sizes = [tokens for _, tokens in runner.launched]
    assert max(sizes[10:100]) == 2 and max(sizes[100:]) == 4


def test_a_request_for_which_there_is_never_memory_is_given_up_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_PAUSE_BEFORE_SHEDDING", 0.0)
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(6)}
    greedy = list(ids)[2]
    runner.fault = lambda plan: out_of_memory(plan) if holds(greedy)(plan) else None
    tokens, ends = drain(engine)
    assert ends[greedy].finish_reason == "error" and "out of memory" in (ends[greedy].error or "")
    del ids[greedy]
    assert_whole(tokens, ends, ids)


def test_without_any_memory_the_newest_goes_first_one_a_step_and_the_rest_is_served_when_memory_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_PAUSE_BEFORE_SHEDDING", 0.0)
    engine, runner = faulty_engine()
    ids = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(6)}
    runner.fault = out_of_memory
    shed = [output for _ in range(2) for output in engine.step()]
    assert [(o.request_id, o.finish_reason) for o in shed] == [(i, "error") for i in list(ids)[:3:-1]]
    assert all("out of memory" in (o.error or "") for o in shed)
    engine.check_integrity()
    runner.fault = lambda plan: None
    assert_whole(*drain(engine), dict(list(ids.items())[:4]))


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**46, dtype=torch.float32),
        lambda: np.ones(2**50),
        lambda: bytearray(2**50),
    ],
    ids=["torch", "numpy", "python"],
)
def test_what_the_hosts_allocators_raise_is_known_as_want_of_memory(allocate: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        allocate()
    assert is_out_of_memory(caught.value), caught.value


def test_other_faults_are_not_taken_for_want_of_memory() -> None:
    for error in (RuntimeError("shape mismatch"), ValueError("out of memory lane"), KeyError("x")):
        assert not is_out_of_memory(error)
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        assert is_out_of_memory(RuntimeError(text))


# -- logits that are not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 50], ids=["prompt in one step", "prompt in chunks"])
@pytest.mark.parametrize("outputs_before", [0, 7])
def test_a_request_with_broken_logits_ends_and_nothing_of_it_is_ever_found_again(
    length: int, outputs_before: int
) -> None:
    engine, runner = faulty_engine()
    others = {engine.add_request(prompt(i), TOKENS): prompt(i) for i in range(3)}
    broken_prompt = [13] * length
    broken = engine.add_request(broken_prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    tokens: dict[int, list[int]] = {}
    ends: dict[int, StepOutput] = {}
    while broken not in ends:
        if len(tokens.get(broken, [])) == outputs_before:
            runner.bad = {broken}
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(t for t in output.new_token_ids if t != EOS)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    assert ends[broken].finish_reason == "error"
    assert ends[broken].error == "the model produced logits that are not finite"
    assert ends[broken].num_computed_tokens == length
    held = set(ends[broken].block_table or ())
    more, more_ends = drain(engine)
    for request_id in others:
        tokens.setdefault(request_id, []).extend(more.get(request_id, []))
    assert_whole(tokens, ends | more_ends, others)

    # The same prompt again: nothing is reused, and its blocks are overwritten before anybody reads them.
    again = engine.add_request(broken_prompt, TOKENS)
    fill = {engine.add_request([20 + i] * 40, TOKENS): [20 + i] * 40 for i in range(5)}
    tokens, ends = drain(engine)
    assert ends[again].num_cached_tokens == 0
    assert_whole(tokens, ends, {again: broken_prompt, **fill})
    assert held <= set(runner.scrubbed)


def test_a_distrusted_block_that_others_hold_too_is_overwritten_only_after_they_let_go() -> None:
    engine, runner = faulty_engine(16, 4)
    shared = [3] * 12
    first = engine.add_request(shared, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    second = engine.add_request([*shared, 4], SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    runner.bad = {second}
    ends = [o for o in engine.step() if o.finish_reason]
    assert [o.request_id for o in ends] == [second] and ends[0].num_cached_tokens == 12
    _, ends = drain(engine)
    assert ends[first].finish_reason == "length", "its own blocks were not overwritten under it"


# -- figures ----------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_a_prefill_says_how_far_it_came() -> None:
    engine, _ = faulty_engine(max_num_batched_tokens=8)
    request_id = engine.add_request([9] * 40, TOKENS)
    engine.step()
    engine.step()
    engine.abort(request_id)
    (output,) = engine.step()
    assert (output.finish_reason, output.num_computed_tokens, output.num_prompt_tokens) == ("abort", 16, 40)
    assert output.block_table


@pytest.mark.parametrize("where", ["copy_blocks", "scrub"])
def test_a_fault_of_memory_before_the_step_is_met_as_one_within_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = faulty_engine(64, 4)
    real, once = getattr(runner, where), iter([RuntimeError("DefaultCPUAllocator: can't allocate memory")])

    def faulty(*what: object) -> None:
        if (fault := next(once, None)) is not None:
            raise fault
        real(*what)

    monkeypatch.setattr(runner, where, faulty)
    runner.bad.add(engine.add_request([9, 9, 9], SamplingParams(max_tokens=6)))
    ends = {}
    for prompt in ([1, 2, 3, 4, 5], [6, 7]):
        engine.add_request(prompt, SamplingParams(max_tokens=6, n=3, ignore_eos=True))
        while not engine.is_finished():
            ends |= {(o.request_id, o.index): o.finish_reason for o in engine.step() if o.finish_reason}
    assert next(once, None) is None, "it was met"
    assert ends == {(1, 0): "error"} | {(request, index): "length" for request in (2, 3) for index in range(3)}
