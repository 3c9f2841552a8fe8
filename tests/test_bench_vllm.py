"""The adapter of vLLM against a stand-in with the calls and the results that vLLM 0.26 has."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench_engines import NotOffered, Setup, Vllm
from bench_workloads import chat


class RequestOutputKind(Enum):
    CUMULATIVE, DELTA, FINAL_ONLY = range(3)


class SamplingParams:
    def __init__(
        self, *, temperature: float, ignore_eos: bool, detokenize: bool, max_tokens: int,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:  # fmt: skip
        assert (temperature, ignore_eos, detokenize) == (0.6, True, False)
        self.max_tokens, self.output_kind = max_tokens, output_kind


class EngineArgs:
    """Those that are used; "model" first, as in vLLM."""

    def __init__(
        self, model: str, *, dtype: str, tensor_parallel_size: int, kv_cache_dtype: str, skip_tokenizer_init: bool,
        max_model_len: int, gpu_memory_utilization: float, enable_prefix_caching: bool,
    ) -> None:  # fmt: skip
        assert skip_tokenizer_init and enable_prefix_caching
        self.model, self.max_model_len = model, max_model_len


class LLM(EngineArgs):
    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.llm_engine = object()
        self.short = 0

    def generate(self, prompts: list[dict], params: list[SamplingParams], *, use_tqdm: bool = True) -> list[Any]:
        assert not use_tqdm and all(prompt.keys() == {"prompt_token_ids"} for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * (p.max_tokens - self.short))]) for p in params]


class AsyncLLM:
    """Streams deltas of one token, then of two, and finds all but the last 64 tokens of a prompt cached."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self.contexts: list[Any] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, usage_context: Any) -> AsyncLLM:
        import asyncio

        asyncio.get_running_loop()  # raises outside of one: vLLM's engine binds to it
        assert isinstance(engine_args, EngineArgs)
        llm = cls()
        llm.contexts.append(usage_context)
        return llm

    async def generate(self, prompt: dict, sampling_params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        assert request_id not in self.request_ids, "an id is used once"
        self.request_ids.add(request_id)
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        left = sampling_params.max_tokens
        while left:
            size = min(left, 1 if left == sampling_params.max_tokens else 2)
            left -= size
            cached = len(prompt["prompt_token_ids"]) - 64
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[9] * size)], num_cached_tokens=cached)


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm", LLM=LLM, SamplingParams=SamplingParams)
    module("vllm.engine")
    module("vllm.engine.arg_utils", AsyncEngineArgs=EngineArgs)
    module("vllm.sampling_params", RequestOutputKind=RequestOutputKind)
    module("vllm.usage")
    module("vllm.usage.usage_lib", UsageContext=SimpleNamespace(OPENAI_API_SERVER="server"))
    module("vllm.v1")
    module("vllm.v1.engine")
    module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)


def opened(mode: str) -> Vllm:
    return Vllm(Setup("folder", "cuda", "bfloat16", 1, "auto", "vllm", mode))


def test_offline_requests_get_exactly_the_tokens_asked_for() -> None:
    engine = opened("offline")
    engine.generate([[1, 2], [3]], [5, 9])
    engine.llm.short = 1
    with pytest.raises(RuntimeError, match="4 new tokens came where 5 were asked for"):
        engine.generate([[1, 2]], [5])


def test_conversations_are_streamed_with_the_defaults_of_its_own_server() -> None:
    engine = opened("chat")
    assert engine.llm.contexts == ["server"]
    figures = chat(engine, 0, count=3, turns=2, system=100, user=64, reply=6)
    assert len(engine.llm.request_ids) == 6
    assert figures["prompt_tokens_cached"] == pytest.approx((100 + 64 + 6) / (100 + 64 + 6 + 64))
    engine.loop.close()


def test_a_mode_that_it_has_not_is_not_offered() -> None:
    with pytest.raises(NotOffered):
        opened("nocache")
