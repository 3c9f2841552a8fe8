"""LLM: the engine from synchronous Python. AsyncLLM: the same from asyncio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from engine.async_engine import AsyncLLMEngine
from engine.config import EngineConfig
from engine.heap import rare_collections
from engine.llm_engine import LLMEngine
from engine.many_outputs import BeamState, ForkedState, feed, open_state
from engine.origin import Origin
from engine.outputs import Delta, RequestOutput, RequestPriority
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.shown import shown
from engine.stream import StreamState

Prompt = str | list[int]
Params = SamplingParams | BeamSearchParams


class LLM:
    """`LLM(model, **EngineConfig fields)`: load a model and generate with it in the calling thread.

    Raises ValueError where the model cannot be served or an argument is wrong.
    """

    def __init__(self, model: str | Path = "default", **kwargs: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_kwargs(str(model), **kwargs))
        self._streams: dict[int, Any] = {}  # what open_state returns
        self._kept: list[RequestOutput] = []

    @property
    def tokenizer(self) -> Any:
        """models.tokenizer.Tokenizer, or None for a folder without one."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        use_tqdm: bool = True,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Generate for one prompt or many (text or token ids); results stand in input order. A result's `outputs` are
        its n continuations, or its beams, best first.

        owner (1 or more: a conversation) and turn are stamped on the blocks that the requests write, for pin() and the
        block snapshot; cached blocks serve only prompts of the same cache_salt (at most 256 characters).
        A request that cannot be served has finish_reason "error" and its cause; ValueError is raised only for
        bad arguments, and then nothing has been queued.
        """
        many = _as_prompts(prompts)
        params: list[Any]  # validate() names what is not a SamplingParams
        if isinstance(sampling_params, (list, tuple)):
            params = list(sampling_params)
        else:
            params = [SamplingParams() if sampling_params is None else sampling_params] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(params)} sampling_params for {len(many)} prompts; give one, or one per prompt")
        encoded = [self.engine.encode(p) for p in many]
        requests = [
            (ids, self.engine.validate(ids, one, priority), one) for ids, one in zip(encoded, params, strict=True)
        ]
        origin = Origin(owner, turn, cache_salt)
        order = [self._add(*request, priority, origin) for request in requests]
        wanted = set(order)
        done: dict[int, RequestOutput] = {}
        with _Progress(len(wanted), self.engine, enabled=use_tqdm) as progress, rare_collections():
            try:
                while len(done) < len(wanted):
                    for stream in self._advance():
                        if stream.request_id not in wanted:
                            self._kept.append(stream.output())
                        elif stream.finished:
                            done[stream.request_id] = stream.output()
                            progress.finished()
                    progress.refresh()
            except BaseException:
                for request_id in wanted:
                    self.abort(request_id)
                    self._streams.pop(request_id, None)  # nobody waits for what it has to say
                raise
        return [done[request_id] for request_id in order]

    def generate_single(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """generate() for one prompt, without a progress bar."""
        origin = {"owner": owner, "turn": turn, "cache_salt": cache_salt}
        return self.generate([prompt], sampling_params, priority, use_tqdm=False, **origin)[0]

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Answer a conversation of {"role", "content"} messages through the model's chat template."""
        prompt = _encode_chat(self.tokenizer, messages)
        origin = {"owner": owner, "turn": turn, "cache_salt": cache_salt}
        return self.generate_single(prompt, sampling_params, priority, **origin)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Queue one request for step(); returns its id."""
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = self.engine.encode(prompt)
        validated = self.engine.validate(ids, params, priority)
        return self._add(ids, validated, params, priority, Origin(owner, turn, cache_salt))

    def _add(
        self, ids: list[int], validated: np.ndarray, params: Params, priority: RequestPriority, origin: Origin
    ) -> int:
        """Queue what validate() has passed."""
        where = {"owner": origin.owner, "turn": origin.turn, "cache_salt": origin.cache_salt}
        request_id = self.engine.add_request(ids, params, priority, validated=validated, **where)
        self._streams[request_id] = open_state(request_id, ids, params, self.tokenizer)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request; its output so far comes with the next step(). Unknown ids are a no-op."""
        self.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns every request that advanced, as it stands (finish_reason None: not done)."""
        kept, self._kept = self._kept, []
        return kept + [stream.output() for stream in self._advance()]

    def is_finished(self) -> bool:
        """True when no request is left and no result waits for a step()."""
        return not (self._streams or self._kept)

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens, requests), rates (tokens a second) and the pool's blocks."""
        s, blocks = self.engine.stats, self.engine.blocks
        return {
            "requests": s.num_requests,
            "running": len(self.engine.scheduler.running),
            "waiting": len(self.engine.scheduler.waiting),
            "steps": s.num_steps,
            "preemptions": s.num_preemptions,
            "prompt_tokens": s.prompt_tokens,
            "cached_tokens": s.cached_tokens,
            "prefill_tokens": s.prefill_tokens,
            "output_tokens": s.output_tokens,
            "hit_rate": s.hit_rate,
            "prefill_tokens_per_second": s.prefill_rate,
            "decode_tokens_per_second": s.decode_rate,
            "kv": {
                "total": blocks.num_blocks,
                "free": blocks.num_free,
                "cached": blocks.num_cached,
                "active": blocks.num_active,
            },
        }

    def exit(self) -> None:
        """Let go of the model and its memory; a second call is a no-op."""
        self.engine.exit()

    def _advance(self) -> list[StreamState | ForkedState | BeamState]:
        """Run one step; returns the requests that advanced."""
        advanced = {}
        for step in self.engine.step():
            stream = self._streams.get(step.request_id)
            if stream is None:
                # The engine's last word on a request that a stop string has ended.
                continue
            if feed(stream, step, self.engine.abort) is None:  # likewise on one of its continuations
                continue
            if stream.finished:
                del self._streams[step.request_id]
            advanced[step.request_id] = stream
        return list(advanced.values())


