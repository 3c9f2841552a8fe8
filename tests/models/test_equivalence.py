"""Our models against transformers in fp32 on the same token ids: logits within 1e-4, the same greedy tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.loader import load_model, load_tokenizer, read_config
from reference import assert_greedy
from tests.models.paged import PagedRunner

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n",
    "Translate to German: good morning, my friend.",
    "12 + 30 =",
    "List three fruits and their colours.",
    "Explain how a bicycle stays upright, in two sentences.",
    "Once upon a time there was a fox who",
]


@pytest.fixture(scope="module")
def smollm_pair(default_model_path: Path, default_model_reference: torch.nn.Module) -> tuple:
    """(our model, transformers' model of the same file, prompts as token ids)."""
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer is not None
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    ours = load_model(default_model_path, read_config(default_model_path), dtype=torch.float32)
    return ours, default_model_reference, prompts


def logits(model, ids: list[int], **runner: object) -> torch.Tensor:
    pages = PagedRunner(model, **runner)
    return pages.step([(ids, 0, pages.reserve(len(ids)))])[0]


def test_smollm2_logits_equal_transformers(smollm_pair: tuple) -> None:
    ours, theirs, prompts = smollm_pair
    for prompt in prompts:
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert (logits(ours, prompt) - expected).abs().max() < 1e-4


def test_smollm2_has_the_same_greedy_tokens_on_8_prompts(smollm_pair: tuple) -> None:
    """All eight as one batch on our side, chunked and over scattered blocks; one by one on the other. (64 tokens of
    each are compared by tests/engine/test_equivalence.py.)"""
    ours, theirs, prompts = smollm_pair
    got = PagedRunner(ours, scatter=True, last_only=True).greedy(prompts, 24, chunk=24)
    assert [len(tokens) for tokens in got] == [24] * 8
    assert_greedy(theirs, prompts, got)


# ---------------------------------------------------------------------- tiny random models

VARIANTS = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, heads wider than hidden": ("llama", {"head_dim": 32}),
    "qwen3": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3, heads wider than hidden": ("qwen3", {"head_dim": 32}),
}


def load_pair(folder: Path) -> tuple:
    from transformers import AutoModelForCausalLM

    return (
        load_model(folder, read_config(folder), dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
    )


def random_prompts(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_equal_transformers(make_tiny_model: Callable[..., Path], variant: str) -> None:
    kind, overrides = VARIANTS[variant]
    ours, theirs = load_pair(make_tiny_model(kind, seed=3, **overrides))
    prompts = random_prompts(8, seed=4)
    for prompt in prompts:
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert (logits(ours, prompt) - expected).abs().max() < 1e-4
    assert_greedy(theirs, prompts, PagedRunner(ours, scatter=True, last_only=True).greedy(prompts, 64, chunk=7))


ROPES = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn in full": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_stretched_positions_equal_transformers(make_tiny_model: Callable[..., Path], name: str) -> None:
    """Dynamic also past the trained length: 96 positions are trained, 150 used."""
    trained = 96 if name == "dynamic" else 256
    folder = make_tiny_model(
        "llama", seed=5, max_position_embeddings=trained, rope_parameters={"rope_theta": 500.0, **ROPES[name]}
    )
    ours, theirs = load_pair(folder)
    for length in (20, 96, 150):
        prompt = random_prompts(1, seed=length, longest=2)[0] * length
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert (logits(ours, prompt) - expected).abs().max() < 1e-4


def test_dynamic_positions_of_one_sequence_do_not_follow_another(make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model(
        "llama",
        seed=5,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0},
    )
    model = load_model(folder, read_config(folder))
    short, long = random_prompts(2, seed=8)[0], [7] * 100
    pages = PagedRunner(model)
    together = pages.step([(short, 0, pages.reserve(100)), (long, 0, pages.reserve(100))])[0]
    assert (together - logits(model, short)).abs().max() < 1e-4


def test_bfloat16_is_as_near_to_fp32_as_transformers_is(smollm_pair: tuple, default_model_path: Path) -> None:
    ours32, theirs, prompts = smollm_pair
    ours = load_model(default_model_path, ours32.config, dtype="bfloat16")
    theirs = copy.deepcopy(theirs).bfloat16()
    for prompt in prompts[:3]:
        exact = logits(ours32, prompt)
        with torch.inference_mode():
            reference = theirs(torch.tensor([prompt])).logits[0].float()
        got = logits(ours, prompt, dtype=torch.bfloat16)
        assert (got - exact).abs().mean() < 1.2 * (reference - exact).abs().mean()
