"""From a configuration to the parts of an engine: the model's file, device, weights and KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.device import DeviceManager, DevicePlan
from engine.model_runner import ModelRunner, StepHandle
from engine.scheduler import StepPlan
from models import catalog
from models.config import ModelConfig
from models.loader import load_tokenizer, read_config

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

logger = logging.getLogger("pageturn.engine")

CPU_STEP_TOKENS = 1024
CUDA_STEP_TOKENS = 8192

Progress = Callable[[str, float], None]


class Runner(Protocol):
    """What LLMEngine asks of a ModelRunner."""

    def launch(self, plan: StepPlan) -> StepHandle: ...
    def collect(self, handle: StepHandle) -> list[int]: ...
    def copy_blocks(self, copies: dict[int, int]) -> None: ...
    def forget(self, seq_id: int) -> None: ...
    def exit(self) -> None: ...


@dataclass(slots=True)
class EngineParts:
    """A loaded model, ready to step. adaptive_budget: the engine may lower the tokens of a step to keep it short."""

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


def load_parts(config: EngineConfig, progress: Progress) -> EngineParts:
    """Fetch and load the model, size and allocate the KV pool, warm up.

    Raises ValueError where the model cannot be served: not found, not understood, or no memory for it.
    """
    path = catalog.resolve(config.model, progress)
    progress("reading the model's header", 0.0)
    model_config = read_config(path)
    max_model_len = _max_model_len(config, model_config)
    tokenizer = load_tokenizer(path)
    devices = DeviceManager(config)
    device = devices.resolve()
    on_cpu = device.device.type == "cpu"
    step_tokens = config.max_num_batched_tokens
    if step_tokens is None:
        step_tokens = max(CPU_STEP_TOKENS if on_cpu else CUDA_STEP_TOKENS, config.max_num_seqs)
    runner = ModelRunner(
        path,
        model_config,
        device,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=step_tokens,
        max_model_len=max_model_len,
        progress=progress,
    )
    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        budget = devices.kv_budget_bytes(device)
        # More than every sequence at full length can never be used.
        most = config.max_num_seqs * -(-max_model_len // device.block_size)
        num_blocks = min(budget // runner.kv_bytes_per_block(), most)
        if num_blocks < 1:
            raise ValueError(
                f"the KV cache may take {budget} bytes, but one block needs {runner.kv_bytes_per_block()}; "
                "free some memory or set num_kvcache_blocks=1 or more"
            )
    elif (needed := num_blocks * runner.kv_bytes_per_block()) > (free := devices.free_bytes(device)):
        raise ValueError(
            f"num_kvcache_blocks={num_blocks} needs {needed:,} bytes of memory, but {free:,} are free; "
            f"{max(0, free // runner.kv_bytes_per_block()):,} blocks would fit"
        )
    runner.allocate_kv_cache(num_blocks)
    runner.warm_up(progress)
    size = num_blocks * runner.kv_bytes_per_block() / 2**20
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
        num_parameters=runner.model.num_parameters,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        adaptive_budget=on_cpu and config.max_num_batched_tokens is None,
    )


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is above the model's own limit of {limit} tokens")
    return config.max_model_len
