"""What a step through a graph may go on from, and what it must not: ids that are bad, old, or not the ones taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams, model_runner
from engine.step_graphs import StepGraphs
from mixed_requests import prompts
from models.kernels.row_settings import MAX_BIASES
from reference import assert_greedy, assert_logprobs

pytest.importorskip("triton")

from fake_graphs import SETTINGS, graphs_of


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **settings)


def test_a_step_behind_one_that_drew_nothing_usable_looks_up_no_negative_id(
    graphed: LLM, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would survive the fault of such a step, so what counts is what the model was given."""
    graphs, params = graphs_of(graphed), greedy(max_tokens=12)
    asked = [[9, 8, 7], *prompts(3)]
    reply, *others = (out.token_ids for out in graphed.generate(asked, params, use_tqdm=False))
    harmless = {token for row in (*asked, *others) for token in row}
    place, poison = next((i, token) for i, token in enumerate(reply[:-2]) if token not in harmless)
    embed: Any = graphed.engine.runner.model.model.embed_tokens  # type: ignore[attr-defined]
    forward, step_rows = embed.forward, graphs._step_rows.step_rows
    lowest, followed = [], []

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        lowest.append(int(ids.min()))
        return forward(ids.clamp(min=0)).masked_fill((ids == poison)[:, None], torch.nan)

    def gathered(*args: Any, **rest: Any) -> None:
        sources, drawn = args[4], args[5]
        followed.append(bool((drawn[sources[sources >= 0].long()] < 0).any()))
        step_rows(*args, **rest)

    monkeypatch.setattr(embed, "forward", embedded)
    monkeypatch.setattr(graphs, "_step_rows", SimpleNamespace(step_rows=gathered))
    bad, *good = graphed.generate(asked, params, use_tqdm=False)
    assert any(followed), "no step was launched behind the bad one"
    assert min(lowest) >= 0
    assert bad.token_ids == reply[: place + 1] and bad.error is not None
    assert_greedy(reference, asked[1:], [out.token_ids for out in good])


def test_no_step_goes_on_from_a_graph_that_an_eager_step_has_come_after(graphed: LLM, reference: Any) -> None:
    """A prompt of one token to come joins a stream in an eager step; what the graph drew before it is old by then."""
    graphs = graphs_of(graphed)
    graphs.shapes = [shape for shape in graphs.shapes if not shape.tokens]
    engine, replies = graphed.engine, {}
    asked = [[5, 6, 7], *([(11 * i + k) % 500 + 3 for i in range(9)] for k in range(4))]
    ids = [engine.add_request(asked[0], greedy(max_tokens=30))]
    for step in range(40):
        if step % 5 == 4 and len(ids) < len(asked):
            ids.append(engine.add_request(asked[len(ids)], greedy(max_tokens=1)))
        for out in engine.step():
            replies.setdefault(out.request_id, []).extend(out.new_token_ids)
    assert [len(replies[i]) for i in ids] == [30, 1, 1, 1, 1]
    assert_greedy(reference, asked, [replies[i] for i in ids])


def test_a_token_that_the_host_draws_is_not_taken_from_the_graph(graphed: LLM, reference: Any) -> None:
    """While more ids are ruled out than a graph's row holds, the host draws; the first step that needs it no longer
    must wait for the host's last token, which the graph's own draw would not have been."""
    stops, least = list(range(0, 512, 2)), 5
    assert len(stops) > MAX_BIASES
    asked = prompts(6)
    differing = 0
    for prompt in asked:
        params = greedy(max_tokens=12, min_tokens=least, stop_token_ids=stops)
        [out] = graphed.generate([prompt], params, use_tqdm=False)
        expected: list[int] = []
        while len(expected) < 12 and not (len(expected) > least and expected[-1] in stops):
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + expected])).logits[0, -1]
            free = int(logits.argmax())
            if len(expected) < least:
                logits = logits.index_fill(0, torch.tensor(stops), -torch.inf)
            expected.append(int(logits.argmax()))
            differing += len(expected) == least and free != expected[-1]
        if len(expected) > least and expected[-1] in stops:
            expected.pop()  # a stop id ends the reply and is no part of it
        assert out.token_ids == expected
    assert differing, "the two draws would have been the same"


def test_log_probabilities_of_a_prompt_are_those_of_transformers_though_graphs_would_hold_the_step(
    graphed: LLM, reference: Any
) -> None:
    asked = [[(7 * i + k) % 500 + 3 for i in range(count)] for k, count in enumerate((3, 40, 100))]
    for prompt, out in zip(
        asked, graphed.generate(asked, greedy(max_tokens=4, prompt_logprobs=2), use_tqdm=False), strict=True
    ):
        assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
        assert_logprobs(reference, prompt, 1, out.prompt_logprobs[1:], 2)
    assert_greedy(reference, asked[:1], [graphed.generate_single(asked[0], greedy(max_tokens=4)).token_ids])


def test_a_preempted_reply_comes_back_with_every_token_counted_once(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, reference: Any
) -> None:
    """What was written comes back as a prompt's chunks, whose last token the step itself counts. Ten ids stand far
    above all others, and each is set back by 2 for every time it was drawn: a wrong count changes the reply."""
    import fake_graphs

    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(model_runner.ModelRunner, "warm_up", lambda self, progress: None)
    llm = LLM(tiny_qwen3, **SETTINGS | {"num_kvcache_blocks": 24})
    bias = torch.zeros(512).index_fill(0, torch.arange(400, 410), 60.0)
    params = greedy(max_tokens=30, logit_bias=dict.fromkeys(range(400, 410), 60.0), frequency_penalty=2.0)
    outs = llm.generate(prompts(6), params, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    for prompt, out in zip(prompts(6), outs, strict=True):
        with torch.inference_mode():
            rows = reference(torch.tensor([prompt + out.token_ids])).logits[0, len(prompt) - 1 : -1]
        for i, row in enumerate(rows):
            counts = torch.bincount(torch.tensor(out.token_ids[:i], dtype=torch.int64), minlength=512)
            assert out.token_ids[i] == int((row + bias - 2.0 * counts).argmax())
    llm.exit()


def test_rows_that_pad_a_step_have_no_context_whatever_stood_there_before(
    graphed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would cost the attention of a sequence's whole context each."""
    launch = StepGraphs.launch
    seen: list[tuple[bool, list[int], list[int]]] = []

    def watched(self: StepGraphs, plan: Any, shape: Any) -> Any:
        step = launch(self, plan, shape)
        x = self._inputs.buffers(shape)
        used = [*range(plan.num_decodes), *(shape.decodes + i for i in range(len(plan.items) - plan.num_decodes))]
        contexts = x.context_lens.tolist()
        padding = [context for row, context in enumerate(contexts) if row not in used]
        seen.append((bool(shape.tokens), [contexts[row] for row in used], padding))
        return step

    monkeypatch.setattr(StepGraphs, "launch", watched)
    for count in (8, 5):  # eight rows, then five in the same shape
        params = [greedy(max_tokens=10 + i) for i in range(count)]
        graphed.generate(prompts(count), params, use_tqdm=False)
    assert {has_prompts for has_prompts, _, padding in seen if padding} == {False, True}
    assert all(all(used) and not any(padding) for _, used, padding in seen)
