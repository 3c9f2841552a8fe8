"""Two ranks with NCCL on two cards, their steps as graphs: the same tokens as one card and as transformers on the CPU,
in float32."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sum_ranks
from engine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from processes import gone, left_in_shared_memory, shared_memory
from reference import assert_beams, assert_greedy, assert_logprobs, reference_beams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
]

NEW = 48
TIGHT = {
    "device": "cuda", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 96,
}  # fmt: skip
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
    shared = shared_memory()
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
    assert not left_in_shared_memory(shared)


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


def continuations(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str | None]]]:
    return [[(one.token_ids, one.finish_reason) for one in out.outputs] for out in outputs]


def test_two_cards_draw_the_continuations_that_one_does(pair: Pair) -> None:
    params = [
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5, n=3),
        SamplingParams(max_tokens=NEW, temperature=0.8, seed=6, n=2, stop_token_ids=[7], min_tokens=5),
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=7, n=4, repetition_penalty=1.3),
        GREEDY,
    ]
    expected = continuations(pair.one.generate(prompts(8), params * 2, use_tqdm=False))
    assert continuations(pair.two.generate(prompts(8), params * 2, use_tqdm=False)) == expected
    assert len({tuple(ids) for ids, _ in expected[0]}) == 3
    pair.two.engine.check_integrity()


def test_two_cards_find_the_beams_of_transformers_beside_others(pair: Pair) -> None:
    beams = BeamSearchParams(4, 12)
    outputs = pair.two.generate(prompts(9), [beams, GREEDY] * 4, use_tqdm=False)
    eos = list(pair.two.engine.model_config.eos_token_ids)
    for prompt, out in zip(prompts(9)[::2], outputs[::2], strict=True):
        assert_beams(out, reference_beams(pair.reference, [prompt], beams, eos)[0])
    assert_greedy(pair.reference, prompts(9)[1::2], ids(outputs[1::2]))
    pair.two.engine.check_integrity()


def test_two_cards_give_the_logprobs_of_transformers_for_output_and_prompt(pair: Pair) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, logprobs=3, prompt_logprobs=3, n=2)
    for prompt, out in zip(prompts(10), pair.two.generate(prompts(10), params, use_tqdm=False), strict=True):
        for one in out.outputs:
            assert one.logprobs is not None
            assert_logprobs(pair.reference, prompt + one.token_ids, len(prompt), one.logprobs, 3)
        assert out.prompt_logprobs is not None
        assert_logprobs(pair.reference, prompt, 1, out.prompt_logprobs[1:], 3)


def test_steps_of_two_cards_are_graphs_launched_one_behind_the_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair.two.engine.ranks
    assert ranks is not None and len(ranks._shapes) >= 20
    sent: list[bool] = []
    send = ranks._group.send
    monkeypatch.setattr(ranks._group, "send", lambda message: (sent.append(message[2]), send(message)))
    assert ids(pair.two.generate(prompts()[:2], GREEDY, use_tqdm=False)) == ids(
        pair.one.generate(prompts()[:2], GREEDY, use_tqdm=False)
    )
    assert sent.count(True) > 0.8 * len(sent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_in_one_shot_are_right_in_every_bit_however_often_a_graph_is_replayed(tmp_path: Path, dtype: str) -> None:
    assert sum_ranks.run(2, tmp_path, dtype) == [0, 0]


def test_two_cards_in_half_precision_add_up_in_one_shot_and_stay_near_one_card(
    make_tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """By the log-probabilities of one card's own tokens; a sum of two halves is rounded once more."""
    folder = make_tiny_model("qwen3", seed=2, head_dim=64, hidden_size=256, initializer_range=0.05)
    settings = {"device": "cuda", "dtype": "bfloat16", "num_kvcache_blocks": 200}
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        two = LLM(folder, tensor_parallel_size=2, **settings)
    assert "sums over ranks: one shot, with the norm behind them" in caplog.text
    assert re.search(r"graphs: \d\d+ shapes", caplog.text)
    one = LLM(folder, **settings)
    told = ids(one.generate(prompts(11), GREEDY, use_tqdm=False))
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole = [prompt + reply for prompt, reply in zip(prompts(11), told, strict=True)]
    found, expected = (
        [
            entry.logprob
            for out in llm.generate(whole, scored, use_tqdm=False)
            for entry in out.prompt_logprobs or ()
            if entry is not None
        ]
        for llm in (two, one)
    )
    assert len(found) == sum(len(one) - 1 for one in whole)
    assert found == pytest.approx(expected, abs=0.15)
    two.exit()
    one.exit()


def test_ranks_with_unequal_free_memory_agree_on_what_both_can_hold(
    make_tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A third of the second card is taken by others; a pool that fills what is left of it fits the first one, too."""
    folder = make_tiny_model("llama", max_position_embeddings=131072, num_hidden_layers=8, head_dim=128)
    total = torch.cuda.get_device_properties(1).total_memory
    taken = torch.empty(total // 3, dtype=torch.uint8, device="cuda:1")
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        llm = LLM(
            folder, device="cuda", dtype="float32", tensor_parallel_size=2, gpu_memory_utilization=0.5, max_num_seqs=64
        )
    counts = re.search(r"KV blocks that the ranks can hold: ([\d,]+), ([\d,]+);", caplog.text)
    assert counts is not None, "the same number on both"
    first, second = (int(count.replace(",", "")) for count in counts.groups())
    assert llm.engine.blocks.num_blocks == second < first
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_greedy(reference, prompts()[:3], ids(llm.generate(prompts()[:3], GREEDY, use_tqdm=False)))
    llm.exit()
    del taken


def test_each_rank_has_a_card_of_its_own(pair: Pair) -> None:
    assert pair.two.engine.ranks is not None
    assert pair.two.engine.device.device.type == "cuda"
    assert "cuda:0 to cuda:1" in pair.two.engine.device.reasons[0]


@pytest.mark.parametrize(
    ("how", "within", "which"), [(signal.SIGKILL, 2.0, 1), (signal.SIGKILL, 2.0, 0), (signal.SIGSTOP, 15.0, 1)]
)
def test_a_lost_card_process_is_replaced_and_no_token_changes(
    pair: Pair, how: signal.Signals, within: float, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank's graph is then in the midst of a sum that never ends. The new ranks have graphs again."""
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
    shapes = ranks._shapes
    os.kill(old[which], how)
    while not pair.two.is_finished():
        outputs |= {o.request_id: o for o in pair.two.step()}
    assert ranks._shapes == shapes
    assert noticed[0] - began < within and len(noticed) == 1
    assert gone(old, seconds=0)
    assert [outputs[request_id].token_ids for request_id in order] == expected


def test_more_ranks_than_cards_are_refused_with_both_numbers(tiny_llama: Path) -> None:
    count = torch.cuda.device_count()
    if count >= 4:
        pytest.skip("this machine has cards enough")
    with pytest.raises(ValueError, match=f"needs 4 CUDA cards, this machine has {count}"):
        LLM(tiny_llama, device="cuda", tensor_parallel_size=4)
