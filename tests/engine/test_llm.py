"""LLM as a program uses it: prompts of every kind, results, refusals, text, stepping by hand, Ctrl-C."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from byte_model import BOS, replying_engine
from engine import LLM, BeamSearchParams, RequestOutput, RequestPriority, SamplingParams
from engine.device import native_bf16
from engine.llm_engine import LLMEngine
from engine.stats import EngineStats, min_prefill_sample
from history_model import history_engine, next_token
from models.native import library
from processes import resident_bytes


def tokens(count: int, **params: Any) -> SamplingParams:
    """Exactly that many tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True, **params)


def continuation(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def over(monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, **kwargs: Any) -> LLM:
    """An LLM that finds `engine` loaded."""
    monkeypatch.setattr("engine.llm.LLMEngine", lambda config: engine)
    return LLM("stand-in", **kwargs)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return over(monkeypatch, history_engine(64, 4))


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[LLM]:
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=64)
    yield llm
    llm.exit()


# -- prompts and results ----------------------------------------------------------------------------------


def test_one_prompt_of_ids_gives_one_result(llm: LLM) -> None:
    (out,) = llm.generate([1, 2, 3], tokens(9), use_tqdm=False)
    assert out.token_ids == continuation([1, 2, 3], 9)


def test_many_prompts_come_back_in_their_order_whichever_ends_first(llm: LLM) -> None:
    prompts = [[i, 7] for i in range(20)]
    params = [tokens(1 + (7 * i) % 11) for i in range(20)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.token_ids for o in outs] == [continuation(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]


def test_one_sampling_params_serves_all_prompts(llm: LLM) -> None:
    assert [len(o.token_ids) for o in llm.generate([[1], [2], [3]], tokens(5), use_tqdm=False)] == [5, 5, 5]


@pytest.mark.parametrize(("prompts", "count"), [("hi\n", 1), (["hi\n", "you\n"], 2), (["hi\n", [104, 10]], 2)])
def test_text_and_ids_may_be_mixed(monkeypatch: pytest.MonkeyPatch, prompts: Any, count: int) -> None:
    outs = over(monkeypatch, replying_engine(monkeypatch, "hello")).generate(prompts, use_tqdm=False)
    assert [(o.text, o.finish_reason) for o in outs] == [("hello", "stop")] * count


def test_results_read_as_attributes_and_as_dicts(llm: LLM) -> None:
    out = llm.generate_single([1, 2], tokens(4))
    assert isinstance(out, RequestOutput)
    assert out["token_ids"] == out.token_ids == out.outputs[0].token_ids == out["outputs"][0]["token_ids"]
    assert out["finish_reason"] == out.outputs[0].finish_reason == "length"
    assert "text" in out and out.get("nothing", 5) == 5 and dict(**out)["num_prompt_tokens"] == 2
    with pytest.raises(KeyError):
        out["nothing"]


def test_a_prompt_that_cannot_be_served_is_a_result_and_the_others_are_served(llm: LLM) -> None:
    good, long, also = llm.generate([[1], [2] * 64, [3]], tokens(3), use_tqdm=False)
    assert (long.finish_reason, long.token_ids) == ("error", [])
    assert "64 tokens" in long.error and "63" in long.error
    assert (good.token_ids, also.token_ids) == (continuation([1], 3), continuation([3], 3))


def test_the_urgent_of_many_is_served_first(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(monkeypatch, history_engine(64, 4, max_num_seqs=1))
    low = llm.add_request([1], tokens(3), RequestPriority.LOW)
    high = llm.add_request([2], tokens(3), RequestPriority.HIGH)
    ended = []
    while not llm.is_finished():
        ended += [o.request_id for o in llm.step() if o.finish_reason]
    assert ended == [high, low]


# -- refusals ---------------------------------------------------------------------------------------------

GOOD = [1, 2]
BAD_CALLS: list[tuple[str, Any, Any, str]] = [
    ("no prompts", [], None, r"prompts=\[\] must be"),
    ("a number", 5, None, "prompts=5 must be"),
    ("a prompt that is neither", [GOOD, 5.5], None, "prompts holds 5.5"),
    ("an empty prompt", [GOOD, []], None, "0 tokens; at least 1"),
    ("an id above the vocabulary", [GOOD, [1, 97]], None, "token id 97; ids of this model go from 0 to 96"),
    ("a negative id", [GOOD, [-1]], None, "token id -1; ids of this model go from 0 to 96"),
    ("an id that is no integer", [GOOD, [1, 2.0]], None, "2.0; token ids must be integers from 0 to 96"),
    ("text without a tokenizer", [GOOD, "hello"], None, "no tokenizer"),
    ("too few parameters", [GOOD, GOOD, GOOD], [SamplingParams()] * 2, "2 sampling_params for 3 prompts"),
    ("parameters that are none", [GOOD], {"temperature": 0}, "must be a SamplingParams"),
    ("too many beams", [GOOD, GOOD], [SamplingParams(), BeamSearchParams(9)], "beam_width=9 is above max_num_seqs=8"),
    ("a bias above the vocabulary", [GOOD], SamplingParams(logit_bias={97: 1}), "logit_bias holds 97.*0 to 96"),
    ("a stop id above the vocabulary", [GOOD], SamplingParams(stop_token_ids=[97]), "stop_token_ids holds 97.*0 to 96"),
    ("stop strings without a tokenizer", [GOOD], SamplingParams(stop="x"), "stop strings need a tokenizer"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), [c[1:] for c in BAD_CALLS], ids=[c[0] for c in BAD_CALLS])
def test_a_bad_argument_is_refused_before_anything_is_queued(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.is_finished() and llm.stats()["waiting"] == 0
    assert llm.generate_single(GOOD, tokens(3)).token_ids == continuation(GOOD, 3)


def test_a_bad_priority_is_refused_before_anything_is_queued(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"priority=9 must be one of 0 \(BACKGROUND\).*3 \(HIGH\)"):
        llm.generate([GOOD, GOOD], tokens(3), priority=9, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.is_finished()


@pytest.mark.parametrize("prompt", [5, None, 2.5])
def test_add_request_refuses_what_is_neither_text_nor_ids(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="must be text or a list of token ids"):
        llm.add_request(prompt)
    assert llm.is_finished()


def test_empty_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replying_engine(monkeypatch, "hello")
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, add_bos: list(text.encode()))
    with pytest.raises(ValueError, match="0 tokens"):
        over(monkeypatch, engine).generate("")


def test_an_unknown_keyword_warns_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="no field 'max_num_seq'.*'max_num_seqs'"):
        over(monkeypatch, history_engine(8, 4), max_num_seq=4)


def test_a_bad_setting_is_refused_with_field_value_and_range() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0 must be an integer of at least 1"):
        LLM("default", max_num_seqs=0)


def test_a_context_above_the_models_own_is_refused_with_both_numbers(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=513 .* 512"):
        LLM(tiny_llama, device="cpu", max_model_len=513)


# -- a folder without a tokenizer -------------------------------------------------------------------------


def test_a_cpus_pool_takes_memory_only_where_it_is_written(tiny_llama: Path) -> None:
    before = resident_bytes()
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=40_000)
    pool = llm.engine.runner.kv_cache  # type: ignore[attr-defined]
    assert resident_bytes() - before < pool.nbytes / 4
    assert not pool[:, :, 100::997].any() and pool.nbytes > 400 * 2**20
    llm.exit()


def test_a_folder_without_a_tokenizer_serves_ids(tiny: LLM) -> None:
    out = tiny.generate_single([5, 6, 7], tokens(6, temperature=0))
    assert (len(out.token_ids), out.text, tiny.tokenizer) == (6, "", None)


def test_a_folder_without_a_tokenizer_refuses_text_and_says_what_to_do(tiny: LLM) -> None:
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as a list of token ids"):
        tiny.generate("hello")
    with pytest.raises(ValueError, match="use stop_token_ids"):
        tiny.generate([1, 2], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="no"):
        tiny.chat([{"role": "user", "content": "hello"}])


def test_a_model_with_several_end_of_sequence_ids_stops_on_each(
    tiny: LLM, make_tiny_model: Callable[..., Path]
) -> None:
    """The same weights once more, but with two of the tokens that they produce as ends."""
    prompts = [[5, 6, 7], [9, 8]]
    free = [o.token_ids for o in tiny.generate(prompts, tokens(12, temperature=0), use_tqdm=False)]
    ends = [next(t for t in ids[3:] if t not in free[1 - i]) for i, ids in enumerate(free)]
    llm = LLM(make_tiny_model("llama", eos_token_id=ends), device="cpu", dtype="float32", num_kvcache_blocks=16)
    for out, ids, end in zip(
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False), free, ends, strict=True
    ):
        assert (out.token_ids, out.finish_reason) == (ids[: ids.index(end)], "stop")
    ignoring = llm.generate(prompts, tokens(12, temperature=0), use_tqdm=False)
    assert [o.token_ids for o in ignoring] == free
    llm.exit()


def test_a_stop_token_id_ends_the_request_and_is_named(tiny: LLM) -> None:
    free = tiny.generate_single([5, 6, 7], tokens(12, temperature=0)).token_ids
    out = tiny.generate_single([5, 6, 7], tokens(12, temperature=0, stop_token_ids=[free[4]]))
    assert (out.finish_reason, out.stop_reason) == ("stop", free[4])
    assert out.token_ids == free[: free.index(free[4])]


# -- text -------------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_cuts_text_and_ids_and_frees_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "one EN two END three"))
    out = llm.generate_single("hi\n", SamplingParams(max_tokens=100, stop=["END", "never"]))
    assert (out.text, out.finish_reason, out.stop_reason) == ("one EN two ", "stop", "END")
    assert out.token_ids == [*b"one EN two "]
    assert llm.stats()["kv"]["active"] == 0
    assert llm.stats()["output_tokens"] == len("one EN two END")


def test_a_reply_cut_by_max_tokens_shows_what_was_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "one END"))
    out = llm.generate_single("hi\n", SamplingParams(max_tokens=6, stop="END"))
    assert (out.text, out.finish_reason, out.stop_reason) == ("one EN", "length", None)


