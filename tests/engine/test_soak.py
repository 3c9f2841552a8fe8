"""A soak: random arrivals, aborts and readers that leave, at twice what the pool can hold.

Every request is checked against the stand-in model, so that one lost, doubled or foreign token is found; the books
are checked at every drain, and the process's memory all along. The short form is in the ordinary run; the long one:

    PAGETURN_SOAK_MINUTES=30 python -m pytest -m long tests/engine/test_soak.py -s
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.llm_engine import LLMEngine
from engine.model_runner import StepHandle
from engine.outputs import RequestPriority
from engine.request_stream import RequestStream
from engine.sampling_params import SamplingParams
from engine.scheduler import StepPlan
from history_model import EOS, HistoryRunner, expected_output, history_engine
from processes import resident_bytes

BLOCKS, BLOCK_SIZE, MAX_LEN = 48, 4, 64
# A request ends with about 7 blocks, and a client always has one: a third of these fill the pool.
CLIENTS = 3 * BLOCKS // 7 + 8
# As long as a step of a small model: without it requests would be over before the next ones come.
STEP_SECONDS = 0.002
SHORT_SECONDS = 4.0  # of a part of the short form, which has as many as 500 requests take
LONG_MINUTES = float(os.environ.get("PAGETURN_SOAK_MINUTES", "30"))
WARM_UP_SECONDS = 300.0
MOST_GROWTH = 0.01  # of the resident memory, in ten minutes


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    def build(config: EngineConfig, progress: object) -> LLMEngine:
        engine = history_engine(BLOCKS, BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=MAX_LEN)
        launch = engine.runner.launch

        def slow_launch(plan: StepPlan) -> StepHandle:
            time.sleep(STEP_SECONDS)
            return launch(plan)

        monkeypatch.setattr(engine.runner, "launch", slow_launch)
        return engine

    monkeypatch.setattr("engine.llm_engine.LLMEngine", build)
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    yield thread
    thread.shutdown()


class Soak:
    """Clients that come and go, and the tally of how their requests ended."""

    def __init__(self, engine: EngineThread, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.tokens = 0
        self.drains = 0
        self.wanted: list[int] = []  # blocks that the unfinished requests will fill, at every tenth arrival
        # Few heads, so that prompts share prefixes and the cache evicts what is about to be asked for.
        self.heads = [[self.random.randrange(96) for _ in range(24)] for _ in range(6)]

    async def run(self, seconds: float) -> None:
        """Waves of clients, each to its drain, at which the books must balance; in every second one steps are launched
        ahead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.runner.leads = not self.runner.leads
            await asyncio.gather(*(self.client(end) for _ in range(CLIENTS)))
            await self.drained()

    @property
    def runner(self) -> HistoryRunner:
        inner = self.engine._engine
        assert inner is not None and isinstance(inner.runner, HistoryRunner)
        return inner.runner

    async def client(self, end: float) -> None:
        for _ in range(self.random.randint(3, 12)):
            if time.monotonic() >= end:
                return
            await asyncio.sleep(self.random.random() * 0.01)
            await self.request()

    async def request(self) -> None:
        r = self.random
        prompt = r.choice(self.heads)[: r.randrange(25)] + [r.randrange(96) for _ in range(r.randint(1, 12))]
        params = SamplingParams(max_tokens=r.randint(1, 24))
        stream = self.engine.submit(prompt, params, priority=r.choice(list(RequestPriority)))
        if r.random() < 0.1 and len(self.wanted) < 10_000:
            inner = self.engine._engine
            assert inner is not None
            unfinished = [*inner.scheduler.running, *inner.scheduler.waiting]
            self.wanted.append(sum(inner.blocks.blocks_for(q.num_prompt_tokens + q.max_tokens) for q in unfinished))
        got, reason = await self.read(stream, leaves_after=r.choice([None, None, None, 0, 1, 5]))
        self.ends[reason] += 1
        self.tokens += len(got)
        wanted = expected_output(prompt, params.max_tokens, MAX_LEN)
        if reason in ("stop", "length"):
            assert got == wanted, f"{prompt}: {got} instead of {wanted}"
        else:
            assert reason == "abort" and got == wanted[: len(got)]

    async def read(self, stream: RequestStream, leaves_after: int | None) -> tuple[list[int], str]:
        """Read to the end, slowly at times; leaves_after: after so many deltas the reader aborts, or just goes."""
        got: list[int] = []
        count = 0
        async for delta in stream:
            got += [t for t in delta.token_ids if t != EOS]
            if delta.finish_reason is not None:
                return got, delta.finish_reason
            if leaves_after is not None and count >= leaves_after:
                stream.abort()
                if self.random.random() < 0.5:
                    return got, "abort"
            if self.random.random() < 0.02:
                await asyncio.sleep(0.01)
            count += 1
        raise AssertionError("a stream without an end")

    async def drained(self) -> None:
        end = time.monotonic() + 5
        while (status := self.engine.status()).running or status.waiting or self.engine._outbox.streams:
            assert time.monotonic() < end, "requests hang"
            await asyncio.sleep(0.002)
        assert status.error is None, status.error
        inner = self.engine._engine
        assert inner is not None and inner.is_finished()
        inner.check_integrity()
        assert inner.blocks.num_active == 0
        self.drains += 1


