"""The engines that bench.py measures, each behind generate() and turn(): PageTurn and its peers.

Each class imports its own package when it is constructed, in a process of its own; a peer that is not installed
raises ModuleNotFoundError. The peers are set up as their own documentation says is fastest for this work.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TEMPERATURE = 0.6


class NotOffered(Exception):
    """This engine has no way to do this workload: said in the table, not counted as a failure."""


@dataclass(frozen=True)
class Setup:
    """What an engine's process is told: model is a path, dtype the one that PageTurn chooses for this device, mode
    "offline" (plain generate), "nocache" (the same, prefix cache off), "chat" (the async engine, generate() too) or
    "load"."""

    model: str
    device: str
    dtype: str
    tensor_parallel_size: int
    kv_cache_dtype: str
    engine: str = ""
    mode: str = ""


class Engine:
    """One engine under measurement, its model loaded by __init__(setup)."""

    packages: tuple[str, ...] = ()  # whose versions belong to the result
    dtype: str
    loop: asyncio.AbstractEventLoop  # of the chat mode

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Run every prompt to exactly its max_tokens new tokens, or raise."""
        raise NotImplementedError

    async def turn(self, ids: list[int], max_tokens: int) -> tuple[float, list[int], int]:
        """One streamed request: seconds to the first token, the new ids, prompt tokens found in the cache."""
        raise NotImplementedError


def offered(setup: Setup, *modes: str) -> None:
    reasons = {"nocache": "PageTurn's own comparison", "chat": "has no async engine"}
    if setup.mode not in ("offline", "load", *modes):
        raise NotOffered(reasons[setup.mode])


def exactly(got: Sequence[int], wanted: int) -> None:
    if len(got) != wanted:
        raise RuntimeError(f"{len(got)} new tokens came where {wanted} were asked for")


class PageTurn(Engine):
    packages = ("torch",)

    def __init__(self, setup: Setup) -> None:
        from engine import LLM, AsyncLLM, SamplingParams

        self.params = partial(SamplingParams, temperature=TEMPERATURE, ignore_eos=True)
        self.mode = setup.mode
        options: dict[str, Any] = {
            "device": setup.device, "tensor_parallel_size": setup.tensor_parallel_size,
            "kv_cache_dtype": setup.kv_cache_dtype, "enable_prefix_caching": setup.mode != "nocache",
        }  # fmt: skip
        if setup.device == "cuda":  # as vLLM below
            options |= {"max_num_seqs": 256, "max_model_len": 8192, "gpu_memory_utilization": 0.85}
        if setup.mode == "chat":
            self.loop = asyncio.new_event_loop()
            self.llm: Any = self.loop.run_until_complete(AsyncLLM(setup.model, **options).__aenter__())
            self.dtype = self.llm.engine.status().dtype
        else:
            self.llm = LLM(setup.model, **options)
            self.dtype = str(self.llm.engine.device.dtype).removeprefix("torch.")
            model = getattr(self.llm.engine.runner, "model", None)
            if model is not None and (model.decoder or any(getattr(layer, "int4", None) for layer in model.modules())):
                self.dtype += ", decodes int4"  # of a file that holds 4-bit weights

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        if self.mode == "chat":  # through the engine's thread, every delta of every stream read
            self.loop.run_until_complete(self.all_turns(prompts, max_tokens))
            return
        outs = self.llm.generate(prompts, [self.params(max_tokens=m) for m in max_tokens], use_tqdm=False)
        for out, wanted in zip(outs, max_tokens, strict=True):
            if out.error:
                raise RuntimeError(out.error)
            exactly(out.token_ids, wanted)

    async def all_turns(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        await asyncio.gather(*(self.turn(p, m) for p, m in zip(prompts, max_tokens, strict=True)))

    async def turn(self, ids: list[int], max_tokens: int) -> tuple[float, list[int], int]:
        start, first, new, cached = time.perf_counter(), 0.0, [], 0
        async for delta in self.llm.stream(ids, self.params(max_tokens=max_tokens)):
            if delta.error:
                raise RuntimeError(delta.error)
            if delta.token_ids and not new:
                first, cached = time.perf_counter() - start, delta.num_cached_tokens
            new += delta.token_ids
        exactly(new, max_tokens)
        return first, new, cached


class Transformers(Engine):
    """generate() with sdpa attention and the dynamic cache, which is its fastest without a compiler. The cache of
    the last single request is handed back when the next prompt continues it."""

    packages = ("torch", "transformers")

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        offered(setup)
        if setup.tensor_parallel_size > 1:
            raise NotOffered("measured on one device")
        self.torch, self.device, self.dtype = torch, setup.device, setup.dtype
        path = Path(setup.model)
        file: dict[str, Any] = {}
        if path.suffix == ".gguf":  # dense, since packed blocks are computed in float32
            file = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
            importlib.import_module("gguf")  # transformers reads such a file with both
            importlib.import_module("accelerate")
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent if file else path, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa", **file
        )
        self.model.to(setup.device).eval().generation_config.eos_token_id = None
        self.kept: tuple[list[int], Any] = ([], None)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        from transformers import DynamicCache, GenerationConfig

        if len({len(p) for p in prompts}) > 1 or len(set(max_tokens)) > 1:
            raise NotOffered("generate() takes a batch of equal lengths")
        ids, cache = self.kept
        if len(prompts) > 1 or not ids or prompts[0][: len(ids)] != ids:
            cache = DynamicCache()
        config = GenerationConfig(
            max_new_tokens=max_tokens[0], do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, pad_token_id=0
        )
        batch = self.torch.tensor(prompts, device=self.device)
        out = self.model.generate(
            batch, attention_mask=self.torch.ones_like(batch), past_key_values=cache, generation_config=config
        )
        exactly(out[0, len(prompts[0]) :], max_tokens[0])
        self.kept = (out[0, :-1].tolist(), cache) if len(prompts) == 1 else ([], None)


