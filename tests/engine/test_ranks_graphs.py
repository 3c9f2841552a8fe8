"""Two ranks whose steps are graphs: the same ones on both, the tokens of eager steps, and steps launched behind others.

The processes and gloo are real, the graphs are imitated.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphs_rank
from engine import LLM, BeamSearchParams, SamplingParams, rank_group
from engine.model_runner import StepHandle
from engine.plan_deltas import PlanEncoder
from engine.rank import Chores, RankLoop
from engine.rank_group import RankGroup
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus
from mixed_requests import prompts, serve
from reference import assert_greedy

pytest.importorskip("triton")

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kvcache_block_size": 4, "num_kvcache_blocks": 400, "max_num_seqs": 9,
    "max_num_batched_tokens": 64,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def tokens(llm: LLM, asked: list[list[int]], params: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(asked, params, use_tqdm=False)]


def open_pair(folder: Path, **more: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "main", graphs_rank.main)
        return LLM(folder, tensor_parallel_size=2, **SETTINGS | more)


@pytest.fixture(scope="module")
def eager(tiny_qwen3: Path) -> Iterator[LLM]:
    llm = LLM(tiny_qwen3, **SETTINGS)
    yield llm
    llm.exit()


@pytest.fixture(scope="module")
def pair(tiny_qwen3: Path) -> Iterator[LLM]:
    llm = open_pair(tiny_qwen3)
    yield llm
    llm.exit()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By step that the ranks are sent, whether it is to be launched behind one in flight."""
    sent: list[bool] = []
    send = RankGroup.send

    def watched(self: RankGroup, message: Any) -> None:
        if isinstance(message, tuple):
            sent.append(message[2])
        send(self, message)

    monkeypatch.setattr(RankGroup, "send", watched)
    return sent


