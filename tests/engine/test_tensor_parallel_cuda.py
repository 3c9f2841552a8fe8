"""Two ranks with NCCL on two cards: the same tokens as one card and as transformers on the CPU, in float32."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from processes import gone
from reference import assert_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
]

NEW = 48
TIGHT = {"device": "cuda", "dtype": "float32", "num_kvcache_blocks": 24, "max_num_batched_tokens": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=NEW, ignore_eos=True),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, seed=4, max_tokens=NEW),
]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.token_ids for o in outputs]


def prompts(seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randrange(3, 90))] for _ in range(8)]


@dataclass
class Pair:
    two: LLM
    one: LLM
    reference: Any


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Iterator[Pair]:
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    shared = set(os.listdir("/dev/shm"))
    if request.param == "llama":
        folder = make_tiny_model("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    else:
        folder = make_tiny_model("qwen3", seed=1)
    two = LLM(folder, tensor_parallel_size=2, **TIGHT)
    one = LLM(folder, **{**TIGHT, "num_kvcache_blocks": 400})
    yield Pair(two, one, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert two.engine.ranks is not None
    pids = [process.pid for process in two.engine.ranks._group.processes]
    two.exit()
    one.exit()
    assert gone(pids, seconds=0)
    assert set(os.listdir("/dev/shm")) <= shared


def test_two_cards_give_the_greedy_tokens_of_transformers(pair: Pair) -> None:
    before = pair.two.stats()
    replies = ids(pair.two.generate(prompts(), GREEDY, use_tqdm=False))
    assert_greedy(pair.reference, prompts(), replies)
    again = [prompt + reply for prompt, reply in zip(prompts(), replies, strict=True)][-2:]
    assert_greedy(pair.reference, again, ids(pair.two.generate(again, GREEDY, use_tqdm=False)))
    after = pair.two.stats()
    assert after["preemptions"] > before["preemptions"]
    assert after["cached_tokens"] > before["cached_tokens"]
    pair.two.engine.check_integrity()


def test_two_cards_sample_as_one_does(pair: Pair) -> None:
    expected = ids(pair.one.generate(prompts(6), SAMPLED * 4, use_tqdm=False))
    assert ids(pair.two.generate(prompts(6), SAMPLED * 4, use_tqdm=False)) == expected


def test_each_rank_has_a_card_of_its_own(pair: Pair) -> None:
    assert pair.two.engine.ranks is not None
    assert pair.two.engine.device.device.type == "cuda"
    assert "cuda:0 to cuda:1" in pair.two.engine.device.reasons[0]


@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 15.0)])
def test_a_lost_card_process_is_replaced_and_no_token_changes(
    pair: Pair, how: signal.Signals, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair.two.engine.ranks
    assert ranks is not None
    expected = ids(pair.one.generate(prompts(7), SAMPLED * 4, use_tqdm=False))
    # Shorter than usual, but enough for what new processes load when they first meet an operation.
    monkeypatch.setattr(ranks, "patience", 6.0)
    order = [pair.two.add_request(p, s) for p, s in zip(prompts(7), SAMPLED * 4, strict=True)]
    outputs = {o.request_id: o for _ in range(8) for o in pair.two.step()}
    noticed: list[float] = []
    rebuild = ranks.rebuild
    monkeypatch.setattr(ranks, "rebuild", lambda *args: (noticed.append(time.monotonic()), rebuild(*args)))
    began, old = time.monotonic(), [process.pid for process in ranks._group.processes]
    os.kill(old[1], how)
    while not pair.two.is_finished():
        outputs |= {o.request_id: o for o in pair.two.step()}
    assert noticed[0] - began < within and len(noticed) == 1
    assert gone(old, seconds=0)
    assert [outputs[request_id].token_ids for request_id in order] == expected


def test_more_ranks_than_cards_are_refused_with_both_numbers(tiny_llama: Path) -> None:
    count = torch.cuda.device_count()
    if count >= 4:
        pytest.skip("this machine has cards enough")
    with pytest.raises(ValueError, match=f"needs 4 CUDA cards, this machine has {count}"):
        LLM(tiny_llama, device="cuda", tensor_parallel_size=4)
