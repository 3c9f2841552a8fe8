"""transformers as the reference of what a model's next tokens are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import BeamSearchParams, RequestOutput

Beams = list[tuple[list[int], float]]


def assert_greedy(model: Any, prompts: list[list[int]], continuations: list[list[int]]) -> None:
    """Each continuation is the model's own greedy one: at every position, given the tokens before it, the next
    token is the argmax. A forward shows for all positions what a decoding loop would show step by step; what pads
    the shorter rows stands after their tokens, where causal attention does not look."""
    rows = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
    for first in range(0, len(rows), 8):
        group = rows[first : first + 8]
        width = max(map(len, group))
        with torch.inference_mode():
            best = model(torch.tensor([row + [0] * (width - len(row)) for row in group])).logits.argmax(-1)
        for i, row in enumerate(group, start=first):
            assert best[i - first, len(prompts[i]) - 1 : len(row) - 1].tolist() == continuations[i]


def assert_logprobs(model: Any, ids: list[int], first: int, entries: list[Any], count: int) -> None:
    """Entry i is that of ids[first + i] after what stands before it."""
    assert len(entries) == len(ids) - first
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    for position, entry in enumerate(entries, start=first):
        row = rows[position - 1]
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        best = row.topk(count) if count else torch.topk(row, 1)
        assert [t for t, _ in entry.top] == best.indices.tolist()[:count]
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist()[:count], abs=1e-4)


def reference_beams(model: Any, prompts: list[list[int]], params: BeamSearchParams, eos: list[int]) -> list[Beams]:
    """The beams of each prompt (all of one length), best first: ids without the end-of-sequence id and what pads, and
    scores."""
    found = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    rows = found.sequences[:, len(prompts[0]) :].tolist()
    for row, score in zip(rows, found.sequences_scores.tolist(), strict=True):
        end = next((i for i, token in enumerate(row) if token in eos), len(row))
        beams.append((row[:end], score))
    return [beams[i : i + params.beam_width] for i in range(0, len(beams), params.beam_width)]


def assert_beams(out: RequestOutput, beams: Beams) -> None:
    """The output's beams are these, and the best of them stands on top."""
    assert [o.token_ids for o in out.outputs] == [ids for ids, _ in beams]
    assert [o.score for o in out.outputs] == pytest.approx([score for _, score in beams], abs=1e-4)
    best = out.outputs[0]
    assert (out.token_ids, out.text, out.finish_reason) == (best.token_ids, best.text, best.finish_reason)