def test_emoji_and_han_arrive_whole_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "a 🎉 漢字 b"))
    llm.add_request("hi\n", SamplingParams(max_tokens=50))
    texts = []
    while not llm.is_finished():
        texts += [o.text for o in llm.step()]
    assert texts[-1] == "a 🎉 漢字 b"
    assert not any("\ufffd" in text for text in texts)


def test_a_prompt_in_mid_character_is_continued_and_none_of_it_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "漢!"))
    out = llm.generate_single([*b"x\n", "漢".encode()[0]], SamplingParams(max_tokens=9))
    assert out.text == "漢!"


def test_text_begins_with_one_bos_and_so_does_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replying_engine(monkeypatch, "hello")
    seen: list[list[int]] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: seen.append(plan.items[0].seq.token_ids) or launch(plan))
    llm = over(monkeypatch, engine)
    assert llm.generate_single("hi\n").num_prompt_tokens == 4
    assert llm.chat([{"role": "user", "content": "hi"}]).text == "hello"
    assert [ids.count(BOS) for ids in seen] == [1] * len(seen)


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}])
def test_a_chat_that_is_no_list_of_messages_is_refused_with_an_example(
    monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "hello"))
    with pytest.raises(ValueError, match="must be a list like"):
        llm.chat(messages)