class AsyncLLM:
    """The engine from asyncio: `async with AsyncLLM(model) as llm`. The model runs in a thread of its own."""

    def __init__(self, model: str | Path = "default", **kwargs: Any) -> None:
        self.engine = AsyncLLMEngine(EngineConfig.from_kwargs(str(model), **kwargs))

    async def __aenter__(self) -> AsyncLLM:
        await self.engine.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.stop()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Run one request to its end. Cancelling the awaiting task aborts it."""
        origin = {"owner": owner, "turn": turn, "cache_salt": cache_salt}
        stream = self.engine.generate_async(prompt, sampling_params, priority, **origin)
        try:
            async for _ in stream:
                pass
        finally:
            stream.abort()
        return stream.output()

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Answer a conversation of {"role", "content"} messages through the model's chat template."""
        self.engine.thread.check_ready()
        prompt = _encode_chat(self.tokenizer, messages)
        origin = {"owner": owner, "turn": turn, "cache_salt": cache_salt}
        return await self.generate(prompt, sampling_params, priority, **origin)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Yield the reply as it comes; deltas merge where the reader is slow. Leaving the loop aborts it."""
        origin = {"owner": owner, "turn": turn, "cache_salt": cache_salt}
        stream = self.engine.generate_async(prompt, sampling_params, priority, **origin)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)


class _Progress:
    """A bar of finished requests with the prefill and decode rates since the call began."""

    def __init__(self, total: int, engine: LLMEngine, *, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="req", dynamic_ncols=True) if enabled else None
        self._stats = engine.stats
        self._prefill0, self._output0 = engine.stats.prefill_tokens, engine.stats.output_tokens
        self._started = self._shown = time.perf_counter()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.refresh(force=True)
        if self._bar is not None:
            self._bar.close()

    def finished(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def refresh(self, force: bool = False) -> None:
        now = time.perf_counter()
        if self._bar is None or (now - self._shown < 0.25 and not force):
            return
        self._shown = now
        seconds = max(now - self._started, 1e-9)
        self._bar.set_postfix(
            {
                "prefill": f"{(self._stats.prefill_tokens - self._prefill0) / seconds:,.0f} tok/s",
                "decode": f"{(self._stats.output_tokens - self._output0) / seconds:,.0f} tok/s",
            }
        )


def _encode_chat(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer with a chat template, and this model's folder has none")
    if isinstance(messages, (str, dict)) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'messages={shown(messages)} must be a list like [{{"role": "user", "content": "Hi"}}]')
    return tokenizer.encode_chat(messages)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"prompts={shown(prompts)} must be text, token ids, or a list of at least one of these")
    if all(isinstance(p, int) for p in prompts):
        return [list(prompts)]  # type: ignore[list-item,arg-type]
    for p in prompts:
        if not isinstance(p, (str, list, tuple)):
            raise ValueError(f"prompts holds {shown(p)}; each must be text or a list of token ids")
    return list(prompts)  # type: ignore[arg-type]
