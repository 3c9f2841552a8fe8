"""Two ranks with gloo on the CPU, in float32: the tokens of transformers, and those of one rank, whatever happens.

Starting a pair of ranks takes seconds, so one engine for each model serves all tests of this file.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from processes import descendants, gone, left_in_shared_memory, shared_memory
from reference import assert_beams, assert_greedy, assert_logprobs, reference_beams

NEW = 24
# Small steps and a pool of half of what the prompts want at a time: chunks, cached prefixes and preemptions.
TIGHT = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 60,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 16,
}


def greedy_params(count: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


_SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "seed": 2**63 - 1},
    {"temperature": 0.8, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": -0.3, "seed": 0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]
SAMPLED = [SamplingParams(max_tokens=NEW, ignore_eos=True, **more) for more in _SAMPLED]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.token_ids for o in outputs]


def continuations(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str | None]]]:
    return [[(one.token_ids, one.finish_reason) for one in o.outputs] for o in outputs]


def random_prompts(seed: int = 4) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randint(1, 50))] for _ in range(8)]


@dataclass
class Pair:
    """The same model on two ranks and on one, and in transformers."""

    two: LLM
    one: LLM
    reference: Any


@pytest.fixture(scope="module")
def pairs(make_tiny_model: Callable[..., Path]) -> Iterator[dict[str, Pair]]:
    """A llama with its own head and every bias there is, and a qwen3 whose head is its embedding."""
    from transformers import AutoModelForCausalLM

    folders = {
        "llama": make_tiny_model("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        "qwen3": make_tiny_model("qwen3", seed=1),
    }
    opened = {
        kind: Pair(
            LLM(folder, tensor_parallel_size=2, **TIGHT),
            LLM(folder, **TIGHT),
            AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(),
        )
        for kind, folder in folders.items()
    }
    yield opened
    ranks = [p.pid for pair in opened.values() for p in pair.two.engine.ranks._group.processes]  # type: ignore[union-attr]
    for pair in opened.values():
        pair.two.exit()
    assert gone(ranks, seconds=0), "ranks are left after exit()"


@pytest.fixture(params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    pair = pairs[request.param]
    pair.two.engine.blocks.clear_cache()
    return pair


def test_two_ranks_give_the_greedy_tokens_of_transformers_in_chunks_cached_and_preempted(pair: Pair) -> None:
    prompts = random_prompts()
    before = pair.two.stats()
    replies = ids(pair.two.generate(prompts, greedy_params(), use_tqdm=False))
    assert [len(reply) for reply in replies] == [NEW] * 8
    assert_greedy(pair.reference, prompts, replies)
    again = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    outputs = pair.two.generate(again[-3:], greedy_params(8), use_tqdm=False)
    assert_greedy(pair.reference, again[-3:], ids(outputs))
    after = pair.two.stats()
    assert after["preemptions"] > before["preemptions"]
    assert after["cached_tokens"] > before["cached_tokens"]
    pair.two.engine.check_integrity()


def test_two_ranks_sample_and_penalise_as_one_does(pair: Pair) -> None:
    prompts = random_prompts(5)
    expected = ids(pair.one.generate(prompts, SAMPLED * 2, use_tqdm=False))
    assert ids(pair.two.generate(prompts, SAMPLED * 2, use_tqdm=False)) == expected


def test_two_ranks_draw_the_continuations_that_one_does_each_with_its_own_seed(pair: Pair) -> None:
    """More of them than run at once, in a pool that preempts them. The greedy ones are transformers'."""
    prompts = random_prompts(8)
    biased: dict[str, Any] = {"n": 3, "logit_bias": {7: 6.0, 300: -100.0}, "stop_token_ids": [7], "min_tokens": 5}
    params = [
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5, n=3),
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=6, **biased),
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=7, n=4, repetition_penalty=1.3),
        SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0, n=3),
    ]
    before = pair.two.stats()["preemptions"]
    outputs = pair.two.generate(prompts, params * 2, use_tqdm=False)
    assert pair.two.stats()["preemptions"] > before
    assert continuations(outputs) == continuations(pair.one.generate(prompts, params * 2, use_tqdm=False))
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 3
    assert any(one.finish_reason == "stop" for out in outputs[1::4] for one in out.outputs)
    assert all(len(one.token_ids) >= 5 for out in outputs[1::4] for one in out.outputs)
    for prompt, out in zip(prompts[3::4], outputs[3::4], strict=True):
        assert_greedy(pair.reference, [prompt] * 3, [one.token_ids for one in out.outputs])
    pair.two.engine.check_integrity()


def test_two_ranks_find_the_beams_of_transformers_beside_others_and_preempted(pair: Pair) -> None:
    prompts = random_prompts(9)
    beams = BeamSearchParams(5, 12)
    params = [beams, greedy_params(36)] * 4
    before = pair.two.stats()["preemptions"]
    outputs = pair.two.generate(prompts, params, use_tqdm=False)
    assert pair.two.stats()["preemptions"] > before
    eos = list(pair.two.engine.model_config.eos_token_ids)
    for prompt, out in zip(prompts[::2], outputs[::2], strict=True):
        assert_beams(out, reference_beams(pair.reference, [prompt], beams, eos)[0])
    assert_greedy(pair.reference, prompts[1::2], ids(outputs[1::2]))
    pair.two.engine.check_integrity()


