"""PageTurn's inference engine: paged KV cache, prefix reuse, continuous batching.

Names are loaded on first use, so that reading a config or checking a parameter does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_engine import AsyncLLMEngine
    from engine.config import EngineConfig
    from engine.llm import LLM, AsyncLLM
    from engine.outputs import RequestOutput, RequestPriority
    from engine.sampling_params import BeamSearchParams, SamplingParams

# A step on a CPU is a few hundred small parallel regions. By default OpenMP's threads wait for each other by spinning
# for milliseconds; where another process wants a core (a browser on a laptop, a second engine), the spinner keeps it
# from the very thread that it waits for, and a step takes 20 times as long. Not spinning at all costs a fifth on an
# idle machine, for waking threads up. 5000 turns, under a quarter of a millisecond, is nearly the best of both. Read
# once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_HOME = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.llm",
    "AsyncLLMEngine": "engine.async_engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.sampling_params",
    "BeamSearchParams": "engine.sampling_params",
    "RequestOutput": "engine.outputs",
    "RequestPriority": "engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "EngineConfig",
    "RequestOutput",
    "RequestPriority",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
