"""Faults in a real model's steps, with transformers as the judge of everybody else's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, BeamSearchParams, SamplingParams
from engine.model_runner import ModelRunner
from engine.scheduler import StepPlan
from perilous_runner import perilous_engine
from reference import assert_greedy

POISON = 511  # the token whose embedding is NaN
PROMPTS = [[11 + i, 5, 8, 13 + i] * (3 + 2 * i) for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=20, seed=5)


@pytest.fixture(scope="module")
def folder(make_tiny_model: Any) -> Path:
    return make_tiny_model("llama", seed=3, tie_word_embeddings=False)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    # The six requests below need nearly all of these blocks, so that every block is used again.
    settings = {"num_kvcache_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    llm = LLM(folder, device="cpu", dtype="float32", **settings)
    yield llm
    llm.exit()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight[POISON] = 0  # as poison() does: nobody is to choose that token
    return model


def poison(llm: LLM) -> None:
    """Make the model's embedding of one token NaN, so that whoever's prompt holds it has NaN keys and values."""
    model = llm.engine.runner.model  # type: ignore[attr-defined]
    weights = [p for name, p in model.named_parameters() if "embed" in name]
    assert len(weights) == 1 and weights[0].shape[0] == 512
    (head,) = [p for name, p in model.named_parameters() if "lm_head" in name]
    with torch.no_grad():
        weights[0][POISON] = float("nan")
        head[POISON] = 0


@pytest.mark.parametrize("place", [2, 45], ids=["in the first chunk", "in a later chunk"])
def test_a_prompt_that_makes_the_model_produce_nan_ends_alone_and_its_blocks_harm_nobody_later(
    llm: LLM, reference: Any, place: int
) -> None:
    poison(llm)
    bad = [17] * 60
    bad[place] = POISON
    first, *others = llm.generate([bad, *PROMPTS], GREEDY, use_tqdm=False)
    assert (first.finish_reason, first.error) == ("error", "the model produced logits that are not finite")
    assert_greedy(reference, PROMPTS, [o.token_ids for o in others])
    assert (again := llm.generate([bad], GREEDY, use_tqdm=False)[0]).finish_reason == "error"
    assert again.num_cached_tokens == 0
    # Other prompts now get the very blocks that hold NaN; together, so that their tails are read through a mask.
    for shift in range(3):
        fresh = [[t + 20 + shift for t in prompt] for prompt in PROMPTS]
        outputs = llm.generate(fresh, GREEDY, use_tqdm=False)
        assert [o.error for o in outputs] == [None] * len(fresh)
        assert_greedy(reference, fresh, [o.token_ids for o in outputs])


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["greedy", "seeded with penalties"])
def test_an_exception_of_the_runner_for_one_request_leaves_the_others_their_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int, params: SamplingParams
) -> None:
    undisturbed = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.blocks.clear_cache()
    collect, launches = ModelRunner.collect, 0
    guilty = max(llm.engine.requests.live, default=0)

    def failing(self: ModelRunner, handle: Any) -> list[int]:
        nonlocal launches, guilty
        launches += 1
        guilty = guilty or handle.sequences[0].request_id
        tokens = collect(self, handle)  # the whole step has run: keys, values and the sampler's history are written
        if launches >= step and any(seq.request_id == guilty for seq in handle.sequences):
            raise IndexError("row 4 of 3")
        return tokens

    monkeypatch.setattr(ModelRunner, "collect", failing)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    broken = [o for o in outputs if o.finish_reason == "error"]
    assert [o.error for o in broken] == ["IndexError: row 4 of 3"]
    for output, expected in zip(outputs, undisturbed, strict=True):
        if output not in broken:
            assert output.token_ids == expected.token_ids


def test_a_step_too_large_for_the_allocator_is_computed_in_parts_with_the_same_tokens(
    llm: LLM, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ModelRunner.launch
    refused: list[int] = []

    def launch_within(self: ModelRunner, plan: StepPlan) -> Any:
        if plan.num_tokens > 6:
            refused.append(plan.num_tokens)
            torch.empty(2**50, dtype=torch.uint8)  # what the allocator really says
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", launch_within)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_greedy(reference, PROMPTS, [o.token_ids for o in outputs])
    assert 1 <= len(refused) <= 4
    llm.engine.check_integrity()


def test_what_the_other_beams_of_a_search_wrote_is_not_trusted_either_when_one_is_not_finite() -> None:
    """They are in the same step, and end with the first of them: their blocks must be overwritten all the same."""
    engine, runner = perilous_engine(8, 4, max_num_seqs=4)
    search = engine.add_request([1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=12))
    while len(engine.scheduler.running) < 3 or any(len(seq.token_ids) < 6 for seq in engine.scheduler.running):
        engine.step()
    runner.bad.add(search)
    ended = engine.step()
    assert [output.error for output in ended] == ["the model produced logits that are not finite"]
    for i in range(8):  # one by one they come to stand in every block of the pool
        request = engine.add_request([50 + i, 7, 8], SamplingParams(max_tokens=6, ignore_eos=True))
        outputs = []
        while not engine.is_finished():
            outputs += engine.step()
        assert {output.request_id for output in outputs} == {request}
        assert outputs[-1].finish_reason == "length", outputs[-1].error


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_what_a_prompt_wrote_that_never_came_to_its_end_harms_nobody_later(tiny_qwen3: Path, end: str) -> None:
    """Nobody has looked at logits of it: NaN that it wrote would enter others' attention as 0 * NaN."""
    llm = LLM(
        tiny_qwen3,
        device="cpu",
        dtype="float32",
        kvcache_block_size=16,
        num_kvcache_blocks=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    embedding = llm.engine.runner.model.get_parameter("model.embed_tokens.weight")  # type: ignore[attr-defined]
    row = embedding[500].clone()
    with torch.no_grad():
        embedding[500] = torch.nan
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    request = llm.add_request([5, 500] + [6] * 50, greedy)
    llm.step()
    llm.step()
    with torch.no_grad():
        embedding[500] = row  # of the tied head, too
    if end == "preempt":
        llm.engine.scheduler.preempt_all()
        llm.engine.blocks.clear_cache()
    llm.abort(request)
    while not llm.is_finished():
        llm.step()
    outputs = llm.generate([[7, 8, 9], [10, 11, 12, 13], [14], [15, 16]], greedy, use_tqdm=False)
    assert [(out.finish_reason, out.error) for out in outputs] == [("length", None)] * 4
    llm.exit()
