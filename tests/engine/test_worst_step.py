"""The KV pool leaves room for the largest step, which is run for its memory before the pool is allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device import DeviceManager, DevicePlan, Probe
from engine.loading import num_blocks_that_fit
from engine.model_runner import ModelRunner
from engine.scheduler import StepPlan
from engine.worst_step import run_worst_steps
from models.loader import read_config

GIB = 2**30
CARD = DevicePlan(torch.device("cuda", 0), torch.float32, "triton", 16, ())


class Card(Probe):
    """80 GiB, of which `free` bytes are; steps take `peak` bytes."""

    def __init__(self, peak: int = 0, free: int = 76 * GIB, holds_a_step: bool = True) -> None:
        super().__init__()
        self.peak, self.free, self.holds_a_step = peak, free, holds_a_step
        self.ran = 0

    def cuda_memory(self) -> tuple[int, int]:
        return self.free, 80 * GIB

    def peak_beyond(self, run: Callable[[], None]) -> int:
        if not self.holds_a_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB")
        run()
        self.ran += 1
        return self.peak


@pytest.fixture(scope="module")
def runner(tiny_qwen3: Path) -> ModelRunner:
    """On the CPU, with 8 sequences of at most 320 tokens (the model's limit is 512), 200 tokens a step."""
    plan = DevicePlan(torch.device("cpu"), torch.float32, "sdpa", 16, ())
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_num_tokens": 200, "max_model_len": 320}
    return ModelRunner(tiny_qwen3, read_config(tiny_qwen3), plan, **limits, progress=lambda stage, percent: None)


def plans_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int = 8) -> list[StepPlan]:
    plans, launch = [], runner.launch

    def recorded(plan: StepPlan):
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", recorded)
    run_worst_steps(runner, max_num_seqs)
    return plans


def test_the_worst_steps_are_as_large_as_the_limits_allow(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = plans_of(runner, monkeypatch)
    assert [len(one.items), len(many.items)] == [1, 8]
    for plan in (one, many):
        assert sum(item.num_tokens for item in plan.items) == 200
        assert all(item.samples and item.start + item.num_tokens == len(item.seq.token_ids) for item in plan.items)
        assert len(plan.items[0].seq.token_ids) == 320, "behind the longest history"
    params = many.items[3].seq.params
    assert params.top_p < 1 and params.has_penalties and params.logprobs and params.logit_bias


def test_a_step_longer_than_a_sequence_may_be_is_not_asked_of_one(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions beyond the model's table of angles would be a fault on the card: 500 is no multiple of the block."""
    plan = DevicePlan(torch.device("cpu"), torch.float32, "sdpa", 32, ())
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_tokens": 2048, "max_model_len": 500}
    runner = ModelRunner(tiny_llama, read_config(tiny_llama), plan, **limits, progress=lambda stage, percent: None)
    one, two = plans_of(runner, monkeypatch, max_num_seqs=2)
    assert [item.num_tokens for item in one.items] == [512]
    assert [item.num_tokens for item in two.items] == [512, 512]


def test_the_runner_is_left_as_it_was(runner: ModelRunner) -> None:
    run_worst_steps(runner, 8)
    assert runner.kv_cache is None
    assert not runner._tables.rows and len(runner._tables._free) == 8
    assert not len(runner.sampler._history)
    run_worst_steps(runner, 8)  # nothing of the first round is in the way


def test_what_the_largest_step_needs_is_taken_from_the_pool_and_logged(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    config, block = EngineConfig(max_num_seqs=8, gpu_memory_utilization=1.0), runner.kv_bytes_per_block()
    card = Card(peak=40 * block, free=100 * block)
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        assert num_blocks_that_fit(config, DeviceManager(config, card), CARD, runner) == 60
    assert card.ran == 1
    assert any(message.startswith("largest step: needs 0.00 GiB") for message in caplog.messages)


def test_memory_that_one_sequence_cannot_fill_keeps_the_blocks_of_ended_turns(runner: ModelRunner) -> None:
    config, block = EngineConfig(max_num_seqs=1, gpu_memory_utilization=1.0), runner.kv_bytes_per_block()
    for free, most in ((500, 500), (100_000, 2**16)):
        manager = DeviceManager(config, Card(free=free * block))
        assert num_blocks_that_fit(config, manager, CARD, runner) == most


def test_a_card_without_room_for_one_step_is_refused_with_what_to_do(runner: ModelRunner) -> None:
    config = EngineConfig(max_num_seqs=8)
    manager = DeviceManager(config, Card(holds_a_step=False))
    with pytest.raises(ValueError, match=r"76\.00 GiB of 80\.00 GiB are free.*lower max_num_batched_tokens"):
        num_blocks_that_fit(config, manager, CARD, runner)


def test_no_step_is_run_on_a_cpu_or_for_a_count_that_was_set(runner: ModelRunner) -> None:
    config = EngineConfig(max_num_seqs=8, device="cpu")
    card = Card()
    num_blocks_that_fit(config, DeviceManager(config, card), runner.device, runner)
    config = EngineConfig(max_num_seqs=8, num_kvcache_blocks=50)
    assert num_blocks_that_fit(config, DeviceManager(config, card), CARD, runner) == 50
    assert card.ran == 0


class _Tight(torch.Tensor):
    """A pool beside which there is no room for what is read of all layers at once."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and len(index) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 236.00 MiB")
        return super().__getitem__(index)


def test_blocks_are_copied_layer_by_layer_where_there_is_no_memory_for_all(runner: ModelRunner) -> None:
    runner.allocate_kv_cache(6)
    assert runner.kv_cache is not None
    pool = torch.randn(runner.kv_cache.shape)
    before = pool.clone()
    runner.kv_cache = pool.as_subclass(_Tight)
    runner.copy_blocks({1: 0, 2: 1, 5: 4})  # one reads what another writes
    assert torch.equal(pool, before[:, :, [0, 0, 1, 3, 4, 4]])
    runner.release_kv_cache()