class LlamaCpp(Engine):
    """llama.cpp by llama-cpp-python's batch calls: every sequence decodes in one batch over one KV cache, and the
    last single request's sequence stays for a prompt that continues it. Reads the file's own quantised weights."""

    packages = ("llama_cpp_python",)
    SEQUENCES, CONTEXT, BATCH = 32, 40960, 2048
    dtype = "gguf"

    def __init__(self, setup: Setup) -> None:
        offered(setup)
        if not setup.model.endswith(".gguf"):
            raise NotOffered("reads .gguf files only")
        c: Any = importlib.import_module("llama_cpp")
        self.c, model, context = c, c.llama_model_default_params(), c.llama_context_default_params()
        model.n_gpu_layers = 999 if setup.device == "cuda" else 0
        context.n_ctx, context.n_batch, context.n_seq_max = self.CONTEXT, self.BATCH, self.SEQUENCES
        context.n_threads = context.n_threads_batch = len(os.sched_getaffinity(0))
        context.kv_unified = True  # one pool, whatever the length of each sequence
        c.llama_backend_init()
        self.context = c.llama_init_from_model(c.llama_model_load_from_file(setup.model.encode(), model), context)
        self.batch = c.llama_batch_init(self.BATCH, 0, 1)
        self.sampler = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        c.llama_sampler_chain_add(self.sampler, c.llama_sampler_init_temp(TEMPERATURE))
        c.llama_sampler_chain_add(self.sampler, c.llama_sampler_init_dist(0))
        self.kept: list[int] = []

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        if len(prompts) > self.SEQUENCES or sum(map(len, prompts)) + sum(max_tokens) > self.CONTEXT:
            raise NotOffered(f"set up for {self.SEQUENCES} sequences of {self.CONTEXT} tokens in all")
        kept = len(self.kept) if len(prompts) == 1 and prompts[0][: len(self.kept)] == self.kept else 0
        for s in range(self.SEQUENCES):
            self.c.llama_memory_seq_rm(self.c.llama_get_memory(self.context), s, 0 if s else kept, -1)
        whole = [list(p) for p in prompts]
        rows = [(s, i) for s, p in enumerate(prompts) for i in range(0 if s else kept, len(p))]
        while rows:
            for start in range(0, len(rows), self.BATCH):
                self.step(rows[start : start + self.BATCH], whole)
            rows = [(s, len(w) - 1) for s, w in enumerate(whole) if len(w) < len(prompts[s]) + max_tokens[s]]
        self.kept = whole[0][:-1] if len(prompts) == 1 else []

    def step(self, rows: list[tuple[int, int]], whole: list[list[int]]) -> None:
        """Compute these (sequence, position) rows; a sequence whose last token is among them gets its next one."""
        batch, batch.n_tokens = self.batch, len(rows)
        ends = [i == len(whole[s]) - 1 for s, i in rows]
        for row, (s, i) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = whole[s][i], i, ends[row]
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, s
        if code := self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        for row, (s, _) in enumerate(rows):
            if ends[row]:
                whole[s].append(self.c.llama_sampler_sample(self.sampler, self.context, row))


class Vllm(Engine):
    packages = ("torch", "vllm")

    def __init__(self, setup: Setup) -> None:
        offered(setup, "chat")
        vllm: Any = importlib.import_module("vllm")
        self.params = partial(vllm.SamplingParams, temperature=TEMPERATURE, ignore_eos=True, detokenize=False)
        options = {
            "model": setup.model, "dtype": setup.dtype, "tensor_parallel_size": setup.tensor_parallel_size,
            "kv_cache_dtype": setup.kv_cache_dtype, "skip_tokenizer_init": True, "max_model_len": 8192,
            "gpu_memory_utilization": 0.85, "enable_prefix_caching": True,
        }  # fmt: skip
        if setup.mode == "chat":
            # As `vllm serve` sets it up: without a context it would run half as many sequences and a quarter of the
            # tokens in a step.
            context = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
            args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(**options)
            self.delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
            self.loop, self.requests = asyncio.new_event_loop(), 0

            async def start() -> Any:  # the engine binds to the loop that runs
                return importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(
                    args, usage_context=context
                )

            self.llm: Any = self.loop.run_until_complete(start())
        else:
            self.llm = vllm.LLM(**options)
        self.dtype = setup.dtype

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        if not hasattr(self.llm, "llm_engine"):
            raise NotOffered("measured by its own offline engine")
        params = [self.params(max_tokens=m) for m in max_tokens]
        outs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for out, wanted in zip(outs, max_tokens, strict=True):
            exactly(out.outputs[0].token_ids, wanted)

    async def turn(self, ids: list[int], max_tokens: int) -> tuple[float, list[int], int]:
        params = self.params(max_tokens=max_tokens, output_kind=self.delta)
        self.requests += 1
        start, first, new, cached = time.perf_counter(), 0.0, [], 0
        async for out in self.llm.generate({"prompt_token_ids": ids}, params, request_id=str(self.requests)):
            if not new and out.outputs[0].token_ids:
                first, cached = time.perf_counter() - start, out.num_cached_tokens or 0
            new += out.outputs[0].token_ids
        exactly(new, max_tokens)
        return first, new, cached


ENGINES = {"pageturn": PageTurn, "transformers": Transformers, "llamacpp": LlamaCpp, "vllm": Vllm}
