"""logit_bias and min_tokens: added to the logits before everything else, in every mix of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.sampler import BAD_TOKEN, Sampler, SamplingRow
from history_model import history_engine

VOCAB = 50


def row(request_id: int, banned: tuple[int, ...] = (), position: int = 5, **params: Any) -> SamplingRow:
    return SamplingRow(request_id, SamplingParams(**params), 3, position, [1, 2], [4] * (position - 2), banned)


def test_a_biased_row_gets_the_token_of_logits_biased_beforehand_and_its_neighbours_theirs() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 1.2, "min_p": 0.1},
    ]
    bias = [{3: 7.0}, {4: 2.5, 9: -100.0}, {4: 3.0}, None]
    dense = logits.clone()
    for i, one in enumerate(bias):
        for token, value in (one or {}).items():
            dense[i, token] += value
    plain = Sampler(VOCAB)
    expected = plain(dense, plain.prepare([row(i, **s) for i, s in enumerate(settings)]))
    sampler, before = Sampler(VOCAB), logits.clone()
    rows = [row(i, **s, logit_bias=b) for i, (s, b) in enumerate(zip(settings, bias, strict=True))]
    assert sampler(logits, sampler.prepare(rows)).tolist() == expected.tolist()
    assert torch.equal(logits, before), "the caller's logits are left alone"


def test_a_ban_holds_until_it_is_lifted_and_only_in_its_row() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 8] = 9.0, 5.0
    sampler = Sampler(VOCAB)
    for banned, expected in (((7,), [8, 7]), ((7,), [8, 7]), ((), [7, 7]), ((), [7, 7])):
        rows = [row(0, banned, temperature=0), row(1, temperature=0)]
        assert sampler(logits, sampler.prepare(rows)).tolist() == expected


def test_a_banned_id_stays_banned_whatever_its_bias() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = Sampler(VOCAB)
    rows = [row(0, (7,), temperature=1.0, logit_bias={7: 100.0, 8: 50.0})]
    assert sampler(logits, sampler.prepare(rows)).tolist() == [8]


def test_broken_logits_stay_broken_under_a_bias() -> None:
    logits = torch.full((1, VOCAB), float("nan"))
    sampler = Sampler(VOCAB)
    assert sampler(logits, sampler.prepare([row(0, (1,), logit_bias={2: 5.0})])).tolist() == [BAD_TOKEN]


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    sampler = Sampler(VOCAB)
    logits = torch.zeros(1, VOCAB)
    assert sampler(logits, sampler.prepare([row(0, (1,), temperature=0, logit_bias={2: 5.0})])).tolist() == [2]
    sampler.forget(0)
    assert sampler(logits, sampler.prepare([row(0, temperature=0, logit_bias={3: 5.0})])).tolist() == [3]
    assert sampler.prepare([row(1)]).biased is None


def test_min_tokens_gives_what_transformers_min_new_tokens_gives(tiny_llama: Path) -> None:
    """Greedy, with end ids that the model would choose at once or soon; by eos and by stop_token_ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float32").eval()
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=64)
    prompt = [(i * 37) % 500 + 3 for i in range(9)]
    plain = llm.generate_single(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).token_ids
    ends = [plain[0], plain[3]]
    wanted = [0, 1, 3, 6]
    params = [SamplingParams(temperature=0, max_tokens=12, min_tokens=m, stop_token_ids=ends) for m in wanted]
    outs = llm.generate([prompt] * 4, params, use_tqdm=False)
    for minimum, out in zip(wanted, outs, strict=True):
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=minimum,
            eos_token_id=[2, *ends],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        end = next((i for i, token in enumerate(found) if token in (2, *ends)), len(found))
        assert out.token_ids == found[:end] and len(out.token_ids) >= minimum
    assert len({len(out.token_ids) for out in outs}) > 1
    llm.exit()


def test_a_bias_of_100_forces_and_of_minus_100_forbids(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, device="cpu", dtype="float32", num_kvcache_blocks=64)
    greedy = llm.generate_single([5, 6, 7], SamplingParams(temperature=0, max_tokens=1)).token_ids
    forced = SamplingParams(temperature=1.0, max_tokens=5, logit_bias={77: 100.0}, ignore_eos=True)
    forbidden = SamplingParams(temperature=0, max_tokens=5, logit_bias={greedy[0]: -100}, ignore_eos=True)
    one, other = llm.generate([[5, 6, 7]] * 2, [forced, forbidden], use_tqdm=False)
    assert one.token_ids == [77] * 5
    assert greedy[0] not in other.token_ids
    llm.exit()


def test_a_biased_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias holds 97; ids of this model go from 0 to 96"):
        history_engine(8, 4).add_request([1], SamplingParams(logit_bias={97: 1.0}))