def resident_after_collection() -> int:
    gc.collect()
    return resident_bytes()


async def test_hundreds_of_requests_for_twice_what_the_pool_holds_lose_and_double_nothing(engine: EngineThread) -> None:
    soak = Soak(engine, seed=1)
    await soak.run(SHORT_SECONDS)
    before = resident_after_collection()
    inner = engine._engine
    assert inner is not None
    end = time.monotonic() + 60  # on a machine that is busy otherwise
    while time.monotonic() < end:
        await soak.run(SHORT_SECONDS)
        if soak.drains >= 10 and sum(soak.ends.values()) >= 500:
            break
    assert soak.drains >= 10 and soak.ends["abort"] >= 50 and soak.ends["length"] + soak.ends["stop"] >= 200
    assert statistics.mean(soak.wanted) >= 2 * BLOCKS and inner.stats.num_preemptions > 20, "the pool was not short"
    assert inner.stats.cached_tokens > 1000, "nothing was ever reused"
    # A leak of an object a request would show: hundreds of requests have passed.
    assert resident_after_collection() - before < 16 * 2**20


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_memory_does_not_grow_over_half_an_hour_of_twice_what_the_pool_holds(engine: EngineThread) -> None:
    soak = Soak(engine, seed=2)
    minutes = LONG_MINUTES
    warm_up = min(WARM_UP_SECONDS, minutes * 60 / 4)
    await soak.run(warm_up)
    samples = [(time.monotonic(), resident_after_collection())]
    end = time.monotonic() + minutes * 60 - warm_up
    while time.monotonic() < end:
        await soak.run(15)
        samples.append((time.monotonic(), resident_after_collection()))
    growth = _growth_per_ten_minutes(samples)
    inner = engine._engine
    assert inner is not None
    print(
        f"\n{sum(soak.ends.values()):,} requests {dict(soak.ends)}, {soak.tokens:,} tokens, {soak.drains:,} drains, "
        f"{inner.stats.num_preemptions:,} preemptions, {statistics.mean(soak.wanted):.0f} blocks wanted of {BLOCKS}; "
        f"RSS {samples[0][1] / 2**20:.1f} -> {samples[-1][1] / 2**20:.1f} MiB, "
        f"{100 * growth:+.2f} % per 10 minutes over {minutes - warm_up / 60:.0f} minutes"
    )
    assert growth < MOST_GROWTH


def _growth_per_ten_minutes(samples: list[tuple[float, int]]) -> float:
    """Slope of the least-squares line through the samples (seconds, bytes), as a share of the first."""
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean_b = sum(b for _, b in samples) / len(samples)
    slope = sum((t - mean_t) * (b - mean_b) for t, b in samples) / sum((t - mean_t) ** 2 for t, _ in samples)
    return slope * 600 / samples[0][1]