def test_what_cannot_be_told_from_a_default_or_an_id_is_refused(llm: LLM) -> None:
    for bad in (
        lambda: llm.add_request([3], 0),  # type: ignore[arg-type]
        lambda: llm.add_request([True, False]),
        lambda: llm.add_request([3], tokens(1), True),  # type: ignore[arg-type]
        lambda: llm.add_request([3], SamplingParams(max_tokens=4, min_tokens=4, stop_token_ids=tuple(range(97)))),
        lambda: llm.engine.unpin([]),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"must be|forbids"):
            bad()
    assert llm.is_finished()


def test_beams_of_the_strongest_length_penalties_end_with_scores(llm: LLM) -> None:
    for penalty in (-5.0, 5.0):
        out = llm.generate([[1, 2, 3]], BeamSearchParams(3, 40, length_penalty=penalty), use_tqdm=False)[0]
        assert out.finish_reason in ("stop", "length") and len(out.outputs) == 3


def test_a_conversation_named_by_its_owner_can_be_pinned(llm: LLM) -> None:
    llm.generate([list(range(1, 40))], tokens(4), use_tqdm=False, owner=5)
    assert llm.engine.pin(5) > 0
    with pytest.raises(ValueError, match="owner=-1"):
        llm.generate([[1, 2]], tokens(1), use_tqdm=False, owner=-1)


# -- by hand ----------------------------------------------------------------------------------------------


def test_requests_added_by_hand_advance_step_by_step(llm: LLM) -> None:
    first = llm.add_request([1, 2], tokens(4))
    assert [o.token_ids for o in llm.step()] == [continuation([1, 2], 1)]
    second = llm.add_request([3], tokens(2))
    got: dict[int, list[list[int]]] = {first: [], second: []}
    while not llm.is_finished():
        for out in llm.step():
            got[out.request_id].append(out.token_ids)
    assert got[first] == [continuation([1, 2], n) for n in (2, 3, 4)]
    assert got[second] == [continuation([3], n) for n in (1, 2)]


