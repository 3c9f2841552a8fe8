"""Greedy and seeded tokens of the whole engine in float32 on a CPU: those of transformers, and the same ones however
a request is served: alone or among others, cached or not, in chunks or whole, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from reference import assert_beams, assert_greedy, reference_beams

TEXTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n",
    "Translate to German: good morning, my friend.",
    "12 + 30 =",
    "List three fruits and their colours.",
    "Explain how a bicycle stays upright, in two sentences.",
    "Once upon a time there was a fox who",
]
BLOCK = 16


@dataclass
class Subject:
    """One model: `open(**settings)` gives an LLM over it, whose weights are loaded once. `replies` are 64 greedy
    tokens to each of the 8 prompts, computed in one batch, whole and without the cache; `short` is how many of
    them the other tests repeat."""

    open: Callable[..., LLM]
    reference: Any
    prompts: list[list[int]]
    replies: list[list[int]]
    short: int


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.token_ids for o in outputs]


def joined(prompts: list[list[int]]) -> list[int]:
    return [token for prompt in prompts for token in prompt]


def random_prompts(count: int, low: int, high: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(512) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.fixture(scope="module")
def open_llm() -> Iterator[Callable[..., LLM]]:
    """open_llm(path, **settings): an LLM in float32 on the CPU. The weights of a path are loaded once; an LLM
    opened earlier over the same path cannot be used any more, for the pages bound to the model are the new ones."""
    from engine import model_runner

    loaded: dict[Path, Any] = {}
    load_model = model_runner.load_model

    def load_once(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path not in loaded:
            loaded[path] = load_model(path, *args, **kwargs)
        return loaded[path]

    def open_(path: Path, **settings: Any) -> LLM:
        chosen = {"num_kvcache_blocks": 256, "kvcache_block_size": BLOCK, "max_num_batched_tokens": 1024, **settings}
        return LLM(path, device="cpu", dtype="float32", **chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "load_model", load_once)
        patch.setattr(model_runner.ModelRunner, "warm_up", lambda self, progress: None)
        yield open_


@pytest.fixture(scope="module", params=["the default model", "a tiny llama", "a tiny qwen3"])
def subject(request: pytest.FixtureRequest, open_llm: Callable[..., LLM]) -> Subject:
    from transformers import AutoModelForCausalLM

    if request.param == "the default model":
        path, short = request.getfixturevalue("default_model_path"), 8
        reference = request.getfixturevalue("default_model_reference")
    else:
        path, short = request.getfixturevalue(request.param.removeprefix("a ").replace(" ", "_")), 64
        reference = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    llm = open_llm(path, enable_prefix_caching=False)
    if llm.tokenizer is not None:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in TEXTS]
    else:
        prompts = random_prompts(8, 1, 60)
    replies = ids(llm.generate(prompts, greedy(64), use_tqdm=False))
    return Subject(lambda **settings: open_llm(path, **settings), reference, prompts, replies, short)


def preempting(subject: Subject, new_tokens: int) -> LLM:
    """An LLM whose pool holds half of what the subject's prompts and their replies take, in small blocks, so that
    every sequence soon needs more."""
    blocks = [-(-(len(p) + new_tokens) // 2) for p in subject.prompts]
    pool = max(sum(blocks) // 2, max(blocks))
    return subject.open(num_kvcache_blocks=pool, kvcache_block_size=2, max_num_batched_tokens=64)


# For what the default model shows once more, slowly.
mostly_tiny = pytest.mark.parametrize(
    "subject",
    [pytest.param("the default model", marks=pytest.mark.long), "a tiny llama", "a tiny qwen3"],
    indirect=True,
)


def test_eight_prompts_get_the_64_greedy_tokens_of_transformers(subject: Subject) -> None:
    assert [len(reply) for reply in subject.replies] == [64] * 8
    assert_greedy(subject.reference, subject.prompts, subject.replies)


def test_alone_a_prompt_gets_the_tokens_that_it_gets_in_a_batch(subject: Subject) -> None:
    llm = subject.open(enable_prefix_caching=False)
    for i in (0, 5):
        assert (
            llm.generate_single(subject.prompts[i], greedy(subject.short)).token_ids
            == subject.replies[i][: subject.short]
        )


def test_prompts_read_in_chunks_get_the_same_tokens(subject: Subject) -> None:
    llm = subject.open(max_num_seqs=8, max_num_batched_tokens=13, enable_prefix_caching=False)
    outputs = llm.generate(subject.prompts, greedy(subject.short), use_tqdm=False)
    assert ids(outputs) == [reply[: subject.short] for reply in subject.replies]


def test_what_comes_out_of_the_cache_changes_no_token(subject: Subject) -> None:
    """Each prompt with half of its reply, twice, and then with all of it."""
    llm = subject.open()
    wanted = [reply[32:40] for reply in subject.replies]
    prompts = [p + r[:32] for p, r in zip(subject.prompts, subject.replies, strict=True)]
    assert ids(llm.generate(prompts, greedy(8), use_tqdm=False)) == wanted
    again = llm.generate(prompts, greedy(8), use_tqdm=False)
    assert ids(again) == wanted
    assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
    longer = [p + r[:40] for p, r in zip(subject.prompts, subject.replies, strict=True)]
    outputs = llm.generate(longer, greedy(8), use_tqdm=False)
    assert ids(outputs) == [reply[40:48] for reply in subject.replies]
    # The last of the eight tokens was sampled and never computed.
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // BLOCK * BLOCK for p in longer]


def test_a_prompt_that_is_cached_whole_gets_the_same_tokens(subject: Subject) -> None:
    llm = subject.open()
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        llm.engine.blocks.clear_cache()
        prompt = joined(subject.prompts)[:length]
        first, second = (llm.generate_single(prompt, greedy(3)) for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // BLOCK * BLOCK)
        assert_greedy(subject.reference, [prompt], [first.token_ids])
        assert second.token_ids == first.token_ids


def test_preempted_requests_get_the_same_tokens(subject: Subject) -> None:
    llm = preempting(subject, subject.short)
    outputs = llm.generate(subject.prompts, greedy(subject.short), use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    assert ids(outputs) == [reply[: subject.short] for reply in subject.replies]


@mostly_tiny
def test_requests_that_arrive_one_by_one_between_long_ones_get_the_same_tokens(subject: Subject) -> None:
    """Ten requests, one more every step; each step mixes decodes with chunks of several prompts."""
    llm = subject.open(max_num_batched_tokens=64)
    long = [joined(subject.prompts[:4]), joined(subject.prompts[4:])]
    prompts = [long[0], *subject.prompts[:4], long[1], *subject.prompts[4:]]
    order, outputs = [], {}
    while len(outputs) < len(prompts):
        if len(order) < len(prompts):
            order.append(llm.add_request(prompts[len(order)], greedy(12)))
        outputs |= {o.request_id: o for o in llm.step() if o.finish_reason}
    got = [outputs[request_id].token_ids for request_id in order]
    assert got[1:5] + got[6:] == [reply[:12] for reply in subject.replies]
    assert_greedy(subject.reference, long, [got[0], got[5]])


@mostly_tiny
def test_thirty_two_short_prompts_at_once_get_the_tokens_of_transformers(subject: Subject) -> None:
    llm = subject.open()
    prompts = [subject.prompts[i % 8][-(2 + i // 2) :] for i in range(32)]
    outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
    assert_greedy(subject.reference, prompts, ids(outputs))


SAMPLED = [
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "seed": 2**63 - 1},
    {"temperature": 0.8, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": -0.3, "seed": 0},
    {"temperature": 0.8, "seed": 1},
]


@mostly_tiny
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_in_chunks_and_preempted(subject: Subject) -> None:
    count = min(12, subject.short)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **s) for s in SAMPLED]
    prompts, others = subject.prompts[:4], subject.prompts[4:]
    llm = subject.open(enable_prefix_caching=False)
    alone = [llm.generate_single(p, s).token_ids for p, s in zip(prompts, params, strict=True)]
    greedy_ones = [reply[:count] for reply in subject.replies[:4]]
    assert alone != greedy_ones, "nothing was sampled"
    # The latest to arrive are preempted first, so those with a seed come last.
    batch = [SamplingParams(temperature=1.5, max_tokens=count, ignore_eos=True)] * 4 + params
    for open_ in (
        lambda: subject.open(),
        lambda: subject.open(max_num_seqs=8, max_num_batched_tokens=17),
        lambda: preempting(subject, count),
    ):
        llm = open_()
        outputs = llm.generate(others + prompts, batch, use_tqdm=False)
        assert ids(outputs[4:]) == alone
    assert sum(o.metrics.num_preemptions for o in outputs[4:]) > 0


# -- with the default model's own tokenizer ---------------------------------------------------------------


with_tokenizer = pytest.mark.parametrize("subject", ["the default model"], indirect=True)


@with_tokenizer
def test_a_chat_gets_what_its_rendered_prompt_gets(subject: Subject) -> None:
    llm = subject.open()
    out = llm.chat([{"role": "user", "content": TEXTS[0]}], greedy(12))
    assert out.token_ids == subject.replies[0][:12]
    assert out.text == llm.tokenizer.decode(subject.replies[0][:12])


@with_tokenizer
def test_eight_prompts_get_the_beams_of_transformers(subject: Subject) -> None:
    llm = subject.open()
    prompts = [prompt[-16:] for prompt in subject.prompts]
    widths = [BeamSearchParams(beam_width=3, max_tokens=8), BeamSearchParams(beam_width=4, max_tokens=8)]
    outs = llm.generate(prompts, [widths[0]] * 4 + [widths[1]] * 4, use_tqdm=False)
    llm.engine.check_integrity()
    eos = list(llm.engine.model_config.eos_token_ids)
    expected = reference_beams(subject.reference, prompts[:4], widths[0], eos)
    expected += reference_beams(subject.reference, prompts[4:], widths[1], eos)
    for out, beams in zip(outs, expected, strict=True):
        assert_beams(out, beams)
        assert out.text == llm.tokenizer.decode(out.token_ids)


@with_tokenizer
def test_a_reply_that_would_tokenize_another_way_is_still_hit_by_the_next_turn(subject: Subject) -> None:
    llm = subject.open()
    said = (llm.tokenizer.encode("Han") + llm.tokenizer.encode("zi")) * BLOCK
    text = llm.tokenizer.decode(said)
    assert llm.tokenizer.encode(text) != said
    question = {"role": "user", "content": TEXTS[0]}
    first = llm.tokenizer.encode_chat([question]) + said
    llm.generate_single(first, greedy(1))
    turn = [question, {"role": "assistant", "content": text, "token_ids": said}, {"role": "user", "content": "And?"}]
    assert llm.chat(turn, greedy(1)).num_cached_tokens == len(first) // BLOCK * BLOCK
