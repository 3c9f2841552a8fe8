"""Log-probabilities of output and prompt: transformers' own, however the request is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_model import replying_engine
from engine import LLM, SamplingParams, logprobs
from engine.detokenizer import Detokenizer
from engine.outputs import StepOutput, TokenLogprobs
from engine.stream import StreamState, merge
from reference import assert_logprobs

PROMPT = [(i * 37) % 500 + 3 for i in range(37)]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float32").eval()


@pytest.fixture
def llm(tiny_llama: Path) -> Iterator[LLM]:
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=64, kvcache_block_size=4)
    yield llm
    llm.exit()


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.7, "top_k": 9, "seed": 3},
    {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 1.0, "seed": 4},
    {"temperature": 0.8, "logit_bias": {7: 100.0, 11: -50.0}, "seed": 5},
]


@pytest.mark.parametrize("count", [0, 5, 20])
def test_they_are_the_models_own_before_temperature_penalties_and_bias(llm: LLM, model: Any, count: int) -> None:
    """A batch in which every row has other settings, and one that asks for none."""
    params = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=count, **s) for s in SETTINGS]
    params.insert(1, SamplingParams(max_tokens=6))
    outs = llm.generate([PROMPT[i:] for i in range(5)], params, use_tqdm=False)
    assert outs.pop(1).logprobs is None
    for i, out in zip((0, 2, 3, 4), outs, strict=True):
        assert_logprobs(model, PROMPT[i:] + out.token_ids, len(PROMPT) - i, out.logprobs, count)
        assert out.outputs[0].logprobs == out.logprobs


def test_each_of_several_continuations_has_its_own(llm: LLM, model: Any) -> None:
    out = llm.generate_single(PROMPT, SamplingParams(n=3, seed=2, max_tokens=4, ignore_eos=True, logprobs=2))
    for one in out.outputs:
        assert one.logprobs is not None
        assert_logprobs(model, PROMPT + one.token_ids, len(PROMPT), one.logprobs, 2)


@pytest.mark.parametrize(
    ("budget", "slice_rows"), [(1024, 1000), (7, 1000), (1024, 5), (64, 1)], ids=["whole", "chunks", "slices", "rows"]
)
@pytest.mark.parametrize("count", [0, 3])
def test_a_prompts_are_the_same_whole_in_chunks_and_in_slices(
    tiny_llama: Path, model: Any, monkeypatch: pytest.MonkeyPatch, budget: int, slice_rows: int, count: int
) -> None:
    monkeypatch.setattr(logprobs, "_SLICE", 512 * slice_rows)
    llm = LLM(
        tiny_llama,
        device="cpu",
        dtype="float32",
        num_kvcache_blocks=64,
        max_num_batched_tokens=budget,
        max_num_seqs=min(7, budget),
    )
    largest = 0
    head = llm.engine.runner.model.compute_logits  # type: ignore[attr-defined]

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return head(hidden)

    monkeypatch.setattr(llm.engine.runner.model, "compute_logits", watched)  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=count)
    outs = llm.generate([PROMPT, PROMPT[5:], [9]], params, use_tqdm=False)
    for out, prompt in zip(outs, (PROMPT, PROMPT[5:], [9]), strict=True):
        assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
        assert_logprobs(model, prompt, 1, out.prompt_logprobs[1:], count)
    assert largest <= max(slice_rows, 3)
    llm.exit()


def test_a_rank_without_logits_takes_part_in_every_slice_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is a collective: a rank that calls it less often than the others leaves them waiting."""
    monkeypatch.setattr(logprobs, "_SLICE", 512 * 5)
    taken = []
    hidden, targets = torch.zeros(12, 4), torch.zeros(12, dtype=torch.int64)
    assert logprobs.score_prompt(hidden, targets, 3, lambda rows: taken.append(len(rows)), 512) is None
    assert taken == [5, 5, 2]


