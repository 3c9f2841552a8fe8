"""Beam search: transformers' beams, whatever else runs and whatever is taken from it, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import history_model
from engine import LLM, BeamSearchParams, SamplingParams
from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.sampler import BAD_TOKEN
from history_model import history_engine
from reference import assert_beams, reference_beams


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float32").eval()


def ending_often(model: Any, prompt: list[int], count: int = 40) -> list[int]:
    """Ids that stand among the likeliest after the prompt, so that beams end at many lengths."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].topk(count).indices[-3:, :].unique().tolist()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.7, 2.0])
def test_every_setting_means_what_it_means_to_transformers(
    tiny_llama: Path, model: Any, early_stopping: bool | str, length_penalty: float
) -> None:
    prompts = [[(i * 31 + k * 97) % 500 + 3 for i in range(5 + 4 * k)] for k in range(4)]
    eos = ending_often(model, prompts[0])
    params = BeamSearchParams(4, 12, length_penalty, early_stopping)
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=200, kvcache_block_size=4)
    llm.engine.model_config = replace(llm.engine.model_config, eos_token_ids=tuple(eos))
    outs = llm.generate(prompts, params, use_tqdm=False)
    for out, prompt in zip(outs, prompts, strict=True):
        assert_beams(out, reference_beams(model, [prompt], params, eos)[0])
    assert {o.finish_reason for out in outs for o in out.outputs} >= {"stop"}
    assert len({len(o.token_ids) for out in outs for o in out.outputs}) > 1
    llm.exit()


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 9, "max_num_seqs": 9}, {"num_kvcache_blocks": 22, "max_num_seqs": 8}]
)
def test_the_beams_are_the_same_in_chunks_among_others_and_after_preemption(
    tiny_llama: Path, model: Any, settings: dict[str, int]
) -> None:
    prompts = [[(i * 31 + k * 97) % 500 + 3 for i in range(9)] for k in range(4)]
    chosen = {"num_kvcache_blocks": 200, "kvcache_block_size": 4, **settings}
    llm = LLM(tiny_llama, device="cpu", dtype="float32", **chosen)
    beams = BeamSearchParams(3, 12)
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outs = llm.generate([*prompts, *prompts], [*[plain] * 4, *[beams] * 4], use_tqdm=False)
    llm.engine.check_integrity()
    if "num_kvcache_blocks" in settings:
        assert llm.stats()["preemptions"] > 0
    for out, prompt in zip(outs[4:], prompts, strict=True):
        assert_beams(out, reference_beams(model, [prompt], beams, [2])[0])
    llm.exit()


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    engine = history_engine(64, 4)
    engine.add_request([1, 2, 3, 4, 5, 6, 7, 8, 9], BeamSearchParams(4, 3))
    for _ in range(2):
        engine.step()
    engine.check_integrity()
    tables = [seq.block_table for seq in engine.scheduler.running]
    assert len(tables) == 4 and len({tuple(t[:2]) for t in tables}) == 1
    assert len({t[2] for t in tables}) > 1
    assert any(e.kind == "copy" for e in engine.events.since(0))


def test_a_search_that_outgrows_the_pool_ends_with_what_it_has() -> None:
    engine = history_engine(4, 4)
    engine.add_request([1, 2, 3, 4, 5, 6, 7], BeamSearchParams(3, 30))
    outputs = []
    for _ in range(200):
        if engine.is_finished():
            break
        outputs += engine.step()
    assert engine.is_finished() and engine.blocks.num_active == 0
    assert outputs[-1].finish_reason in ("length", "stop")
    assert outputs[-1].beams and all(beam.token_ids for beam in outputs[-1].beams)


def test_two_searches_that_need_each_others_places_both_end() -> None:
    engine = history_engine(64, 4, max_num_seqs=4)
    for k in range(3):
        engine.add_request([k, 2, 3], BeamSearchParams(3, 6))
    ends = []
    for _ in range(100):
        ends += [o for o in engine.step() if o.finish_reason]
    assert len(ends) == 3 and engine.is_finished()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_beam_with_broken_logits_ends_its_search_and_no_other(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    engine = history_engine(64, 4)
    broken = engine.add_request([1, 2, 3], BeamSearchParams(3, 9))
    other = engine.add_request([4, 5], BeamSearchParams(2, 4))
    plain = engine.add_request([6], SamplingParams(max_tokens=6, ignore_eos=True))
    for _ in range(2):
        engine.step()

    def token(history: list[int], index: int) -> int:
        return BAD_TOKEN if history[0] == 1 and index == bad else 7

    monkeypatch.setattr(history_model, "fork_token", token)
    ends = {}
    for _ in range(20):
        ends |= {o.request_id: o for o in engine.step() if o.finish_reason}
        engine.check_integrity()
    assert ends[broken].finish_reason == "error" and "not finite" in (ends[broken].error or "")
    assert ends[other].beams and ends[plain].finish_reason == "length"
    assert engine.is_finished() and engine.blocks.num_active == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_beams(steps: int) -> None:
    engine = history_engine(32, 4)
    request = engine.add_request([1, 2, 3], BeamSearchParams(3, 30))
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.check_integrity()
    (last,) = [o for o in engine.step() if o.finish_reason]
    assert (last.finish_reason, last.ends_request) == ("abort", True)
    assert engine.is_finished() and engine.blocks.num_active == 0


async def test_a_stream_brings_the_best_beam_in_its_last_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.llm_engine.LLMEngine", lambda config, progress: history_engine(128, 4))
    thread = EngineThread(EngineConfig())
    thread.start()
    assert thread.wait_until_settled(10)
    try:
        stream = thread.submit([1, 2, 3], BeamSearchParams(3, 5))
        deltas = [delta async for delta in stream]
        out = stream.output()
        too_long = thread.submit([1] * 70, BeamSearchParams(3, 5))
        (last,) = [delta async for delta in too_long]
    finally:
        thread.shutdown()
    assert [t for d in deltas for t in d.token_ids] == out.token_ids == out.outputs[0].token_ids
    assert len(out.outputs) == 3 and deltas[-1].finish_reason == out.finish_reason
    scores = [o.score or 0.0 for o in out.outputs]
    assert scores == sorted(scores, reverse=True)
    assert last.finish_reason == "error" and "70 tokens" in (last.error or "")
    assert [o.finish_reason for o in too_long.output().outputs] == ["error"]


def test_more_beams_than_run_at_once_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="beam_width=9 is above max_num_seqs=8"):
        history_engine(32, 4).add_request([1], BeamSearchParams(9))
    with pytest.raises(ValueError, match="beam_width=60 is too many for a vocabulary of 97"):
        history_engine(32, 4, max_num_seqs=64, max_num_batched_tokens=64).add_request([1], BeamSearchParams(60))