def test_an_abort_by_hand_is_the_last_output_of_the_request(llm: LLM) -> None:
    request = llm.add_request([1, 2], tokens(30))
    llm.step()
    llm.step()
    llm.abort(request)
    llm.abort(request)
    llm.abort(10**9)
    (last,) = llm.step()
    assert (last.finish_reason, last.token_ids) == ("abort", continuation([1, 2], 2))
    assert llm.is_finished() and llm.step() == []


def test_generate_beside_requests_added_by_hand_loses_none_of_their_results(llm: LLM) -> None:
    mine = llm.add_request([1, 2], tokens(5))
    assert llm.generate_single([3], tokens(12)).token_ids == continuation([3], 12)
    outs = []
    while not llm.is_finished():
        outs += llm.step()
    assert {o.request_id for o in outs} == {mine}
    assert (outs[-1].token_ids, outs[-1].finish_reason) == (continuation([1, 2], 5), "length")


def test_after_a_generate_that_a_stop_string_ended_nothing_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = over(monkeypatch, replying_engine(monkeypatch, "one END two"))
    llm.generate_single("hi\n", SamplingParams(stop="END"))
    assert llm.is_finished()


def test_ctrl_c_in_generate_ends_its_requests_only_and_the_engine_goes_on(llm: LLM) -> None:
    mine = llm.add_request([1, 2], tokens(12))
    launch, steps = llm.engine.runner.launch, iter(range(100))

    def interrupted(plan: Any) -> Any:
        handle = launch(plan)
        if next(steps) == 4:
            raise KeyboardInterrupt
        return handle

    llm.engine.runner.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4], [5]], tokens(40), use_tqdm=False)
    assert llm.stats()["running"] == 1
    llm.engine.check_integrity()
    outs = []
    while not llm.is_finished():
        outs += llm.step()
    assert {o.request_id for o in outs} == {mine}, "what was interrupted still speaks"
    assert outs[-1].token_ids == continuation([1, 2], 12)
    assert llm.generate_single([3], tokens(9)).token_ids == continuation([3], 9)
    assert llm.stats()["kv"]["active"] == 0


def test_leaving_twice_does_no_harm(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=4)
    llm.exit()
    llm.exit()


# -- figures ----------------------------------------------------------------------------------------------


def test_the_progress_bar_shows_requests_and_both_rates(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2, 3]] * 3, tokens(5))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    prefill, decode = (
        shown.rsplit(f"{name}=", 1)[1].split(" tok/s")[0].replace(",", "") for name in ("prefill", "decode")
    )
    assert int(prefill) > 0 and int(decode) > 0


def test_without_the_bar_nothing_is_printed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([1, 2, 3], tokens(5), use_tqdm=False)
    llm.generate_single([1, 2, 3], tokens(5))
    assert capsys.readouterr() == ("", "")


def test_the_stats_count_what_was_done(llm: LLM) -> None:
    prompt = list(range(10))
    llm.generate([prompt], tokens(6), use_tqdm=False)
    llm.generate([prompt], tokens(6), use_tqdm=False)
    stats = llm.stats()
    assert {k: stats[k] for k in ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")} == {
        "requests": 2,
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 12,
        "preemptions": 0,
    }
    # The prompt and five of the six output tokens are computed; of the second run's prompt the cached part is not.
    assert stats["prefill_tokens"] == 10 + 2
    assert stats["hit_rate"] == 8 / 20
    assert stats["decode_tokens_per_second"] > 0
    assert (stats["running"], stats["waiting"], stats["kv"]["active"]) == (0, 0, 0)
    assert stats["kv"]["free"] + stats["kv"]["cached"] == stats["kv"]["total"] == 64


