"""LLMEngine under random arrivals, aborts and tiny pools: every request ends right, the books always balance."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.outputs import RequestPriority
from engine.sampling_params import SamplingParams
from engine.waiting_queue import MAX_OVERTAKEN
from history_model import EOS, expected_output, history_engine

MAX_MODEL_LEN = 40
# Few distinct tokens and shared heads, so that prefixes meet in the cache all the time.
PROMPTS = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 7, 8, 9][:head] * 2 + tail,
    st.integers(0, 9),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, tuple[list[int], int]] = {}
        self.received: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.ended: dict[int, str] = {}
        self.pinned: dict[int, dict] = {}

    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.sampled_from([1, 4, 16]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
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
        launch = self.engine.runner.launch

        def recording(plan):
            self.engine.runner.plan = plan
            return launch(plan)

        self.engine.runner.plan = None
        self.engine.runner.launch = recording

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from(list(RequestPriority)),
        owner=st.integers(0, 3),
        salt=st.sampled_from(["", "", "a"]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, priority: RequestPriority, owner: int = 0, salt: str = ""
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request_id = self.engine.add_request(prompt, params, priority, owner=owner, turn=owner, cache_salt=salt)
        self.requests[request_id] = (prompt, max_tokens)
        self.received[request_id] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_a_second_turn(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        prompt, _ = self.requests[request_id]
        longer = (prompt + self.received[request_id] + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))[
            : MAX_MODEL_LEN - 1
        ]
        self.add(longer, data.draw(st.integers(1, 12)), RequestPriority.NORMAL)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.abort(request_id)
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    @rule(owner=st.integers(1, 3))
    def pin(self, owner: int) -> None:
        try:
            self.engine.pin(owner)
        except ValueError as error:
            assert "may be pinned" in str(error)

    @rule(owner=st.integers(1, 3))
    def unpin(self, owner: int) -> None:
        self.engine.unpin(owner)

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "a"]))
    def explain(self, prompt: list[int], salt: str) -> None:
        found = self.engine.explain(prompt, salt)
        assert found.num_hit_tokens < len(prompt) == found.num_prompt_tokens
        assert len(found.evicted) <= self.engine.blocks.num_cached

    @rule()
    def abort_an_unknown_id(self) -> None:
        self.engine.abort(10**9)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 12))
    def send_the_same_prompt_again(self, data: st.DataObject, max_tokens: int) -> None:
        prompt, _ = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.add(prompt, max_tokens, RequestPriority.NORMAL)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.engine.check_integrity()

    @rule()
    def drain(self) -> None:
        for _ in range(3000):
            if self.engine.is_finished():
                break
            self.step()
        assert self.engine.is_finished(), "requests hang"
        self.engine.check_integrity()
        assert set(self.ended) == set(self.requests)
        assert self.engine.blocks.num_active == 0

    def step(self) -> None:
        others = any(seq.priority for seq in self.engine._live.values())
        first_event = self.engine.events.last_seq
        outputs = self.engine.step()
        self.check_background(others)
        self.check_pins(first_event)
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            self.received[output.request_id] += [t for t in output.new_token_ids if t != EOS]
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
                self.check_result(output.request_id, output.finish_reason)

    def check_background(self, others: bool) -> None:
        """While anything else is there, BACKGROUND requests are in no step; none is overtaken too often."""
        if others and self.engine.runner.plan is not None:
            assert all(item.seq.priority for item in self.engine.runner.plan.items)
        self.engine.runner.plan = None
        assert all(seq.num_overtaken <= MAX_OVERTAKEN for seq in self.engine._live.values())

    def check_pins(self, first_event: int) -> None:
        """What was pinned before the step and was not unpinned in it holds what it held."""
        blocks = self.engine.blocks
        given_up = {e.owner for e in self.engine.events.since(first_event) if e.kind == "unpin"}
        for owner, contents in self.pinned.items():
            if owner in blocks.pins and owner not in given_up:
                assert all(blocks._content[block] == content for block, content in contents.items())
        self.pinned = {o: {b: blocks._content[b] for b in blocks.pins.blocks(o)} for o in blocks.pins.owners()}

    def check_result(self, request_id: int, reason: str) -> None:
        prompt, max_tokens = self.requests[request_id]
        got = self.received[request_id]
        wanted = expected_output(prompt, max_tokens, MAX_MODEL_LEN)
        assert got == wanted[: len(got)]
        if reason == "error":
            assert len(prompt) >= MAX_MODEL_LEN or len(prompt) > self.pool_tokens
        elif reason == "abort":
            assert request_id in self.aborted
        elif reason == "stop":
            assert got == wanted
        else:
            assert reason == "length"
            # All that was asked for, or all that the model's length or the pool can hold.
            assert got == wanted or len(prompt) + len(got) > self.pool_tokens - 1

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
