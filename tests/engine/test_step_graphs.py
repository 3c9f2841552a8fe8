"""Steps through graphs: the tokens of eager steps, whatever comes and goes, within a budget, or a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, BeamSearchParams, SamplingParams, model_runner, step_graphs
from engine.graph_inputs import GraphInputs
from engine.graph_shapes import Shape, all_shapes, capture_order, decode_sizes
from engine.sampling_params import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from engine.step_graphs import StepGraphs, why_eager
from mixed_requests import prompts, serve
from models.layers.attention import attention_layers
from reference import assert_greedy

pytest.importorskip("triton")

from fake_graphs import SETTINGS, ReferenceBackend, graphs_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner.ModelRunner, "warm_up", lambda self, progress: None)


def tokens(llm: LLM, asked: list[list[int]], params: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(asked, params, use_tqdm=False)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 14])
def test_batches_around_the_captured_sizes_have_the_greedy_tokens_of_transformers(
    graphed: LLM, reference: Any, count: int
) -> None:
    for _ in range(2):  # the second time the prompts are cached
        assert_greedy(reference, prompts(count), tokens(graphed, prompts(count), GREEDY))
    assert graphs_of(graphed)._recorder.replays > 8  # type: ignore[attr-defined]


def test_sequences_that_are_preempted_come_back_with_their_new_tables(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, reference: Any
) -> None:
    import fake_graphs

    fake_graphs.install(monkeypatch)
    llm = LLM(tiny_qwen3, **SETTINGS | {"num_kvcache_blocks": 24})
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    assert_greedy(reference, prompts(6), tokens(llm, prompts(6), long))
    assert llm.stats()["preemptions"] > 0
    assert graphs_of(llm)._recorder.replays > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seqs", "step"), [(2, 2), (4, 4), (8, 8), (4, 5), (1, 1)])
def test_steps_as_short_as_many_sequences_draw_from_each_prompt_s_last_token(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, reference: Any, seqs: int, step: int
) -> None:
    """A graph of as many prompts as prompt tokens has as many rows to draw from as rows, in another order."""
    import fake_graphs

    fake_graphs.install(monkeypatch)
    llm = LLM(tiny_qwen3, **SETTINGS | {"max_num_seqs": seqs, "max_num_batched_tokens": step})
    for asked in (prompts(5), *([one] for one in prompts(5))):
        assert_greedy(reference, asked, tokens(llm, asked, GREEDY))
    assert graphs_of(llm)._recorder.replays > 8  # type: ignore[attr-defined]


def test_the_limits_of_a_request_s_settings_are_such_as_a_graph_s_draw_holds(graphed: LLM) -> None:
    """More than float32 holds would fail there, and two such requests at once end the engine."""
    ends = [{"temperature": MAX_TEMPERATURE}, {"repetition_penalty": MAX_REPETITION_PENALTY}]
    ends += [{"repetition_penalty": MIN_REPETITION_PENALTY}, {"temperature": 5e-324}]
    params = [SamplingParams(max_tokens=5, ignore_eos=True, seed=1, **settings) for settings in ends for _ in range(2)]
    outputs = graphed.generate(prompts(len(params)), params, use_tqdm=False)
    assert [(out.finish_reason, len(out.token_ids)) for out in outputs] == [("length", 5)] * len(params)
    context = graphed.engine.max_model_len
    for stop_ids in ([], list(range(100, 200))):  # more of them than a row of the draw has room for
        longest = SamplingParams(temperature=0, max_tokens=10**19, min_tokens=10**19, stop_token_ids=stop_ids)
        outputs = graphed.generate([[3] * (context - 4)] * 2, longest, use_tqdm=False)
        assert [(out.finish_reason, len(out.token_ids)) for out in outputs] == [("length", 4)] * 2


def test_decodes_over_one_system_prompt_share_it_while_others_come_and_go(graphed: LLM, reference: Any) -> None:
    backend = attention_layers(graphs_of(graphed)._model)[0].backend
    assert isinstance(backend, ReferenceBackend)
    system, before = list(range(40, 61)), backend.tiles_seen
    tokens(graphed, [system], GREEDY)  # from here on it stands in the cache
    asked = [system + own for own in prompts(7)] + prompts(5)
    params = [SamplingParams(temperature=0.0, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(len(asked))]
    for out, prompt, one in zip(tokens(graphed, asked, params), asked, params, strict=True):
        assert_greedy(reference, [prompt], [out])
        assert len(out) == one.max_tokens
    assert backend.tiles_seen > before


@pytest.mark.parametrize("least", [5, 9])
def test_a_row_that_another_sequence_takes_while_nobody_looks_shares_nothing_of_the_one_before(
    tiny_qwen3: Path, reference: Any, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 9 decodes, not with 8: the last of them ends, and another prompt takes its place beside the others."""
    import fake_graphs

    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(ReferenceBackend, "least_sharing", least)
    llm = LLM(tiny_qwen3, **SETTINGS)
    stem, lone = list(range(40, 64)), [300 + i * 3 % 97 for i in range(30)]
    asked = [[*stem, 70 + 7 * i, 9] for i in range(9)]
    tokens(llm, asked[:1], GREEDY)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ids = {llm.add_request(prompt, long if i < 8 else GREEDY): prompt for i, prompt in enumerate(asked)}
    done: dict[int, list[int]] = {}
    while not llm.is_finished():
        for out in llm.step():
            if out.finish_reason:
                done[out.request_id] = out.token_ids
                if lone not in ids.values():
                    ids[llm.add_request(lone, long)] = lone
    assert len(done) == 10
    for request_id, found in done.items():
        assert_greedy(reference, [ids[request_id]], [found])
    backend: Any = attention_layers(graphs_of(llm)._model)[0].backend
    assert backend.tiles_seen > 0
    llm.engine.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_has_the_tokens_that_eager_steps_give(graphed: LLM, tiny_qwen3: Path, seed: int) -> None:
    """The eager engine is another one altogether: sdpa, and the sampler without its kernel."""
    expected = serve(LLM(tiny_qwen3, **SETTINGS), seed)
    found = serve(graphed, seed)
    assert graphs_of(graphed)._recorder.replays > 5  # type: ignore[attr-defined]
    assert {key: new for key, (new, _) in found.items()} == {key: new for key, (new, _) in expected.items()}
    for key, (_, logprobs) in found.items():
        chosen = [entry.logprob for entry in logprobs]
        assert chosen == pytest.approx([entry.logprob for entry in expected[key][1]], abs=1e-3)