def test_prompts_and_decodes_launched_behind_others_have_the_greedy_tokens_of_transformers(
    pair: LLM, tiny_qwen3: Path, ahead: list[bool]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    assert_greedy(reference, prompts(14), tokens(pair, prompts(14), GREEDY))
    assert ahead.count(True) > 0.8 * len(ahead) > 15
    pair.engine.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_requests_has_the_tokens_of_one_rank(pair: LLM, eager: LLM, ahead: list[bool], seed: int) -> None:
    """Penalties, truncations, log-probabilities, forks and aborts, some of which no graph draws."""
    expected, found = serve(eager, seed), serve(pair, seed)
    assert {key: new for key, (new, _) in found.items()} == {key: new for key, (new, _) in expected.items()}
    for key, (_, logprobs) in found.items():
        chosen = [entry.logprob for entry in logprobs]
        assert chosen == pytest.approx([entry.logprob for entry in expected[key][1]], abs=1e-3)
    assert True in ahead and False in ahead


def test_forks_and_beams_beside_others_have_the_tokens_of_one_rank(pair: LLM, eager: LLM) -> None:
    forked = SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=10, ignore_eos=True)
    asked: list[Any] = [forked, BeamSearchParams(3, 8), GREEDY, SamplingParams(temperature=0.7, seed=2, max_tokens=15)]

    def served(llm: LLM) -> Any:
        outputs = llm.generate(prompts(4), asked, use_tqdm=False)
        return [[(one.token_ids, one.finish_reason) for one in out.outputs] for out in outputs]

    assert served(pair) == served(eager)


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_rank_costs_no_token_though_a_step_was_launched_ahead(
    pair: LLM, eager: LLM, ahead: list[bool], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "main", graphs_rank.main)
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    expected = tokens(eager, prompts(5), params)
    order = [pair.add_request(p, s) for p, s in zip(prompts(5), params, strict=True)]
    outputs = {}
    for step in range(200):
        if step == 6:
            assert ahead[-1]
            os.kill(pair.engine.ranks._group.processes[which].pid, signal.SIGKILL)  # type: ignore[union-attr]
        outputs |= {out.request_id: out for out in pair.step()}
        if pair.is_finished():
            break
    assert [outputs[i].token_ids for i in order] == expected
    assert ahead[-1], "the new ranks are not as fast as the old ones"


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_without_memory_for_more_graphs_stops_both(
    tiny_qwen3: Path, eager: LLM, which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If they did not agree, steps of one would wait for exchanges that the other does not make."""
    monkeypatch.setenv("FULL_RANK", str(which))
    monkeypatch.setenv("FULL_AFTER", "6")  # recordings; of the first four shapes two are recorded twice
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        llm = open_pair(tiny_qwen3)
    assert "graphs: 4 shapes" in caplog.text and "left out: 0+64, 1, " in caplog.text
    assert len(llm.engine.ranks._shapes) == 4  # type: ignore[union-attr]
    assert tokens(llm, prompts(4), GREEDY) == tokens(eager, prompts(4), GREEDY)
    llm.exit()


# -- the loop of a rank ---------------------------------------------------------------------------------------


class Steps:
    """A runner whose steps end when it is told so; calls: what was done, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: set[int] = set()
        self.faulty: set[int] = set()
        self.num_launched = 0
        self.model = SimpleNamespace(modules=list)
        self.graphs = None
        self.device = SimpleNamespace(device=SimpleNamespace(type="cpu"))

    def launch(self, plan: StepPlan) -> StepHandle:
        self.num_launched += 1
        number = self.num_launched
        self.calls.append(f"launch {number}")
        if number in self.faulty:
            raise ZeroDivisionError("in the model")

        def query() -> bool:
            if self.num_launched == number + 1:
                self.ended.add(number)  # it ends when another one has been launched behind it
            return number in self.ended

        return StepHandle([], None, SimpleNamespace(query=query, number=number))

    def collect(self, handle: StepHandle) -> list[int]:
        self.calls.append(f"collect {handle.arrived.number}")
        return [handle.arrived.number]

    def forget(self, seq_id: int) -> None: ...


def sent_to(runner: Steps, messages: deque[tuple[StepPlan, bool]]) -> list[tuple]:
    ours, theirs = Pipe()
    encoder = PlanEncoder()
    for plan, ahead in messages:
        ours.send((encoder.encode(plan), Chores(), ahead))
    runner.ended.add(len(messages))
    loop = RankLoop(runner, theirs, speaks=True)  # type: ignore[arg-type]
    serve = loop._await_message
    answered: list[tuple] = []

    def await_message() -> None:
        while ours.poll(0):
            answered.append(ours.recv())
        if len(answered) == len(messages):
            ours.send(None)
        serve()

    loop._await_message = await_message  # type: ignore[method-assign]
    loop.serve()
    return answered


def decodes(start: int, seq: Sequence) -> StepPlan:
    return StepPlan([ScheduledSequence(seq, start, 1, True)], 1, 1)


@pytest.fixture
def seq() -> Sequence:
    seq = Sequence(1, [5, 6], SamplingParams(), seed=0, max_tokens=9, stop_ids=frozenset())
    seq.status, seq.block_table = SequenceStatus.RUNNING, [0]
    return seq


def test_a_step_that_is_to_run_ahead_is_launched_while_the_one_before_it_runs(seq: Sequence) -> None:
    runner = Steps()
    answers = sent_to(runner, deque([(decodes(1, seq), False), (decodes(2, seq), True), (decodes(3, seq), True)]))
    assert runner.calls == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]
    assert [answer[:2] for answer in answers] == [("done", ([i], [], [])) for i in (1, 2, 3)]


def test_any_other_step_waits_until_the_one_before_it_is_answered(seq: Sequence) -> None:
    runner = Steps()
    sent_to(runner, deque([(decodes(1, seq), False), (decodes(1, seq), False)]))
    assert runner.calls == ["launch 1", "collect 1", "launch 2", "collect 2"]


def test_a_step_behind_one_that_failed_is_not_launched_if_it_goes_on_from_its_tokens(seq: Sequence) -> None:
    runner = Steps()
    runner.faulty = {1}
    steps = [(decodes(1, seq), False), (decodes(2, seq), True), (decodes(3, seq), True), (decodes(1, seq), False)]
    runner.ended = {1, 2}
    answers = sent_to(runner, deque(steps))
    assert runner.calls == ["launch 1", "launch 2", "collect 2"]
    assert [answer[0] for answer in answers] == ["failed", "failed", "failed", "done"]
    assert isinstance(answers[0][1], ZeroDivisionError) and "was not launched" in str(answers[1][1])
