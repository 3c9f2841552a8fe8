"""LLMEngine under everything that may happen to it, in tiny pools, with a model whose next token depends on every
token that it can see: every request ends exactly once and right, the books balance after every step.

20,000 engine steps in the ordinary run; the long one, ten times as many, takes a minute or two:

    python -m pytest -m long tests/engine/test_engine_properties.py -s
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.faults import EngineBroken
from engine.origin import Origin
from engine.outputs import RequestPriority
from engine.request_checks import why_unservable
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduler import StepPlan
from engine.sequence import Sequence, SequenceStatus
from engine.tensor_parallel import RanksLost
from engine.waiting_queue import MAX_OVERTAKEN
from perilous_runner import Corrupted, perilous_engine
from request_judge import Judge

MAX_LEN = 48
CI_STEPS, LONG_STEPS = 20_000, 200_000
# Few distinct tokens and shared heads, so that prefixes meet in the cache all the time; some are too long.
PROMPTS = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 7, 8, 9][:head] * 2 + tail,
    st.integers(0, 9),
    st.lists(st.integers(0, 3), min_size=1, max_size=23),
)
PRIORITIES = st.sampled_from([*RequestPriority, RequestPriority.NORMAL])
OWNERS = st.integers(1, 3)


class EngineMachine(RuleBasedStateMachine):
    # Over all machines: engine steps that ran, and how requests ended.
    num_steps: ClassVar[int]
    num_ahead: ClassVar[int]  # of them launched behind another one
    ended: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Judge] = {}

    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.sampled_from([1, 4, 16]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        kind=st.sampled_from(["plain", "wired", "ahead", "ahead"]),
        pace=st.integers(0, 12),
        crowd=st.integers(0, 2**16),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        caching: bool,
        kind: str,
        pace: int,
        crowd: int,
    ) -> None:
        """kind: "ahead", the runner lets a step be launched behind the one that runs; "wired", see PerilousRunner.

        pace: engine steps between one thing that happens and the next, while a crowd, which is the seed of its
        requests, keeps the engine at work."""
        self.engine, self.runner = perilous_engine(
            num_blocks,
            block_size,
            wired=kind == "wired",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            enable_prefix_caching=caching,
        )
        self.runner.leads = kind == "ahead"
        self.num_distrusted, distrust = 0, self.engine.blocks.distrust

        def counted(seq: Sequence) -> None:
            self.num_distrusted += 1
            distrust(seq)

        self.engine.blocks.distrust = counted  # type: ignore[method-assign]
        self.pool_tokens = num_blocks * block_size
        self.pace, self.crowd = pace, Random(crowd)

    # -- requests ---------------------------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 5]),
        stop=st.sampled_from([False, False, True]),
        n=st.sampled_from([1, 1, 1, 2, 3, 6]),
        priority=PRIORITIES,
        owner=st.integers(0, 3),
        salt=st.sampled_from(["", "", "a"]),
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: bool,
        n: int,
        priority: RequestPriority,
        owner: int,
        salt: str,
        copies: int,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=tuple(range(0, 90, 9)) if stop else (),
            n=n,
        )
        for _ in range(copies):
            self._add(prompt, params, priority, owner, salt)

    @rule(prompt=PROMPTS, width=st.integers(1, 3), max_tokens=st.integers(1, 7), priority=PRIORITIES, owner=OWNERS)
    def search(self, prompt: list[int], width: int, max_tokens: int, priority: RequestPriority, owner: int) -> None:
        width = min(width, self.engine.scheduler.max_num_seqs)
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=True)
        self._add(prompt, params, priority, owner, "")

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 3), min_size=0, max_size=4),
        max_tokens=st.integers(1, 24),
        owner=OWNERS,
    )
    def add_a_second_turn(self, data: st.DataObject, more: list[int], max_tokens: int, owner: int) -> None:
        """The prompt and what has come of the reply so far; with nothing of both, the same prompt again."""
        first = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        prompt = (first.prompt + first.got[0] + more)[: MAX_LEN - 1]
        self._add(
            prompt,
            SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens),
            RequestPriority.NORMAL,
            owner,
            first.origin.cache_salt,
        )

    def _add(
        self,
        prompt: list[int],
        params: SamplingParams | BeamSearchParams,
        priority: RequestPriority,
        owner: int,
        salt: str,
    ) -> None:
        if len(prompt) > self.pool_tokens and len(prompt) % 4:  # most prompts are to be served
            prompt = prompt[: self.pool_tokens * 3 // 4]
        request = self.engine.add_request(prompt, params, priority, owner=owner, turn=owner, cache_salt=salt)
        self.requests[request] = Judge(
            request,
            prompt,
            params,
            priority,
            Origin(owner, owner, salt),
            pool_tokens=self.pool_tokens,
            block_size=self.engine.blocks.block_size,
            max_len=MAX_LEN,
        )

    @precondition(lambda self: self.engine.requests.live)
    @rule(data=st.data(), one=st.booleans())
    def abort(self, data: st.DataObject, one: bool) -> None:
        """A request, or one continuation of it (no other than the first where it has but one), twice."""
        request = data.draw(st.sampled_from(sorted(self.engine.requests.live)))
        judge = self.requests[request]
        index = data.draw(st.integers(0, len(judge.wanted) - 1)) if one else None
        for _ in range(2):
            self.engine.abort(request, index=index)
        judge.aborted.update(i for i in range(len(judge.wanted)) if index in (None, i))

    @rule(gone=st.integers(1, 40))
    def abort_what_has_ended_or_never_was(self, gone: int) -> None:
        if gone not in self.engine.requests.live:
            self.engine.abort(gone)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.requests[data.draw(st.sampled_from(sorted(self.requests)))].read()

    # -- the cache and the schedule ---------------------------------------------------------------------------

    @rule(owner=OWNERS)
    def pin(self, owner: int) -> None:
        try:
            self.engine.pin(owner)
        except ValueError as error:
            assert "may be pinned" in str(error)

    @rule(owner=OWNERS)
    def unpin(self, owner: int) -> None:
        self.engine.unpin(owner)

    @rule()
    def evict(self) -> None:
        with self.pins_hold():
            self.engine.blocks.clear_cache()

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "a"]))
    def explain(self, prompt: list[int], salt: str) -> None:
        if (error := why_unservable(len(prompt), self.engine.max_model_len, self.engine.blocks)) is not None:
            with pytest.raises(ValueError, match=re.escape(error)):
                self.engine.explain(prompt, salt)
            return
        found = self.engine.explain(prompt, salt)
        assert found.num_hit_tokens < len(prompt) == found.num_prompt_tokens
        assert len(found.evicted) <= self.engine.blocks.num_cached

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = self.engine.scheduler.running
        seq = running[data.draw(st.integers(0, len(running) - 1))]
        self.engine.scheduler._preempt(StepPlan(), seq)
        self.engine.check_integrity()

    @rule(tokens=st.integers(1, 24))
    def change_the_budget(self, tokens: int) -> None:
        self.engine.scheduler.token_budget = min(tokens, self.engine.scheduler.max_num_batched_tokens)

    # -- faults -----------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from([RuntimeError, KeyboardInterrupt, MemoryError, RanksLost]), half_run=st.booleans())
    def next_launch_fails(self, kind: type[BaseException], half_run: bool) -> None:
        if kind is not RanksLost or not self.engine._ranks_just_lost:
            self.runner.next_fault, self.runner.half_run = kind("once"), half_run

    @precondition(lambda self: self.engine.requests.live)
    @rule(data=st.data(), bad=st.booleans())
    def a_request_goes_wrong(self, data: st.DataObject, bad: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.engine.requests.live)))
        (self.runner.bad if bad else self.runner.guilty).add(request)
        self.requests[request].excuses.add("not finite" if bad else "a guilty request")

    @rule(tokens=st.sampled_from([0, 1, 2, 4, 8]), count=st.integers(1, 4))
    def memory_is_short_for_some_steps(self, tokens: int, count: int) -> None:
        self.runner.memory = tokens
        if not tokens:
            for request in self.engine.requests.live:
                self.requests[request].excuses.add("out of memory")
        for _ in range(count):
            self.step()
        self.runner.memory = None

    # -- steps ------------------------------------------------------------------------------------------------

    @invariant()
    def time_passes(self) -> None:
        for _ in range(getattr(self, "pace", 0)):
            if self.crowd.random() < 0.4 and len(self.engine.requests.live) < 6:
                self.send_of_the_crowd(self.crowd)
            self.step()

    def send_of_the_crowd(self, r: Random) -> None:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: r.randint(0, 9)] * r.randint(1, 2) + [r.randint(0, 3)]
        params = SamplingParams(max_tokens=r.randint(1, 24), n=r.choice([1, 1, 1, 2]))
        self._add(prompt, params, r.choice(list(RequestPriority)), r.randint(0, 3), r.choice(["", "", "a"]))

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def drain(self) -> None:
        for _ in range(3000):
            if self.engine.is_finished():
                break
            self.step()
        assert self.engine.is_finished(), f"requests hang: {self.engine.requests.live} {self.engine.requests.forks}"
        assert self.engine.blocks.num_active == 0
        for judge in self.requests.values():
            judge.check_all_came()

    def step(self) -> None:
        others = any(seq.priority for seq in self.engine.requests.live.values())
        self.runner.launched.clear()
        with self.pins_hold():
            try:
                outputs = self.engine.step()
            except Corrupted as found:
                raise AssertionError(str(found)) from found
            except KeyboardInterrupt:
                outputs = []
            except EngineBroken:
                assert self.runner.guilty & self.engine.requests.live.keys(), "nobody was at fault"
                self.runner.guilty.clear()
                outputs = []
            else:
                EngineMachine.num_steps += bool(self.runner.launched)
                EngineMachine.num_ahead += self.engine._ahead is not None
        if others:  # then BACKGROUND requests are in no step
            assert all(item.seq.priority for plan in self.runner.launched for item in plan.items)
        assert all(seq.num_overtaken <= MAX_OVERTAKEN for seq in self.engine.scheduler.waiting)
        for output in outputs:
            self.requests[output.request_id].take(output)
            if output.finish_reason:
                EngineMachine.ended[output.finish_reason] += 1
        shed = {output.request_id for output in outputs if output.error and "out of memory" in output.error}
        assert len(shed) <= (self.runner.memory == 0)
        self.engine.check_integrity()

    @contextmanager
    def pins_hold(self) -> Iterator[None]:
        """What was pinned before and was not unpinned meanwhile holds what it held, but for what is distrusted."""
        blocks, first_event = self.engine.blocks, self.engine.events.last_seq
        before = {o: {b: blocks._index.contents[b] for b in blocks.pins.blocks(o)} for o in blocks.pins.owners()}
        lost = self.runner.num_rebuilt, self.num_distrusted
        yield
        events = self.engine.events.since(first_event)
        unpinned = {event.owner for event in events if event.kind == "unpin"}
        if (self.runner.num_rebuilt, self.num_distrusted) != lost:
            return
        for owner in before.keys() & set(blocks.pins.owners()) - unpinned:
            assert all(blocks._index.contents[block] == content for block, content in before[owner].items())

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.runner.next_fault = None
            self.drain()
            assert all(seq.status is SequenceStatus.FINISHED for seq in self.engine.requests.live.values())


def run_machine(num_steps: int, examples_a_round: int, first_seed: int) -> str:
    """Run rounds of machines, each from the next seed, until as many engine steps have run and more than a twentieth of
    them ahead, which a round's luck with its kinds of runner may leave too few; says what they were."""
    EngineMachine.num_steps = EngineMachine.num_ahead = 0
    EngineMachine.ended, began = Counter(), time.monotonic()
    for round_seed in range(first_seed, first_seed + 40):
        if EngineMachine.num_steps >= num_steps and EngineMachine.num_ahead > EngineMachine.num_steps // 20:
            break
        run_state_machine_as_test(
            seed(round_seed)(EngineMachine),
            settings=settings(
                max_examples=examples_a_round,
                stateful_step_count=40,
                deadline=None,
                derandomize=False,  # hypothesis's choice where CI is set: every round the same
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    seconds = time.monotonic() - began
    ends = ", ".join(f"{count:,} {reason}" for reason, count in EngineMachine.ended.most_common())
    assert EngineMachine.num_ahead > EngineMachine.num_steps // 20, "hardly a step was launched ahead"
    ahead = f"{EngineMachine.num_ahead:,} of them launched ahead"
    steps = f"{EngineMachine.num_steps:,} engine steps from seed {first_seed} on in {seconds:.0f} s"
    return f"{steps}, {ahead}; ends: {ends}"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of faults cost neither pauses nor tracebacks."""
    monkeypatch.setattr(logging.getLogger("pageturn.engine"), "disabled", True)
    monkeypatch.setattr("engine.recovery._PAUSE_BEFORE_SHEDDING", 0)
    monkeypatch.setattr("engine.recovery.gc.collect", lambda: 0)  # of all of torch's objects, at every fault


def test_no_history_of_requests_and_faults_loses_doubles_or_changes_a_token() -> None:
    print(run_machine(CI_STEPS, examples_a_round=20, first_seed=1))
    assert EngineMachine.num_steps >= CI_STEPS


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_long_history_of_requests_and_faults_does_either() -> None:
    print(run_machine(LONG_STEPS, examples_a_round=150, first_seed=time.time_ns()))
    assert EngineMachine.num_steps >= LONG_STEPS
