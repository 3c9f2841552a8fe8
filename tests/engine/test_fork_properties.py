"""Forks and beam searches beside plain requests in tiny pools: one wrong copy on write changes a token."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.outputs import BeamResult, RequestPriority, StepOutput
from engine.sampling_params import BeamSearchParams, SamplingParams
from history_model import EOS, expected_beams, expected_output, history_engine

MAX_MODEL_LEN = 40
PROMPTS = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 7, 8, 9][:head] + tail,
    st.integers(0, 9),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
)


class ForkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, tuple[list[int], SamplingParams | BeamSearchParams]] = {}
        self.received: dict[tuple[int, int], list[int]] = {}
        self.aborted: set[int] = set()
        self.open: dict[int, set[int]] = {}

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 4, 16]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(3, 4),
        caching=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, budget: int, max_num_seqs: int, caching: bool) -> None:
        self.engine = history_engine(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
        )
        self.pool_tokens = num_blocks * block_size
        self.block_size = block_size

    @rule(prompt=PROMPTS, n=st.integers(1, 6), max_tokens=st.integers(1, 9), priority=st.sampled_from(RequestPriority))
    def add(self, prompt: list[int], n: int, max_tokens: int, priority: RequestPriority) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        self._add(prompt, params, n, priority)

    @rule(
        prompt=PROMPTS, width=st.integers(1, 3), max_tokens=st.integers(1, 7), priority=st.sampled_from(RequestPriority)
    )
    def search(self, prompt: list[int], width: int, max_tokens: int, priority: RequestPriority) -> None:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=True)
        self._add(prompt, params, 1, priority)

    def _add(self, prompt: list[int], params: Any, count: int, priority: RequestPriority) -> None:
        request = self.engine.add_request(prompt, params, priority)
        self.requests[request] = (prompt, params)
        self.open[request] = set(range(count))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.abort(request)
        self.aborted.add(request)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def drain(self) -> None:
        for _ in range(5000):
            if self.engine.is_finished():
                break
            self.step()
        assert self.engine.is_finished(), "requests hang"
        assert not any(self.open.values())
        assert self.engine.blocks.num_active == 0

    def step(self) -> None:
        for output in self.engine.step():
            key = (output.request_id, output.index)
            assert output.index in self.open[output.request_id], "an output after the last one"
            got = self.received.setdefault(key, [])
            got += [t for t in output.new_token_ids if t != EOS]
            if output.finish_reason is not None:
                self.open[output.request_id].remove(output.index)
                assert output.ends_request == (not self.open[output.request_id])
                prompt, params = self.requests[output.request_id]
                if isinstance(params, BeamSearchParams):
                    self.check_beams(prompt, params, output)
                else:
                    self.check(prompt, params, output, got)
        self.engine.check_integrity()

    def check(self, prompt: list[int], params: SamplingParams, output: StepOutput, got: list[int]) -> None:
        wanted = expected_output(prompt, params.max_tokens, MAX_MODEL_LEN, output.index)
        assert got == wanted[: len(got)]
        reason = output.finish_reason
        if reason == "error":
            assert len(prompt) > self.pool_tokens
        elif reason == "abort":
            assert output.request_id in self.aborted
        else:
            assert got == wanted or (reason == "length" and len(prompt) + len(got) > self.pool_tokens - 1)

    def check_beams(self, prompt: list[int], params: BeamSearchParams, output: StepOutput) -> None:
        if output.finish_reason in ("error", "abort"):
            assert output.request_id in self.aborted or len(prompt) > self.pool_tokens
            return
        beams: list[BeamResult] = output.beams or []
        if params.beam_width * (len(prompt) + params.max_tokens + self.block_size) <= self.pool_tokens:
            assert [(b.token_ids, b.score) for b in beams] == expected_beams(prompt, params, MAX_MODEL_LEN)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()


TestForks = ForkMachine.TestCase
TestForks.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
