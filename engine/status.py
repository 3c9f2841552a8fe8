"""EngineStatus: what others may know of a running engine at any moment, cheaply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine

SMALL_MODEL_PARAMETERS = 500_000_000


@dataclass(frozen=True, slots=True)
class LoadStatus:
    stage: str = "waiting to start"
    percent: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What /healthz and the page show. Counts are requests; rates tokens a second; kv counts blocks."""

    ready: bool
    model: str
    load: LoadStatus
    error: str | None
    running: int = 0
    waiting: int = 0
    kv: dict[str, int] = field(default_factory=lambda: {"total": 0, "free": 0, "cached": 0, "active": 0})
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 0
    small_model: bool = False
    device: str = ""
    dtype: str = ""
    attention_backend: str = ""

    @classmethod
    def of(cls, engine: LLMEngine, load: LoadStatus) -> EngineStatus:
        """The status of a loaded engine; single fields are read, so that any thread may ask at any time."""
        blocks, stats, scheduler = engine.blocks, engine.stats, engine.scheduler
        cached, free = blocks.num_cached, blocks.num_free
        running = {seq.request_id for seq in scheduler.running.copy()}  # of several continuations one request
        return cls(
            ready=True,
            model=engine.model_name,
            load=load,
            error=None,
            running=len(running),
            waiting=len({seq.request_id for seq in list(scheduler.waiting)} - running),
            kv={
                "total": blocks.num_blocks,
                "free": free,
                "cached": cached,
                "active": blocks.num_blocks - free - cached,
            },
            prefill_rate=stats.prefill_rate,
            decode_rate=stats.decode_rate,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            max_model_len=engine.max_model_len,
            block_size=blocks.block_size,
            small_model=engine.num_parameters < SMALL_MODEL_PARAMETERS,
            device=str(engine.device.device),
            dtype=str(engine.device.dtype).removeprefix("torch."),
            attention_backend=engine.device.attention_backend,
        )
