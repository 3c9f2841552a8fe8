"""The engine on a CUDA card, with every attention backend that serves there."""

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
    tight = LLM(tiny_llama, **settings, num_kvcache_blocks=24)
    expected = [out.token_ids for out in roomy.generate(prompts(6), GREEDY, use_tqdm=False)]
    assert [out.token_ids for out in tight.generate(prompts(6), GREEDY, use_tqdm=False)] == expected
    assert tight.stats()["preemptions"] > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.1}, {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}],
    ids=["by the kernel", "by the kernel, penalized", "truncated"],
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


def test_a_card_is_picked_with_bf16_and_triton(tiny_qwen3: Path) -> None:
    llm = LLM(tiny_qwen3)
    assert llm.engine.device.device.type == "cuda"
    assert llm.engine.device.dtype is torch.bfloat16
    assert llm.engine.device.attention_backend == "triton"
    assert llm.generate_single([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)).finish_reason == "length"