def test_a_request_after_exit_is_refused_in_words(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, num_kvcache_blocks=8)
    llm.exit()
    llm.exit()
    with pytest.raises(RuntimeError, match=r"exit\(\) was called"):
        llm.generate([1, 2, 3], use_tqdm=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_how_fast_prompts_are_is_known_before_the_first_one_and_not_from_short_ones(
    ranks: int, tiny_llama: Path
) -> None:
    """The page estimates with it what a reply would have taken without the cache."""
    llm = LLM(tiny_llama, device="cpu", num_kvcache_blocks=40, tensor_parallel_size=ranks)
    before = llm.stats()["prefill_tokens_per_second"]
    assert before > 0
    llm.generate([[3, 4, 5]], tokens(4), use_tqdm=False)
    assert llm.stats()["prefill_tokens_per_second"] == before
    llm.generate([list(range(3, 83))], tokens(4), use_tqdm=False)
    assert llm.stats()["prefill_tokens_per_second"] != before
    llm.exit()


def test_on_a_card_only_steps_that_fill_it_tell_how_fast_prompts_are() -> None:
    stats = EngineStats(400_000.0, min_prefill_sample("cuda", 8192))
    stats.record_step(prefill_tokens=130, sampled_tokens=1, num_decodes=0, seconds=0.0025)
    assert stats.prefill_rate == 400_000
    stats.record_step(prefill_tokens=4_000, sampled_tokens=1, num_decodes=0, seconds=0.02)
    assert 200_000 < stats.prefill_rate < 400_000


def test_a_context_that_is_no_multiple_of_the_block_is_warmed_up_within_it(
    make_tiny_model: Callable[..., Path],
) -> None:
    """Its last block would reach beyond the model's positions; on a card that is an assertion of the device."""
    llm = LLM(make_tiny_model("llama", max_position_embeddings=100), device="cpu", dtype="float32")
    assert len(llm.generate_single([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
    llm.exit()


def test_where_steps_may_only_be_short_those_tell_how_fast_prompts_are(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="cpu", num_kvcache_blocks=40, max_num_batched_tokens=16, max_num_seqs=4)
    before = llm.stats()["prefill_tokens_per_second"]
    assert before > 0
    llm.generate([list(range(3, 43))], tokens(4), use_tqdm=False)
    assert llm.stats()["prefill_tokens_per_second"] not in (0, before)
    llm.exit()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny_qwen3", "shallow_model_path"])
def test_the_weights_go_with_the_engine_and_need_no_garbage_collector(
    model: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    """It does not look at them while another engine serves, see engine/heap.py."""
    llm = LLM(request.getfixturevalue(model), device="cpu", dtype=dtype, num_kvcache_blocks=16)
    llm.generate([[3, 4, 5]], tokens(4), use_tqdm=False)
    runner: Any = llm.engine.runner
    held = [weakref.ref(tensor) for tensor in (runner.kv_cache, *runner.model.parameters())]
    del runner
    gc.disable()
    try:
        llm.exit()
        assert not [tensor() for tensor in held if tensor() is not None]
    finally:
        gc.enable()


def test_the_log_says_how_a_cpu_computes_few_tokens(
    shallow_model_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ways = []
    for model, more in ((shallow_model_path, {}), (shallow_model_path, {"enforce_eager": True}), (tiny_llama, {})):
        caplog.clear()
        with caplog.at_level(logging.INFO, "pageturn.engine"):
            LLM(model, device="cpu", num_kvcache_blocks=16, **more).exit()
        ways += [record.message for record in caplog.records if record.message.startswith("steps of few tokens: ")]
    in_c, eager, dense = (way.removeprefix("steps of few tokens: ") for way in ways)
    try:
        library.load(native_bf16(Path("/proc/cpuinfo")) is not None)
        assert in_c == "in C, compiled for this CPU"
    except library.Unavailable as error:
        assert in_c == f"by PyTorch ({error})"
    assert eager == "by PyTorch (enforce_eager is set)"
    assert dense.startswith("by PyTorch (") and dense != eager


def test_a_reply_whose_text_cannot_be_made_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Speechless:
        """Has no words for one token."""

        def token_bytes(self, token: int) -> bytes:
            if token == continuation([8, 9], 3)[1]:
                raise KeyError(token)
            return b"x"

    engine = history_engine(64, 4)
    engine.tokenizer = Speechless()  # type: ignore[assignment]
    monkeypatch.setattr("engine.llm.LLMEngine", lambda config: engine)
    llm = LLM("stand-in")
    first, bad = llm.add_request([5, 6, 7], tokens(2)), llm.add_request([8, 9], tokens(3))
    ends = {}
    for _ in range(20):
        if llm.is_finished():
            break
        ends |= {out.request_id: (out.finish_reason, out.error) for out in llm.step() if out.finish_reason}
    engine.step()  # its last word on a request that has ended
    assert llm.is_finished() and engine.is_finished()
    assert ends[first] == ("length", None)
    assert ends[bad][0] == "error" and "text of this reply cannot be made: KeyError" in str(ends[bad][1])
