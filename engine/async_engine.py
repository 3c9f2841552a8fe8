"""AsyncLLMEngine: EngineThread's asyncio face, for programs that embed the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.config import EngineConfig
from engine.engine_thread import EngineStatus, EngineThread
from engine.outputs import RequestPriority
from engine.request_stream import RequestStream
from engine.sampling_params import BeamSearchParams, SamplingParams


class AsyncLLMEngine:
    """Loads and runs one model in a thread of its own; any number of streams from any event loops."""

    def __init__(self, config: EngineConfig) -> None:
        self.thread = EngineThread(config)

    async def start(self) -> None:
        """Load the model; raises what kept it from loading (ValueError for a bad model or setting)."""
        self.thread.start()
        await asyncio.to_thread(self.thread.wait_until_settled)
        if self.thread.cause is not None:
            raise self.thread.cause

    async def stop(self) -> None:
        await asyncio.to_thread(self.thread.shutdown)

    @property
    def tokenizer(self) -> Any:
        return self.thread.tokenizer

    def status(self) -> EngineStatus:
        return self.thread.status()

    def generate_async(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
        want_text: bool = True,
    ) -> RequestStream:
        """Queue a prompt (text or token ids) and return its stream of deltas; see EngineThread.submit."""
        return self.thread.submit(
            self.thread.encode(prompt),
            SamplingParams() if sampling_params is None else sampling_params,
            priority=priority,
            owner=owner,
            turn=turn,
            cache_salt=cache_salt,
            want_text=want_text,
        )

    def abort(self, request_id: int) -> None:
        self.thread.abort(request_id)