CHATS = [
    SamplingParams(top_p=0.9, top_k=40, repetition_penalty=1.1, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(top_p=0.95, seed=2, max_tokens=14, ignore_eos=True),
    SamplingParams(min_p=0.05, presence_penalty=0.6, frequency_penalty=0.8, seed=3, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(logit_bias={5: 4.0, 9: -100.0}, top_k=10, seed=4, max_tokens=9, ignore_eos=True),
    SamplingParams(min_tokens=6, top_p=0.8, seed=5, max_tokens=18, stop_token_ids=list(range(0, 500, 10))),
]


def test_chats_with_truncation_and_penalties_have_the_tokens_of_eager_steps_and_never_leave_the_graphs_draw(
    graphed: LLM, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tokens are counted before the host knows them; a late prompt comes in chunks beside the others."""
    drawn: list[bool] = []
    launch = StepGraphs.launch

    def watched(self: StepGraphs, plan: Any, shape: Any) -> Any:
        step = launch(self, plan, shape)
        drawn.append(step.token_ids is not None)
        return step

    monkeypatch.setattr(StepGraphs, "launch", watched)

    def replies(llm: LLM) -> list[list[int]]:
        engine, found = llm.engine, {}
        ids = [engine.add_request(p, chat) for p, chat in zip(prompts(6), CHATS, strict=True)]
        for step in range(60):
            if step == 5:
                ids.append(engine.add_request([(7 * i) % 400 + 3 for i in range(150)], CHATS[0]))
            for out in engine.step():
                found.setdefault(out.request_id, []).extend(out.new_token_ids)
        return [found[i] for i in ids]

    eager = LLM(tiny_qwen3, **SETTINGS)
    assert replies(graphed) == replies(eager)
    eager.exit()
    assert len(drawn) > 15 and all(drawn)


@pytest.mark.parametrize("chat", CHATS[::3])
def test_a_replay_that_fails_counts_no_token_twice(graphed: LLM, tiny_qwen3: Path, chat: SamplingParams) -> None:
    eager = LLM(tiny_qwen3, **SETTINGS)
    expected = tokens(eager, prompts(3), chat)
    eager.exit()
    graphs, calls = graphs_of(graphed), 0

    def failing(replay: Any) -> Any:
        def run() -> None:
            nonlocal calls
            calls += 1
            replay()
            if calls in (3, 8):
                raise RuntimeError("once")

        return run

    graphs._replays = {size: failing(replay) for size, replay in graphs._replays.items()}
    assert tokens(graphed, prompts(3), chat) == expected
    assert calls > 8


def long_prompts(count: int) -> list[list[int]]:
    """Of 1 to 200 tokens, some with heads in common."""
    return [[(7 * i + j * (3 + i % 2)) % 500 + 3 for j in range(1 + (37 * i) % 200)] for i in range(count)]


@pytest.fixture
def without_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: Any, plan: Any) -> Any:
        pytest.fail(f"an eager step: {plan}")

    monkeypatch.setattr(model_runner.StepInputs, "build", build)


@pytest.mark.parametrize("budget", [64, 80, 300])
def test_prompts_in_chunks_beside_decodes_run_in_graphs_and_have_the_greedy_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, without_eager_steps: None, tiny_qwen3: Path, reference: Any, budget: int
) -> None:
    import fake_graphs

    fake_graphs.install(monkeypatch)
    llm = LLM(tiny_qwen3, **SETTINGS | {"max_num_batched_tokens": budget, "max_num_seqs": 8})
    asked = long_prompts(14)
    for _ in range(2):  # the second time nearly all of each prompt is cached
        assert_greedy(reference, asked, tokens(llm, asked, GREEDY))
    assert llm.engine.stats.cached_tokens > 500
    llm.exit()


def test_a_step_behind_another_takes_its_ids_from_there(
    graphed: LLM, without_eager_steps: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most decodes are launched without the host knowing their token; two prompts come later, in steps of their own."""
    told: list[tuple[int, int]] = []
    send = GraphInputs.send

    def watched(self: GraphInputs, items: Any, *rest: Any) -> bool:
        unknown = sum(item.start + item.num_tokens > len(item.seq.token_ids) for item in items)
        told.append((unknown, len(items)))
        return send(self, items, *rest)

    monkeypatch.setattr(GraphInputs, "send", watched)
    engine, replies = graphed.engine, {}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asked = long_prompts(9)[2:7]
    ids = [engine.add_request(prompt, params) for prompt in asked[:3]]
    for step in range(80):
        if step in (9, 12):
            ids.append(engine.add_request(asked[len(ids)], params))
        for out in engine.step():
            replies.setdefault(out.request_id, []).extend(out.new_token_ids)
    assert_greedy(reference, asked, [replies[i] for i in ids])
    assert sum(unknown for unknown, _ in told) > 0.8 * 5 * 19, "tokens were waited for"
    assert any(0 < unknown < count for unknown, count in told), "no prompt came beside a decode of an unknown token"


def test_beams_are_those_of_eager_steps(graphed: LLM, tiny_qwen3: Path) -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=10)
    eager, found = (
        [[beam.token_ids for beam in out.outputs] for out in llm.generate(prompts(2), beams, use_tqdm=False)]
        for llm in (LLM(tiny_qwen3, **SETTINGS), graphed)
    )
    assert found == eager
    assert graphs_of(graphed)._recorder.replays > 5  # type: ignore[attr-defined]


def test_capturing_and_padding_write_nothing_to_the_cache(graphed: LLM) -> None:
    cache = graphed.engine.runner.kv_cache  # type: ignore[attr-defined]
    assert not cache.any()
    tokens(graphed, prompts(3), GREEDY)  # three rows in a graph of four
    used = -(-max(len(p) + GREEDY.max_tokens for p in prompts(3)) // 4) * 3
    assert 0 < int(cache.any(-1).any(-1).any(-1).any(0).any(0).sum()) <= used


def test_a_table_is_sent_as_a_whole_once_and_then_grows_on_the_device(
    graphed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce, sent = GraphInputs._introduce, []

    def watched(self: GraphInputs, newcomers: list[Any], turn: int) -> None:
        sent.extend(newcomer.row.seq.seq_id for newcomer in newcomers)
        introduce(self, newcomers, turn)

    monkeypatch.setattr(GraphInputs, "_introduce", watched)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)  # ten blocks of four tokens
    tokens(graphed, prompts(4), long)
    assert len(sent) == len(set(sent)) == 4


def test_an_eager_step_between_graphs_leaves_no_gap_in_the_tables(graphed: LLM, reference: Any) -> None:
    """While a long prompt is computed in chunks, the others decode eagerly over block borders."""
    graphs = graphs_of(graphed)
    graphs.shapes = [shape for shape in graphs.shapes if not shape.tokens]
    first, second = [5, 6, 7], [(11 * i) % 500 + 3 for i in range(200)]
    engine, replies = graphed.engine, {}
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    ids = [engine.add_request(first, params)]
    for step in range(60):
        if step == 6:
            ids.append(engine.add_request(second, params))
        for out in engine.step():
            replies.setdefault(out.request_id, []).extend(out.new_token_ids)
    assert_greedy(reference, [first, second], [replies[i] for i in ids])


def test_a_replay_that_fails_costs_no_token(graphed: LLM, reference: Any) -> None:
    graphs = graphs_of(graphed)
    calls = 0

    def failing(size: int, replay: Any) -> Any:
        def run() -> None:
            nonlocal calls
            calls += 1
            replay()
            if calls == 4:
                raise RuntimeError("once")

        return run

    graphs._replays = {size: failing(size, replay) for size, replay in graphs._replays.items()}
    assert_greedy(reference, prompts(5), tokens(graphed, prompts(5), GREEDY))
    assert calls > 4


def test_logits_that_are_not_finite_end_their_own_request_only(graphed: LLM, reference: Any) -> None:
    """One token's embedding becomes NaN, one that only this request generates: what fails is a decode in a graph."""
    others = prompts(3)
    reply, *replies = tokens(graphed, [[9, 8, 7], *others], GREEDY)
    harmless = {token for row in (*others, *replies, [9, 8, 7]) for token in row}
    place, poison = next((i, token) for i, token in enumerate(reply) if token not in harmless)
    model: Any = graphed.engine.runner.model  # type: ignore[attr-defined]
    embed, forward = model.model.embed_tokens, model.model.embed_tokens.forward
    embed.forward = lambda ids: forward(ids).masked_fill((ids == poison)[:, None], torch.nan)
    bad, *good = graphed.generate([[9, 8, 7], *others], GREEDY, use_tqdm=False)
    assert (bad.token_ids, bad.error) == (reply[: place + 1], "the model produced logits that are not finite")
    assert_greedy(reference, others, [out.token_ids for out in good])


# ---------------------------------------------------------------------- shapes, budget, reasons


def test_every_step_within_the_limits_has_a_shape_that_pads_it_little() -> None:
    shapes = all_shapes(256, 8192)
    assert shapes == sorted(shapes, key=lambda shape: shape.total)

    def shape_of(*size: int) -> Shape:
        return next(shape for shape in shapes if shape.holds(*size))

    assert shape_of(0, 64, 1) == Shape(0, 64, 8)
    for tokens in range(1, 8193, 13):
        padded = shape_of(0, tokens, min(tokens, 4)).tokens
        assert padded - tokens <= max(64, tokens / 4)
    for decodes in (1, 7, 8, 9, 40, 129, 256):
        for tokens, chunks in ((1, 1), (64, 4), (65, 2), (1000, 30), (8192, 64)):
            assert shape_of(decodes, tokens, chunks).decodes >= decodes
    assert not any(shape.holds(257, 0, 0) or shape.holds(0, 8193, 1) for shape in shapes)
    assert all(shape.chunks <= 3 for shape in all_shapes(3, 8192))
    assert all_shapes(2, 16) == [Shape(1), Shape(2), Shape(0, 16, 2), Shape(2, 16, 2)]
    assert Shape(0, 3000, 128) in all_shapes(256, 3000), "a full step of a long prompt's chunks"


def test_few_rows_have_graphs_of_their_own_and_the_largest_is_the_engines_limit() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(4096)[-1] == 512
    assert decode_sizes(300)[-3:] == [272, 288, 300]


def test_the_largest_graph_is_captured_first_and_what_a_budget_cuts_are_the_sizes_between_powers_of_two() -> None:
    decodes = [Shape(size) for size in (1, 2, 4, 8, 16, 24, 32, 40)]
    order = capture_order([*decodes, Shape(0, 64, 4), Shape(0, 80, 4), Shape(8, 128, 4)])
    assert order[:2] == [Shape(8, 128, 4), Shape(40)]
    assert [shape.decodes for shape in order[2:8]] == [32, 16, 8, 4, 2, 1]
    assert order[8:] == [Shape(0, 64, 4), Shape(24), Shape(0, 80, 4)]


@pytest.mark.parametrize("limit", ["memory", "time"])
def test_a_budget_that_is_used_up_leaves_sizes_out_and_says_so(
    graphed: LLM, limit: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fake_graphs

    fake_graphs.install(monkeypatch)
    runner: Any = graphed.engine.runner
    shapes = [Shape(size) for size in (1, 2, 4, 8, 9)]
    inputs = GraphInputs(runner._tables, runner.sampler.vocab_size, 4, shapes, torch.device("cpu"))
    recorder: Any = fake_graphs.FakeRecorder(used=100)
    graphs = StepGraphs(runner.model, runner.sampler, inputs, shapes, 4, torch.device("cpu"), recorder)
    stages: list[tuple[str, float]] = []
    budget, seconds = (250, 60.0) if limit == "memory" else (10**9, -1.0)
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        graphs.capture(budget, lambda stage, percent: stages.append((stage, percent)), seconds)
    if limit == "memory":
        assert graphs.shapes == [Shape(4), Shape(8), Shape(9)]
        assert "left out: 1, 2" in caplog.text
    else:
        assert graphs.shapes == [] and "left out: 1, 2, 4, 8, 9" in caplog.text
    assert stages[0] == ("capturing graphs", 0.0) and stages[-1] == ("capturing graphs", 100.0)


def test_a_step_larger_than_every_graph_is_eager(graphed: LLM, reference: Any) -> None:
    graphs_of(graphed).shapes = [Shape(1), Shape(2), Shape(4)]
    assert_greedy(reference, prompts(7), tokens(graphed, prompts(7), GREEDY))


def test_enforce_eager_captures_nothing_and_the_log_says_why(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        llm = LLM(tiny_llama, **SETTINGS, enforce_eager=True)
    assert llm.engine.runner.graphs is None  # type: ignore[attr-defined]
    assert "graphs: none (enforce_eager is set)" in caplog.text
    llm.exit()


def test_what_cannot_be_captured_has_a_reason(graphed: LLM, make_tiny_model: Any) -> None:
    runner: Any = graphed.engine.runner
    card = SimpleNamespace(device=torch.device("cuda"), attention_backend="triton")
    assert why_eager(False, card, runner.model, runner.sampler) is None  # type: ignore[arg-type]
    on_cpu = why_eager(False, runner.device, runner.model, runner.sampler)
    assert on_cpu == "a cpu has no CUDA graphs"
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain = LLM(make_tiny_model("llama", rope_parameters=scaling), **SETTINGS).engine.runner
    card.attention_backend = "sdpa"
    assert "sdpa" in str(why_eager(False, card, plain.model, runner.sampler))  # type: ignore[arg-type, attr-defined]
    model: Any = plain.model  # type: ignore[attr-defined]
    for layer in step_graphs.attention_layers(model):
        layer.backend = step_graphs.attention_layers(runner.model)[0].backend
    assert "dynamic" in str(why_eager(False, card, model, runner.sampler))  # type: ignore[arg-type]
