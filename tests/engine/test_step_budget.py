"""StepBudget: chunks that keep a CPU step short, on fast and slow machines, alone and beside streams."""

from __future__ import annotations

import pytest

from engine.step_budget import StepBudget


def test_a_fast_machine_computes_a_lone_prompt_in_one_large_chunk() -> None:
    budget = StepBudget(1024)
    budget.record(512, 0, 512 / 3000)
    assert budget.tokens == 1024


def test_a_slow_machine_gets_chunks_of_half_a_second_and_never_less_than_128_tokens() -> None:
    budget = StepBudget(1024)
    budget.record(512, 0, 1.0)
    assert budget.tokens == 256
    for _ in range(20):
        budget.record(budget.tokens, 0, budget.tokens / 50)
    assert budget.tokens == 128


def test_beside_streams_a_step_takes_less_than_alone() -> None:
    budget = StepBudget(1024)
    budget.record(512, 0, 0.5)
    alone = budget.tokens
    budget.record(0, 3, 0.05)
    assert budget.tokens == pytest.approx(0.6 * alone, abs=1)
    budget.record(0, 0, 0.001)
    assert budget.tokens == alone


def test_short_second_turns_and_the_decodes_beside_a_prompt_do_not_spoil_the_rate() -> None:
    budget = StepBudget(1024)
    budget.record(512, 0, 512 / 2500)
    for _ in range(20):
        budget.record(68, 0, 0.1)
        budget.record(300, 8, 1.0)
    budget.record(0, 0, 0.001)
    assert budget.tokens == 1024


def test_under_streams_alone_the_rate_is_learned_from_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, clock = StepBudget(1024), [100.0]
    monkeypatch.setattr("engine.step_budget.time.perf_counter", lambda: clock[0])
    budget.record(512, 0, 512 / 2500)
    for _ in range(30):
        clock[0] += 1.0
        budget.record(budget.tokens, 8, budget.tokens / 500)  # another process took the cores
    assert budget.tokens == pytest.approx(150, abs=3)


def test_a_small_limit_is_never_passed() -> None:
    budget = StepBudget(64)
    assert budget.tokens == 64
    budget.record(64, 0, 10.0)
    assert budget.tokens == 64
