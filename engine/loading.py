"""From a configuration to the parts of an engine: the model's file, device, weights and KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from engine.config import EngineConfig
from engine.device import DeviceManager, DevicePlan
from engine.model_runner import ModelRunner, StepHandle
from engine.scheduler import StepPlan
from engine.tensor_parallel import TensorParallelRunner
from engine.worst_step import run_worst_steps
from models import catalog
from models.config import ModelConfig
from models.layers import flash_attn
from models.loader import count_parameters, load_tokenizer, read_config

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

logger = logging.getLogger("pageturn.engine")

CPU_STEP_TOKENS = 1024
CUDA_STEP_TOKENS = 8192

Progress = Callable[[str, float], None]

_MOST_CACHED_BLOCKS = 2**16  # where fewer would do for all that runs


class Runner(Protocol):
    """What LLMEngine asks of a ModelRunner. One that runs on ranks may raise RanksLost from launch and collect.

    leads: what it has launched last leaves its tokens where a step launched behind it, before they are collected, may
    find them; can_follow() says whether that can be the step of this plan.
    """

    @property
    def leads(self) -> bool: ...
    def can_follow(self, plan: StepPlan) -> bool: ...

    def launch(self, plan: StepPlan) -> StepHandle: ...
    def collect(self, handle: StepHandle) -> list[int]: ...
    def check_device(self) -> None: ...
    def release_buffers(self) -> None: ...
    def scrub(self, blocks: list[int]) -> None: ...
    def copy_blocks(self, copies: dict[int, int]) -> None: ...
    def forget(self, seq_id: int) -> None: ...
    def exit(self) -> None: ...


@dataclass(slots=True)
class EngineParts:
    """A loaded model, ready to step. adaptive_budget: the engine may lower the tokens of a step to keep it short.
    ranks: the runner once more, where it runs on several ranks and may lose them. prefill_rate: tokens/s, 0 where not
    measured."""

    model_name: str
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    device: DevicePlan
    runner: Runner
    num_blocks: int
    num_parameters: int
    max_model_len: int
    max_num_batched_tokens: int
    adaptive_budget: bool = False
    ranks: TensorParallelRunner | None = None
    prefill_rate: float = 0.0


def load_parts(config: EngineConfig, progress: Progress) -> EngineParts:
    """Fetch and load the model, size and allocate the KV pool, warm up.

    Raises ValueError where the model cannot be served: not found, not understood, or no memory for it.
    """
    devices = DeviceManager(config)
    device = devices.resolve()  # first: what "default" names depends on it

    def check(model_config: ModelConfig) -> int:
        model_config.check_ranks(config.tensor_parallel_size)
        return _max_model_len(config, model_config)

    path = catalog.resolve(config.model, progress, device.device.type, check)
    progress("reading the model's header", 0.0)
    model_config = read_config(path)
    max_model_len = check(model_config)
    tokenizer = load_tokenizer(path)
    if device.attention_backend == "flash_attn" and (why := flash_attn.why_not_head_dim(model_config.head_dim)):
        raise ValueError(f"attention_backend='flash_attn' was asked for, but {why}; use 'triton' or 'auto'")
    on_cpu = device.device.type == "cpu"
    step_tokens = config.max_num_batched_tokens
    if step_tokens is None:
        step_tokens = max(CPU_STEP_TOKENS if on_cpu else CUDA_STEP_TOKENS, config.max_num_seqs)
    limits = {"max_num_seqs": config.max_num_seqs, "max_num_tokens": step_tokens, "max_model_len": max_model_len}
    ranks: TensorParallelRunner | None = None
    if config.tensor_parallel_size > 1:
        runner = ranks = TensorParallelRunner(config, path, model_config, device, limits=limits, progress=progress)
        num_blocks = ranks.num_blocks
        num_parameters = count_parameters(model_config)
    else:
        runner = ModelRunner(
            path, model_config, device, **limits, enforce_eager=config.enforce_eager, progress=progress
        )
        num_blocks = num_blocks_that_fit(config, devices, device, runner)
        runner.allocate_kv_cache(num_blocks)
        runner.warm_up(progress)
        runner.capture_graphs(progress)
        num_parameters = runner.model.num_parameters
    element = torch.empty((), dtype=device.dtype).element_size()
    size = num_blocks * device.block_size * model_config.kv_bytes_per_token(element) / 2**20
    logger.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB; at most %d tokens a sequence",
        num_blocks,
        device.block_size,
        size,
        min(max_model_len, num_blocks * device.block_size),
    )
    return EngineParts(
        model_name=catalog.display_name(config.model, path),
        model_config=model_config,
        tokenizer=tokenizer,
        device=device,
        runner=runner,
        num_blocks=num_blocks,
        num_parameters=num_parameters,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        adaptive_budget=on_cpu and config.max_num_batched_tokens is None,
        ranks=ranks,
        prefill_rate=runner.prefill_rate,
    )


def num_blocks_that_fit(config: EngineConfig, devices: DeviceManager, device: DevicePlan, runner: ModelRunner) -> int:
    """Blocks of the KV pool that the memory holds, the weights being loaded; a number that was set is checked.

    On a card the worst step is run first, for its memory; of several ranks all run it together.
    Raises ValueError with the figures where there is no room.
    """
    block_bytes = runner.kv_bytes_per_block()
    if config.num_kvcache_blocks == -1:
        reserved = runner.graph_bytes
        if device.device.type == "cuda":
            reserved += devices.peak_bytes(partial(run_worst_steps, runner, config.max_num_seqs))
        budget = devices.kv_budget_bytes(device, reserved)
        # More than every sequence at full length serves ended turns only, which are worth some megabytes of books.
        most = max(config.max_num_seqs * runner.max_blocks_per_seq, _MOST_CACHED_BLOCKS)
        num_blocks = min(budget // block_bytes, most)
        if num_blocks < 1:
            raise ValueError(
                f"the KV cache may take {budget} bytes, but one block needs {block_bytes}; "
                "free some memory or set num_kvcache_blocks=1 or more"
            )
        return num_blocks
    needed, free = config.num_kvcache_blocks * block_bytes, devices.free_bytes(device)
    if needed > free:
        raise ValueError(
            f"num_kvcache_blocks={config.num_kvcache_blocks} needs {needed:,} bytes of memory, but {free:,} are free; "
            f"{max(0, free // block_bytes):,} blocks would fit"
        )
    return config.num_kvcache_blocks


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is above the model's own limit of {limit} tokens")
    return config.max_model_len
