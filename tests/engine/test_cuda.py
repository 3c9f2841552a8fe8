"""The engine on a CUDA card. `sdpa` serves there until kernels of our own do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randrange(3, 90))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_qwen3"])
def test_the_cards_greedy_tokens_in_fp32_are_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    """Chunked, batched and cached on the card; one by one, in fp32 on the CPU, by the reference."""
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, device="cuda", dtype="float32", max_num_batched_tokens=96, num_kvcache_blocks=200)
    for _ in range(2):  # the second time the prompts are cached
        for prompt, out in zip(prompts(8), llm.generate(prompts(8), GREEDY, use_tqdm=False), strict=True):
            with torch.inference_mode():
                best = theirs(torch.tensor([prompt + out.token_ids])).logits[0].argmax(-1)
            assert out.token_ids == best[len(prompt) - 1 : -1].tolist()
    assert llm.stats()["cached_tokens"] > 0
    llm.engine.check_integrity()
    llm.exit()


def test_preempted_requests_on_the_card_lose_no_token(tiny_llama: Path) -> None:
    roomy = LLM(tiny_llama, device="cuda", dtype="float32")
    tight = LLM(tiny_llama, device="cuda", dtype="float32", num_kvcache_blocks=24)
    expected = [out.token_ids for out in roomy.generate(prompts(6), GREEDY, use_tqdm=False)]
    assert [out.token_ids for out in tight.generate(prompts(6), GREEDY, use_tqdm=False)] == expected
    assert tight.stats()["preemptions"] > 0


def test_seeded_sampling_is_the_same_on_card_and_cpu(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=3, max_tokens=40)
    tokens = [
        [out.token_ids for out in LLM(tiny_llama, device=device, dtype="float32").generate(prompts(4), params)]
        for device in ("cuda", "cpu")
    ]
    assert tokens[0] == tokens[1]


def test_smollm2_on_the_card_says_what_it_says_on_the_cpu(default_model_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = [LLM(default_model_path, device=d, dtype="float32").chat(messages, params).text for d in ("cuda", "cpu")]
    assert texts[0] == texts[1]


def test_a_card_is_picked_with_bf16(tiny_qwen3: Path) -> None:
    llm = LLM(tiny_qwen3)
    assert llm.engine.device.device.type == "cuda"
    assert llm.engine.device.dtype is torch.bfloat16
    assert llm.generate_single([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)).finish_reason == "length"
