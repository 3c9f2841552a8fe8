"""EngineConfig: every choice that is fixed when an engine starts."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, fields
from typing import Any

from engine.shown import shown

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")
ATTENTION_BACKENDS = ("auto", "sdpa", "triton", "flash_attn")

# Far above what serves anyone; beyond them the host's buffers alone would take gigabytes.
MAX_NUM_SEQS = 4096
MAX_STEP_TOKENS = 1 << 20
MAX_BLOCK_SIZE = 4096
MAX_RANKS = 64


@dataclass(slots=True)
class EngineConfig:
    """The engine's settings; a bad value raises ValueError naming the field, the value and the range.

    model                   "default", a folder (config.json + safetensors), a .gguf file, or a hub id
    device, dtype           "auto" lets DeviceManager choose and log why
    tensor_parallel_size    ranks that the model is split over, each a process: a CUDA card each, or a share of the
                            CPU's cores. A program that asks for more than one guards its __main__.
    max_num_seqs            sequences that may run in one step
    max_num_batched_tokens  tokens (decodes + prefill chunks) of one step; None: 8192 on CUDA, on a CPU up to 1024,
                            fewer where a step would take longer than about 0.3 s
    max_model_len           tokens of prompt + output of one sequence; None: the model's own limit
    kvcache_block_size      tokens a KV block holds; None: the backend's preference (16; 32 on a card)
    num_kvcache_blocks      blocks of the pool; -1: from memory (on a CPU the smaller of 2 GiB and a quarter
                            of the memory free to this process). A pool below max_model_len is legal.
    gpu_memory_utilization  share of the card's memory the engine may use, (0, 1]
    enforce_eager           True: no CUDA graphs, every step is launched kernel by kernel; on a CPU no C
    enable_prefix_caching   False: every prompt is computed anew (for benchmarks)
    seed                    base of the seeds given to requests that bring none; None: from the system
    """

    model: str = "default"
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int = -1
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        _at_least("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        if self.max_num_batched_tokens is not None:
            _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_STEP_TOKENS)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs="
                f"{self.max_num_seqs}: a step must hold one token of every running sequence"
            )
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.kvcache_block_size is not None:
            _at_least("kvcache_block_size", self.kvcache_block_size, 1, MAX_BLOCK_SIZE)
        if self.num_kvcache_blocks != -1:
            _at_least("num_kvcache_blocks", self.num_kvcache_blocks, 1, or_else=", or -1 to size the pool by memory")
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={shown(self.gpu_memory_utilization)} must be above 0 and at most 1"
            )
        if self.seed is not None:
            _at_least("seed", self.seed, 0)
        for name, value, available in (
            ("kv_cache_dtype", self.kv_cache_dtype, ("auto",)),
            ("quantization", self.quantization, ("auto", "none")),
        ):
            if value not in available:
                raise ValueError(
                    f"{name}={shown(value)} is not available yet; this version supports "
                    f"{' or '.join(repr(a) for a in available)}"
                )

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> EngineConfig:
        """Build a config; an unknown keyword is ignored with a warning that names the nearest field."""
        known = {f.name for f in fields(cls)}
        for name in [k for k in kwargs if k not in known]:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            warnings.warn(f"EngineConfig has no field {name!r}; ignored. The nearest is {near[0]!r}.", stacklevel=3)
            del kwargs[name]
        return cls(model=str(model), **kwargs)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={shown(value)} must be one of {', '.join(allowed)}")


def _at_least(name: str, value: object, low: int, high: int | None = None, *, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"of at least {low}" + ("" if high is None else f" and at most {high:,}")
        raise ValueError(f"{name}={shown(value)} must be an integer {wanted}{or_else}")