def test_a_cached_prompt_is_computed_again_for_its_logprobs_and_only_then(llm: LLM, model: Any) -> None:
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    asking = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    first = llm.generate_single(PROMPT, plain)
    again = llm.generate_single(PROMPT, asking)
    assert (again.num_cached_tokens, again.token_ids) == (0, first.token_ids)
    assert again.prompt_logprobs is not None
    assert_logprobs(model, PROMPT, 1, again.prompt_logprobs[1:], 1)
    assert llm.generate_single(PROMPT, plain).num_cached_tokens == 36


def test_a_preempted_prompt_reports_every_token_once(tiny_llama: Path, model: Any) -> None:
    llm = LLM(
        tiny_llama,
        device="cpu",
        dtype="float32",
        num_kvcache_blocks=14,
        kvcache_block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=4,
    )
    other = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asking = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    outs = llm.generate([[7, 8], PROMPT[:25]], [other, asking], use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    assert outs[1].prompt_logprobs is not None and outs[1].logprobs is not None
    assert_logprobs(model, PROMPT[:25], 1, outs[1].prompt_logprobs[1:], 2)
    assert_logprobs(model, PROMPT[:25] + outs[1].token_ids, 25, outs[1].logprobs, 1)
    llm.exit()


# -- what reaches the reader ------------------------------------------------------------------------------


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0)


def test_deltas_carry_them_with_the_text_and_never_what_a_stop_string_takes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Any = replying_engine(monkeypatch, "").tokenizer
    state = StreamState(1, [10], SamplingParams(stop="END", logprobs=0), tokenizer)
    deltas = [state.feed(StepOutput(1, [token], logprobs=[entry(token)])) for token in b"abEND"]
    assert [[e.token_id for e in d.logprobs or ()] for d in deltas] == [[97], [98], [], [], []]
    assert deltas[-1].finish_reason == "stop" and [e.token_id for e in state.output().logprobs or ()] == [97, 98]
    state = StreamState(1, [10], SamplingParams(stop="END", logprobs=0), tokenizer)
    merged = None
    for token, reason in ((*b"a",), None), ((*b"E",), None), ((*b"N",), "length"):
        merged = merge(merged, state.feed(StepOutput(1, list(token), reason, logprobs=[entry(t) for t in token])))
    assert merged is not None and [e.token_id for e in merged.logprobs or ()] == [*b"aEN"]


def test_the_end_of_sequence_id_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = replying_engine(monkeypatch, "").tokenizer
    state = StreamState(1, [10], SamplingParams(logprobs=0), tokenizer)
    state.feed(StepOutput(1, [256], "stop", logprobs=[entry(256)]))
    assert state.output().logprobs == []


def test_no_stop_string_is_looked_for_in_the_first_min_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = replying_engine(monkeypatch, "").tokenizer
    for min_tokens, text in ((0, "a"), (3, "axb"), (4, "axbxc"), (9, "axbxcxd"), (2, "axb")):
        detokenizer = Detokenizer(tokenizer, [10], ("x",), min_tokens)
        shown = "".join(detokenizer.push([token]) for token in b"axbxcxd") + detokenizer.finish()
        assert shown == text
        assert detokenizer.kept_tokens == len(text)
    # Split over the border it is not one either; grouped in one push it is the same.
    detokenizer = Detokenizer(tokenizer, [10], ("bc",), 2)
    assert detokenizer.push([*b"abcabc"]) == "abca"


@pytest.mark.parametrize(("count", "vocab_size"), [(1, 50), (5, 32_000), (20, 32_000), (20, 20)])
def test_equal_ones_are_listed_by_token_id_as_they_are_drawn(count: int, vocab_size: int) -> None:
    logits = torch.randint(0, 4, (64, vocab_size)).float()
    logits[0] = torch.nan
    logits[1] = -torch.inf
    scores = logprobs._score(logits, logits.argmax(dim=1), [count] * 64)
    for row, ids in zip(logits[2:].tolist(), scores.ids[2:].tolist(), strict=True):
        assert ids == sorted(range(vocab_size), key=lambda token: (-row[token], token))[:count]