def test_two_ranks_give_the_logprobs_of_transformers_for_output_and_prompt(pair: Pair) -> None:
    """Of prompts in chunks, of cached ones, after preemptions, and of each continuation."""
    prompts = random_prompts(10)
    count = 4
    common: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True, "seed": 3, "logprobs": count}
    params = [
        SamplingParams(prompt_logprobs=count, **common),
        SamplingParams(n=3, **common),
        SamplingParams(n=2, prompt_logprobs=count, temperature=0, **common),
    ]
    before = pair.two.stats()["preemptions"]
    for asked in (prompts[:6], prompts[2:6]):
        chosen = (params * 2)[: len(asked)]
        outputs = pair.two.generate(asked, chosen, use_tqdm=False)
        for prompt, settings, out in zip(asked, chosen, outputs, strict=True):
            for one in out.outputs:
                assert one.logprobs is not None
                assert_logprobs(pair.reference, prompt + one.token_ids, len(prompt), one.logprobs, count)
            if settings.prompt_logprobs is None:
                assert out.prompt_logprobs is None
            else:
                assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
                assert_logprobs(pair.reference, prompt, 1, out.prompt_logprobs[1:], count)
    assert pair.two.stats()["preemptions"] > before
    pair.two.engine.check_integrity()


def test_two_engines_work_at_the_same_time(pairs: dict[str, Pair]) -> None:
    """Four ranks on one machine, whose steps are interleaved."""
    prompts = random_prompts(6)[:3]
    llms = [pair.two for pair in pairs.values()]
    for prompt in prompts:
        for llm in llms:
            llm.add_request(prompt, greedy_params(6))
    got: list[dict[int, list[int]]] = [{}, {}]
    while not all(llm.is_finished() for llm in llms):
        for llm, replies in zip(llms, got, strict=True):
            replies |= {o.request_id: o.token_ids for o in llm.step() if o.finish_reason}
    for pair, replies in zip(pairs.values(), got, strict=True):
        assert_greedy(pair.reference, prompts, [replies[request_id] for request_id in sorted(replies)])


@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 8.0)])
def test_a_rank_lost_in_mid_generation_is_noticed_and_no_token_changes(
    pairs: dict[str, Pair], how: signal.Signals, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and stopped, which is a hang. The other rank is then in the midst of a sum that never ends."""
    pair = pairs["llama"]
    llm, ranks = pair.two, pair.two.engine.ranks
    assert ranks is not None
    monkeypatch.setattr(ranks, "patience", 2.5)  # and no false alarm on a busy machine
    prompts = random_prompts(7)
    params = [*SAMPLED, SamplingParams(max_tokens=NEW, ignore_eos=True, n=3, seed=9), BeamSearchParams(3, NEW)]
    params += [SamplingParams(max_tokens=NEW, n=2, seed=8, logprobs=1, prompt_logprobs=1), *SAMPLED[:1]]
    order = [llm.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    outputs = {o.request_id: o for _ in range(8) for o in llm.step()}
    assert any(o.token_ids for o in outputs.values())
    noticed: list[float] = []
    rebuild = ranks.rebuild
    monkeypatch.setattr(ranks, "rebuild", lambda *args: (noticed.append(time.monotonic()), rebuild(*args)))
    began, old = time.monotonic(), [process.pid for process in ranks._group.processes]
    os.kill(old[1], how)
    while not llm.is_finished():
        outputs |= {o.request_id: o for o in llm.step()}
    assert noticed[0] - began < within
    assert gone(old, seconds=0)
    assert len(noticed) == 1
    expected = pair.one.generate(prompts, params, use_tqdm=False)
    assert continuations([outputs[request_id] for request_id in order]) == continuations(expected)
    for prompt, settings, request_id in zip(prompts, params, order, strict=True):
        out = outputs[request_id]
        if isinstance(settings, SamplingParams) and settings.prompt_logprobs is not None:
            assert out.prompt_logprobs is not None
            assert_logprobs(pair.reference, prompt, 1, out.prompt_logprobs[1:], 1)
    llm.engine.check_integrity()


def test_an_exception_in_a_step_is_told_with_the_ranks_traceback_and_the_ranks_live_on(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fault on every rank (a token that the vocabulary lacks), met before any of them has sent a thing."""
    llm = pairs["qwen3"].two
    ranks = llm.engine.ranks
    assert ranks is not None
    pids = [process.pid for process in ranks._group.processes]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "validate", lambda *args: None)
        request_id = llm.add_request([600], greedy_params(2))
    plan = llm.engine.scheduler.plan()
    with pytest.raises(IndexError) as caught:
        ranks.collect(ranks.launch(plan))
    llm.engine.scheduler.revert(plan.items)
    assert "in a rank's process" in caught.value.__notes__[0] and "embed" in caught.value.__notes__[0]
    llm.abort(request_id)
    while not llm.is_finished():
        llm.step()
    assert llm.generate_single([5, 6], greedy_params(4)).finish_reason == "length"
    assert [process.pid for process in ranks._group.processes] == pids


def test_nothing_is_left_when_the_parent_is_killed_in_mid_step(tiny_qwen3: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from engine import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM({str(tiny_qwen3)!r}, tensor_parallel_size=2, device='cpu', num_kvcache_blocks=99)\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=99, ignore_eos=True), use_tqdm=False)\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = shared_memory()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "ready\n"
            time.sleep(0.2)
            started = descendants(parent.pid)
            assert len(started) >= 2
        finally:
            parent.kill()
        assert gone(started, seconds=2)
    assert not list(temporary.iterdir())
    assert not left_in_shared_memory(shared)
