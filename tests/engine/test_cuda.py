"""The engine on a CUDA card, with every attention backend that serves there."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mixed_requests
from engine import LLM, SamplingParams, shared_prefixes
from engine.graph_shapes import Shape
from models.layers import triton_attention
from reference import assert_greedy

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(params=["triton", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randrange(3, 90))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_qwen3"])
def test_the_cards_greedy_tokens_in_fp32_are_transformers(
    kind: str, backend: str, request: pytest.FixtureRequest
) -> None:
    """Chunked, batched and cached on the card; one by one, in fp32 on the CPU, by the reference."""
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(
        folder,
        device="cuda",
        dtype="float32",
        attention_backend=backend,
        max_num_batched_tokens=96,
        num_kvcache_blocks=200,
    )
    assert llm.engine.device.attention_backend == backend
    for _ in range(2):  # the second time the prompts are cached
        for prompt, out in zip(prompts(8), llm.generate(prompts(8), GREEDY, use_tqdm=False), strict=True):
            with torch.inference_mode():
                best = theirs(torch.tensor([prompt + out.token_ids])).logits[0].argmax(-1)
            assert out.token_ids == best[len(prompt) - 1 : -1].tolist()
    assert llm.stats()["cached_tokens"] > 0
    llm.engine.check_integrity()
    llm.exit()


def test_preempted_requests_on_the_card_lose_no_token(tiny_llama: Path, backend: str) -> None:
    settings = {"device": "cuda", "dtype": "float32", "attention_backend": backend}
    roomy = LLM(tiny_llama, **settings)
    tight = LLM(tiny_llama, **settings, num_kvcache_blocks=24, kvcache_block_size=16)
    expected = [out.token_ids for out in roomy.generate(prompts(6), GREEDY, use_tqdm=False)]
    assert [out.token_ids for out in tight.generate(prompts(6), GREEDY, use_tqdm=False)] == expected
    assert tight.stats()["preemptions"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.1},
        {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
        {"min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"top_k": 20, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 9},
    ],
    ids=["plain", "penalized", "top_k, top_p, penalized", "min_p, penalized", "top_k, biased, banned"],
)
def test_seeded_sampling_is_the_same_on_card_and_cpu(tiny_llama: Path, settings: dict) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, **settings)
    tokens = [
        [out.token_ids for out in LLM(tiny_llama, device=device, dtype="float32").generate(prompts(4), params)]
        for device in ("cuda", "cpu")
    ]
    assert tokens[0] == tokens[1]


def test_smollm2_on_the_card_says_what_it_says_on_the_cpu(default_model_path: Path, backend: str) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = [
        LLM(default_model_path, device=device, dtype="float32", attention_backend=attention).chat(messages, params).text
        for device, attention in (("cuda", backend), ("cpu", "sdpa"))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("size", [16, 32, 128, 256])
def test_triton_serves_blocks_of_any_size(tiny_qwen3: Path, size: int) -> None:
    settings = {"device": "cuda", "dtype": "float32", "max_num_batched_tokens": 96}
    expected = [o.token_ids for o in LLM(tiny_qwen3, **settings, attention_backend="sdpa").generate(prompts(5), GREEDY)]
    llm = LLM(tiny_qwen3, **settings, attention_backend="triton", kvcache_block_size=size, num_kvcache_blocks=512)
    assert [out.token_ids for out in llm.generate(prompts(5), GREEDY)] == expected


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_qwen3"])
def test_bf16_logits_with_triton_are_as_near_to_fp32_as_with_sdpa(kind: str, request: pytest.FixtureRequest) -> None:
    """The fused kernels round less often than the operations they replace, never more."""
    from models.batch import ForwardBatch
    from models.loader import load_model, read_config

    folder: Path = request.getfixturevalue(kind)
    config, count, device = read_config(folder), 50, torch.device("cuda")
    ids = torch.tensor(prompts(9)[0] * 30)[:count].to(device)
    errors, exact = {}, None
    for backend, dtype in (("sdpa", "float32"), ("sdpa", "bfloat16"), ("triton", "bfloat16")):
        model = load_model(folder, config, device=device, dtype=dtype, attention_backend=backend)
        kv = torch.zeros(config.num_hidden_layers, 2, 4, 16, config.num_key_value_heads, config.head_dim)
        model.bind_kv_cache(kv.to(device, getattr(torch, dtype)))
        rows = torch.arange(count, device=device)
        table = torch.arange(4, dtype=torch.int32, device=device)[None]
        batch = ForwardBatch(ids, rows, rows, [count], [count], table, [[0, 1, 2, 3]], 0, 16, rows, {})
        with torch.inference_mode():
            logits = model.compute_logits(model(batch))
        exact = logits if exact is None else exact
        errors[backend, dtype] = float((logits - exact).abs().mean() / exact.abs().mean())
    assert errors["triton", "bfloat16"] < 0.1
    assert errors["triton", "bfloat16"] < 1.25 * errors["sdpa", "bfloat16"] + 1e-3


GRAPHED = {
    "device": "cuda", "dtype": "float32", "max_num_seqs": 20, "kvcache_block_size": 16, "num_kvcache_blocks": 400,
}  # fmt: skip


def count_replays(llm: LLM) -> list[Shape]:
    """The shapes of the graphs that are replayed from here on."""
    graphs: Any = llm.engine.runner.graphs  # type: ignore[attr-defined]
    assert [shape.decodes for shape in graphs.shapes if not shape.tokens] == [1, 2, 4, 8, 16, 20]
    shapes: list[Shape] = []
    replays = graphs._replays
    for shape, replay in list(replays.items()):
        replays[shape] = lambda shape=shape, replay=replay: (shapes.append(shape), replay())
    return shapes


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_qwen3"])
def test_graphs_of_every_size_have_the_greedy_tokens_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, **GRAPHED)
    shapes = count_replays(llm)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20, 23):
        for _ in range(2):  # the second time the prompts are cached
            found = llm.generate(mixed_requests.prompts(count), GREEDY, use_tqdm=False)
            assert_greedy(theirs, mixed_requests.prompts(count), [out.token_ids for out in found])
    assert {shape.decodes for shape in shapes if not shape.tokens} == {1, 2, 4, 8, 16, 20}
    assert any(shape.tokens for shape in shapes)
    assert llm.stats()["cached_tokens"] > 0
    llm.engine.check_integrity()
    llm.exit()


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_qwen3"])
def test_decodes_that_share_prefixes_have_the_greedy_tokens_of_transformers(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two system prompts, one of them that of most; requests that join and end beside those that go on."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(triton_attention, "_LEAST_SHARING", 4)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 16)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_EACH", 1)
    folder: Path = request.getfixturevalue(kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, **{**GRAPHED, "num_kvcache_blocks": 1000})
    graphs: Any = llm.engine.runner.graphs  # type: ignore[attr-defined]
    shared: list[Shape] = []
    for shape, replay in list(graphs._sharing.items()):
        graphs._sharing[shape] = lambda shape=shape, replay=replay: (shared.append(shape), replay())
    systems = [[(7 * i + k) % 500 for i in range(length)] for k, length in enumerate((100, 37))]
    llm.generate(systems, GREEDY, use_tqdm=False)  # from here on they stand in the cache
    asked = [systems[i % 5 == 0] + own for i, own in enumerate(prompts(18))] + prompts(4, seed=8)
    params = [SamplingParams(temperature=0.0, max_tokens=20 + 4 * i, ignore_eos=True) for i in range(len(asked))]
    found = llm.generate(asked, params, use_tqdm=False)
    assert_greedy(theirs, asked, [out.token_ids for out in found])
    assert len(shared) > 30 and len(set(shared)) > 2
    llm.engine.check_integrity()
    llm.exit()


@pytest.mark.parametrize("budget", [96, 700])
def test_prompts_of_every_length_in_graphs_have_the_greedy_tokens_of_transformers(
    tiny_qwen3: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in chunks, beside decodes and behind cached prefixes; no step is eager, and hardly one is waited for."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    llm = LLM(tiny_qwen3, **{**GRAPHED, "max_num_batched_tokens": budget, "num_kvcache_blocks": 1000})
    monkeypatch.setattr("engine.step_inputs.StepInputs.build", lambda self, plan: pytest.fail(f"an eager step: {plan}"))
    rng = random.Random(7)
    asked = [[rng.randrange(500) for _ in range(length)] for length in (1, 63, 64, 65, 96, 97, 300, 420)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for _ in range(2):
        ahead, begin = 0, llm.engine.executor.begin

        def counted(plan: Any, begin: Any = begin) -> Any:
            nonlocal ahead
            ahead += any(i.start + i.num_tokens > len(i.seq.token_ids) for i in plan.items)
            return begin(plan)

        monkeypatch.setattr(llm.engine.executor, "begin", counted)
        found = llm.generate(asked, params, use_tqdm=False)
        assert_greedy(theirs, asked, [out.token_ids for out in found])
        assert ahead > 30
    llm.engine.check_integrity()
    llm.exit()


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_every_kind_have_the_tokens_of_eager_steps_with_graphs_too(tiny_qwen3: Path, seed: int) -> None:
    """Seeds, truncations, penalties, biases, log-probabilities, continuations; arrivals and aborts in mid-stream."""
    eager = LLM(tiny_qwen3, **GRAPHED, enforce_eager=True)
    assert eager.engine.runner.graphs is None  # type: ignore[attr-defined]
    expected = mixed_requests.serve(eager, seed)
    eager.exit()
    llm = LLM(tiny_qwen3, **GRAPHED)
    sizes = count_replays(llm)
    found = mixed_requests.serve(llm, seed)
    assert len(sizes) > 5
    assert {key: new for key, (new, _) in found.items()} == {key: new for key, (new, _) in expected.items()}
    llm.engine.check_integrity()
    llm.exit()


def test_preempted_sequences_go_on_in_graphs_with_their_new_tables(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    llm = LLM(tiny_llama, **{**GRAPHED, "num_kvcache_blocks": 14})
    sizes = count_replays(llm)
    found = llm.generate(mixed_requests.prompts(6), GREEDY, use_tqdm=False)
    assert_greedy(theirs, mixed_requests.prompts(6), [out.token_ids for out in found])
    assert llm.stats()["preemptions"] > 0 and len(sizes) > 20
    llm.exit()


def test_graphs_take_no_more_memory_than_was_set_aside(tiny_qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pageturn.engine"):
        llm = LLM(tiny_qwen3, **{**GRAPHED, "max_num_seqs": 512, "dtype": "bfloat16"})
    line = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("graphs:"))
    used, limit = map(int, re.findall(r"(-?[0-9]+) MiB [(]at most ([0-9]+)[)]", line)[0])
    assert used <= limit and "left out" not in line, line
    llm.exit()


def test_the_largest_step_stays_within_the_share_of_the_card_given(make_tiny_model: Callable[..., Path]) -> None:
    """256 prompts of 32 tokens, all drawn with penalties, truncated and scored, with a pool that fills the card."""
    vocab = 151_936
    folder = make_tiny_model(
        "qwen3", vocab_size=vocab, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    )  # fmt: skip
    others = used_bytes()
    llm = LLM(folder, device="cuda", dtype="bfloat16", max_num_seqs=256, gpu_memory_utilization=0.9)
    total = torch.cuda.mem_get_info()[1]
    assert used_bytes() > 0.8 * total, "the pool fills the card"
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    demanding = SamplingParams(
        top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={7: 1.0},
        logprobs=20, max_tokens=3, ignore_eos=True,
    )  # fmt: skip
    rng = random.Random(3)
    ids = [llm.add_request([rng.randrange(vocab) for _ in range(32)], demanding) for _ in range(256)]
    outputs = {}
    while not llm.is_finished():
        outputs |= {out.request_id: out for out in llm.step()}
    assert [outputs[i].finish_reason for i in ids] == ["length"] * 256
    outside_torch = used_bytes() - torch.cuda.memory_reserved()
    assert outside_torch + torch.cuda.max_memory_reserved() <= 0.9 * total + 2**26, f"{others} bytes were in use before"
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
    llm.exit()


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_how_fast_prompts_are_is_known_before_the_first_one(make_tiny_model: Callable[..., Path]) -> None:
    """And of more tokens than a card computes in the time of few."""
    llm = LLM(make_tiny_model("qwen3", seed=9, max_position_embeddings=8192), device="cuda", num_kvcache_blocks=1024)
    rate = llm.stats()["prefill_tokens_per_second"]
    assert rate > 10_000, "nothing was compiled meanwhile"
    llm.generate([list(range(3, 203))], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert llm.stats()["prefill_tokens_per_second"] == rate
    llm.exit()


def test_a_card_is_picked_with_bf16_and_triton(tiny_qwen3: Path) -> None:
    llm = LLM(tiny_qwen3)
    assert llm.engine.device.device.type == "cuda"
    assert llm.engine.device.dtype is torch.bfloat16
    assert llm.engine.device.attention_backend == "triton"
    assert llm.generate_single([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)).finish_reason == "length"
