"""An engine's configuration is checked before anything is loaded."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import pytest

from engine import EngineConfig
from models.config import ModelConfig


def test_the_defaults_are_valid():
    config = EngineConfig()
    assert (config.model, config.device, config.dtype, config.num_kvcache_blocks) == ("default", "auto", "auto", -1)


@pytest.mark.parametrize(
    ("field", "bad", "limit"),
    [
        ("device", "tpu", "auto, cpu, cuda"),
        ("device", None, "auto, cpu, cuda"),
        ("dtype", "int8", "float32, bfloat16, float16"),
        ("kv_cache_dtype", "int4", "auto, fp8"),
        ("quantization", "int3", "int8, int4, fp8"),
        ("attention_backend", "xformers", "sdpa, triton, flash_attn"),
        *[("max_num_seqs", v, "at least 1") for v in (0, -1, 1.5, "8", True, None)],
        *[("max_num_batched_tokens", v, "at least 1") for v in (0, -1, 2.0, "8")],
        *[("max_model_len", v, "at least 2") for v in (0, 1, -3, 100.0, "100")],
        *[("kvcache_block_size", v, "at least 1") for v in (0, -16, 16.0)],
        *[("num_kvcache_blocks", v, "at least 1") for v in (0, -2, 1.0, None)],
        *[("gpu_memory_utilization", v, "above 0 and at most 1") for v in (0, -0.5, 1.1, math.nan, "0.9", None)],
        *[("seed", v, "at least 0") for v in (-1, 0.5, "1")],
        *[("tensor_parallel_size", v, "at least 1") for v in (0, -1, 1.0, 65)],
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_range(field, bad, limit):
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{field: bad})
    message = str(caught.value)
    assert f"{field}={bad!r}" in message
    assert limit in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("quantization", "int8"),
    ],
)
def test_what_this_version_cannot_do_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r} is not available yet"):
        EngineConfig(**{field: value})


def test_a_step_that_cannot_hold_a_token_of_every_sequence_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=8 is below max_num_seqs=9"):
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)


def test_a_pool_smaller_than_the_context_is_legal():
    EngineConfig(max_model_len=4096, num_kvcache_blocks=1)


def test_an_unknown_keyword_is_ignored_with_a_warning_that_names_the_nearest_field():
    with pytest.warns(UserWarning, match=r"no field 'max_seqs'; ignored. The nearest is 'max_num_seqs'"):
        config = EngineConfig.from_kwargs("some/model", max_seqs=3, max_model_len=100)
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("some/model", 100, EngineConfig().max_num_seqs)


def test_known_keywords_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EngineConfig.from_kwargs("m", device="cpu", seed=3)


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys, engine; engine.EngineConfig(); engine.SamplingParams(); print('torch' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert asked.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "ranks", "why"),
    [
        (9, 3, 1536, 2, "9 query heads do not divide evenly by 2 (1, 3 would)"),
        (12, 3, 1536, 2, "3 KV heads do not divide evenly by 2 (1, 3, 6, 12 would)"),
        (12, 3, 1536, 4, "4 ranks do not divide evenly over its 3 KV heads (1, 3, 6, 12 would)"),
        (8, 2, 100, 8, "intermediate size of 100 does not divide evenly by 8 (1, 2, 4 would)"),
    ],
)
def test_a_model_that_does_not_split_is_refused_with_the_numbers_and_what_would_do(
    heads: int, kv_heads: int, inner: int, ranks: int, why: str
) -> None:
    shape = ModelConfig("LlamaForCausalLM", 99, 64, inner, 1, heads, kv_heads, 8, 64)
    with pytest.raises(ValueError) as caught:
        shape.check_ranks(ranks)
    assert f"tensor_parallel_size={ranks} does not fit" in str(caught.value) and why in str(caught.value)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks", "own"), [(16, 8, 2, 4), (16, 8, 16, 1), (4, 1, 2, 1)])
def test_kv_heads_are_shared_out_or_held_alike_and_sized_so(heads: int, kv_heads: int, ranks: int, own: int) -> None:
    shape = ModelConfig("LlamaForCausalLM", 99, 64, 1600, 3, heads, kv_heads, 8, 64)
    shape.check_ranks(ranks)
    assert shape.kv_bytes_per_token(2, ranks) == 2 * 3 * own * 8 * 2
