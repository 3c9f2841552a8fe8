"""Step n + 1 is launched while step n runs: nothing of that may show but the time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.outputs import RequestPriority
from engine.sampling_params import BeamSearchParams, SamplingParams
from faulty_runner import FaultyRunner, faulty_engine
from history_model import expected_output

PROMPT = [1, 2, 3, 4, 5]


class Recorder(FaultyRunner):
    """calls: "launch" and "collect", in the order in which they came. collect_fault: what the next collect raises."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leads = True
        self.calls: list[str] = []
        self.collect_fault: BaseException | None = None

    def fail_once(self, where: str, fault: BaseException) -> None:
        if where == "launch":
            once = iter([fault])
            self.fault = lambda plan: next(once, None)
        else:
            self.collect_fault = fault

    def launch(self, plan: Any) -> Any:
        self.calls.append("launch")
        return super().launch(plan)

    def collect(self, handle: Any) -> list[int]:
        self.calls.append("collect")
        fault, self.collect_fault = self.collect_fault, None
        if fault is not None:
            raise fault
        return super().collect(handle)


class Client:
    """An engine over a Recorder, and what it has said: by request its tokens and how it ended."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.engine, _ = faulty_engine(num_blocks, 4)
        self.runner = Recorder(num_blocks, 4)
        self.engine.runner = self.engine.executor._runner = self.engine.requests.runner = self.runner
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def ask(self, prompt: list[int], max_tokens: int, **more: Any) -> int:
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, **more))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                assert output.request_id not in self.ends, "an output after the last one"
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.ends_request and output.finish_reason:
                    self.ends[output.request_id] = output.finish_reason
            self.engine.check_integrity()

    def finish(self) -> None:
        for _ in range(300):
            if self.engine.is_finished():
                break
            self.step()
        assert self.engine.is_finished()
        assert self.engine.blocks.num_active == 0
        assert self.engine.executor.tokens_in_flight == 0

    def expect(self, request: int, prompt: list[int], max_tokens: int) -> None:
        """The request, which no token stops, has had all of its tokens."""
        assert self.tokens[request] == expected_output(prompt, max_tokens, 64, stop_ids=())
        assert self.ends[request] == "length"


@pytest.fixture
def client() -> Client:
    return Client()


def test_the_next_step_is_launched_before_this_ones_tokens_are_collected(client: Client) -> None:
    client.ask(PROMPT, 4, ignore_eos=True)
    client.finish()
    calls = ["launch", "launch", "collect", "launch", "collect", "launch", "collect", "collect"]
    assert client.runner.calls == calls


def test_many_requests_get_the_tokens_of_a_model_that_sees_all_of_their_history(client: Client) -> None:
    prompts = [PROMPT[: 1 + i % 5] * (1 + i % 3) + [i] for i in range(20)]
    ids = [client.ask(prompt, 3 + i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    client.finish()
    for i, (request, prompt) in enumerate(zip(ids, prompts, strict=True)):
        client.expect(request, prompt, 3 + i)
    calls = client.runner.calls
    behind = sum(calls[i - 1 : i + 1] == ["launch", "launch"] or calls[i - 2] == "launch" for i in range(2, len(calls)))
    assert behind > len(calls) // 3


def test_no_step_is_run_for_a_request_whose_last_token_is_on_its_way(client: Client) -> None:
    request = client.ask(PROMPT, 3, ignore_eos=True)
    client.finish()
    assert client.runner.launched == [([request], 5), ([request], 1), ([request], 1)]


def test_what_a_stopped_request_was_launched_for_in_vain_reaches_nobody(client: Client) -> None:
    prompts = ([i, j] for i in range(90) for j in range(90))
    prompt = next(p for p in prompts if 2 < len(expected_output(p, 50, 64)) < 9)
    want = expected_output(prompt, 50, 64)
    stopped, other = client.ask(prompt, 50), client.ask(PROMPT, 30, ignore_eos=True)
    client.finish()
    assert client.tokens[stopped][:-1] == want and client.ends[stopped] == "stop"
    client.expect(other, PROMPT, 30)
    together = sum(ids == [stopped, other] for ids, _ in client.runner.launched)
    assert together == 1 + len(want) + 1  # with the prompts, and once in vain


def test_a_request_aborted_while_its_next_token_is_on_its_way_ends_at_once(client: Client) -> None:
    gone, other = client.ask(PROMPT, 30), client.ask([9, 9], 12, ignore_eos=True)
    client.step(3)
    assert client.engine._ahead is not None
    client.engine.abort(gone)
    again = client.ask(PROMPT, 6, ignore_eos=True)  # on the blocks just given back
    client.finish()
    assert client.ends[gone] == "abort"
    client.expect(other, [9, 9], 12)
    client.expect(again, PROMPT, 6)


def test_when_all_that_was_launched_ahead_is_aborted_nothing_is_waited_for(client: Client) -> None:
    gone = client.ask(PROMPT, 30)
    client.step()
    client.engine.abort(gone)
    client.runner.calls.clear()
    client.step()
    assert client.ends == {gone: "abort"} and client.runner.calls == []
    client.finish()
    request = client.ask(PROMPT, 3, ignore_eos=True)
    client.finish()
    client.expect(request, PROMPT, 3)


def test_one_preempted_while_its_next_token_is_on_its_way_gets_each_token_once(client: Client) -> None:
    ids = [client.ask([*PROMPT, i], 12, ignore_eos=True) for i in range(2)]
    client.step(3)
    client.engine.scheduler.preempt_all()
    client.finish()
    for i, request in enumerate(ids):
        client.expect(request, [*PROMPT, i], 12)


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_fault_of_a_step_launched_ahead_costs_nobody_a_token(client: Client, where: str) -> None:
    ids = [client.ask([*PROMPT, i], 20, ignore_eos=True) for i in range(3)]
    client.step(4)
    client.runner.fail_once(where, RuntimeError("once"))
    client.finish()
    for i, request in enumerate(ids):
        client.expect(request, [*PROMPT, i], 20)


def test_a_guilty_request_is_found_though_its_step_was_launched_ahead(client: Client) -> None:
    ids = [client.ask([*PROMPT, i], 20, ignore_eos=True) for i in range(3)]
    client.step(4)
    runner = client.runner
    runner.fault = lambda plan: ValueError("guilty") if any(i.seq.request_id == ids[1] for i in plan.items) else None
    client.finish()
    assert client.ends[ids[1]] == "error"
    client.expect(ids[0], [*PROMPT, 0], 20)
    client.expect(ids[2], [*PROMPT, 2], 20)


def test_logits_that_are_not_finite_end_one_request_and_its_next_step_is_dropped(client: Client) -> None:
    ids = [client.ask([*PROMPT, i], 20, ignore_eos=True) for i in range(2)]
    client.step(4)
    client.runner.bad.add(ids[0])
    client.finish()
    assert client.ends[ids[0]] == "error"
    client.expect(ids[1], [*PROMPT, 1], 20)


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_an_interrupt_loses_no_token(client: Client, where: str) -> None:
    request = client.ask(PROMPT, 20, ignore_eos=True)
    client.step(4)
    client.runner.fail_once(where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        client.step()
    assert client.engine.executor.tokens_in_flight == 0
    client.finish()
    client.expect(request, PROMPT, 20)


def test_where_blocks_run_short_steps_run_one_at_a_time_and_tokens_stay_right() -> None:
    client = Client(num_blocks=8)
    ids = [client.ask([*PROMPT, i], 20, ignore_eos=True) for i in range(4)]
    client.finish()
    assert client.engine.stats.num_preemptions > 0
    for i, request in enumerate(ids):
        client.expect(request, [*PROMPT, i], 20)
    assert ["launch", "launch"] in [client.runner.calls[i : i + 2] for i in range(len(client.runner.calls))]


@pytest.mark.parametrize(
    ("params", "priority"),
    [
        (SamplingParams(max_tokens=6, n=2), RequestPriority.NORMAL),
        (SamplingParams(max_tokens=6, logprobs=1), RequestPriority.NORMAL),
        (BeamSearchParams(beam_width=2, max_tokens=6), RequestPriority.NORMAL),
        (SamplingParams(max_tokens=6), RequestPriority.BACKGROUND),
    ],
)
def test_a_request_that_needs_more_than_its_own_next_token_is_not_launched_ahead(
    client: Client, params: SamplingParams | BeamSearchParams, priority: RequestPriority
) -> None:
    client.engine.add_request(PROMPT, params, priority)
    client.step()
    assert client.engine._ahead is None, "the prompt's step is followed before it is known what came of it"
    client.finish()
    in_vain = client.engine.scheduler.num_steps - len(client.runner.launched)
    assert in_vain <= 1, "planned in vain"  # once while all last tokens are on their way


def test_all_full_blocks_of_a_reply_are_found_by_the_next_turn(client: Client) -> None:
    request = client.ask(PROMPT, 22, ignore_eos=True)
    client.finish()
    history = PROMPT + client.tokens[request]
    computed = len(history) - 1  # the last token was sampled, not computed
    assert client.engine.explain([*history, 1]).num_hit_tokens == computed // 4 * 4


def test_a_request_alone_that_outgrows_the_pool_gets_the_same_tokens_as_one_step_at_a_time() -> None:
    lengths = []
    for leads in (False, True):
        client = Client(num_blocks=3)
        client.runner.leads = leads
        request = client.ask(PROMPT, 30, ignore_eos=True)
        client.finish()
        lengths.append(len(client.tokens[request]))
        client.expect(request, PROMPT, lengths[0])
    assert lengths == [12 + 1 - len(PROMPT)] * 2


def test_exit_with_a_step_launched_ahead_ends_all(client: Client) -> None:
    client.ask(PROMPT, 30)
    client.step()
    client.engine.exit()
    client.finish()
    assert client.ends == {1: "abort"}


def test_a_token_that_is_dropped_is_not_counted() -> None:
    """That of a stream which a token has ended while the next step ran."""
    client = Client()
    stop = list(range(0, 90, 9))
    requests = [client.ask([i, 3], 50, stop_token_ids=stop) for i in range(20)]
    while not client.engine.is_finished():
        client.step()
    assert "stop" in client.ends.values()
    assert client.engine.stats.output_tokens == sum(len(client.tokens[request]) for request in requests)
