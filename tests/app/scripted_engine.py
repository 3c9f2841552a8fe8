"""An engine whose replies, pace and faults a test dictates; and a byte-level tokenizer with a ChatML template.

Both keep to the interfaces of EngineThread and models.tokenizer.Tokenizer (the latter is the real class over a
vocabulary of 256 bytes), so what they prove of jobs and prompts holds for the real ones, which have tests of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.engine_thread import EngineNotReady
from engine.origin import Origin
from engine.outputs import Delta, RequestMetrics, StepOutput
from engine.sampling_params import SamplingParams
from engine.status import EngineStatus, LoadStatus
from engine.stream import StreamState, merge
from models.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's rule in short: thoughts of earlier replies are dropped.
CHATML_WITHOUT_OLD_THOUGHTS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


def byte_tokenizer(template: str = CHATML, fingerprint: str = "bytes") -> Tokenizer:
    """256 byte tokens, then <|im_start|> and <|im_end|> (which ends a turn)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return Tokenizer(
        bpe,
        special={"<|im_start|>": 256, "<|im_end|>": 257},
        bos_token_id=None,
        eos_token_ids=(257,),
        adds_bos=False,
        chat_template=template,
        byte_level=True,
        fingerprint=fingerprint,
    )


@dataclass
class Script:
    """One reply: its text, seconds between tokens, how it ends ("stop" by end of turn, "length", "error"; "hang"
    waits for an abort, "break" makes reading the stream fail), and after how long the first token comes."""

    text: str = "Hello."
    pace: float = 0.0
    end: str = "stop"
    first: float = 0.0


class ScriptedStream:
    """What ScriptedEngine.submit returns; the interface of engine.engine_thread.RequestStream."""

    def __init__(self, engine: ScriptedEngine, request_id: int, prompt_ids: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.aborted = asyncio.Event()
        self._state = StreamState(request_id, prompt_ids, params, engine.tokenizer)
        self._unread: Delta | None = None
        self._arrived, self._ended = asyncio.Event(), False

    def abort(self) -> None:
        self.aborted.set()

    def deliver(self, step: StepOutput) -> None:
        if not self._state.finished:
            self._unread = merge(self._unread, self._state.feed(step))
            self._arrived.set()

    def break_off(self) -> None:
        """Make the next read raise, once what was delivered is read."""
        self._arrived.set()

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self):
        if self._ended:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        if self._unread is None:
            raise RuntimeError("lost the device")
        delta, self._unread = self._unread, None
        self._ended = delta.finish_reason is not None
        return delta


@dataclass
class ScriptedEngine:
    """Replies with `scripts` in turn (the last one again and again) and records what it was asked in `requests`."""

    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    scripts: list[Script] = field(default_factory=lambda: [Script()])
    max_model_len: int = 4096
    ready: bool = True
    small_model: bool = False
    refuse: Exception | None = None
    requests: list[tuple[list[int], SamplingParams, int]] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    running: int = 0
    _tasks: set[asyncio.Task] = field(default_factory=set)
    _ids: itertools.count = field(default_factory=lambda: itertools.count(1))

    def status(self) -> EngineStatus:
        return EngineStatus(
            ready=self.ready,
            model="scripted",
            load=LoadStatus("reading weights", 40.0),
            error=None,
            running=self.running,
            max_model_len=self.max_model_len if self.ready else 0,
            block_size=16,
            kv={"total": 10_000, "free": 10_000, "cached": 0, "active": 0},
            small_model=self.small_model,
        )

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, *, owner: int = 0, turn: int = 0, cache_salt: str = ""
    ) -> ScriptedStream:
        if self.refuse is not None:
            raise self.refuse
        if not self.ready:
            raise EngineNotReady("the model is not ready yet")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append((list(prompt_ids), params, owner))
        self.origins.append(Origin(owner, turn, cache_salt))
        stream = ScriptedStream(self, next(self._ids), prompt_ids, params)
        task = asyncio.get_running_loop().create_task(self._play(script, stream, prompt_ids, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _play(self, script: Script, stream: ScriptedStream, prompt_ids: list[int], params: SamplingParams):
        metrics = RequestMetrics(arrival=time.perf_counter())
        base = {"num_prompt_tokens": len(prompt_ids), "num_computed_tokens": len(prompt_ids), "metrics": metrics}
        ids = self.tokenizer.encode(script.text)[: params.max_tokens]
        cut = len(self.tokenizer.encode(script.text)) > params.max_tokens
        self.running += 1

        async def pause(seconds: float) -> bool:
            """True when aborted."""
            try:
                async with asyncio.timeout(seconds):
                    await stream.aborted.wait()
            except TimeoutError:
                return False
            return True

        try:
            if await pause(script.first):
                return stream.deliver(StepOutput(stream.request_id, [], "abort", **base))
            for token in ids:
                now = time.perf_counter()
                metrics.first_token = metrics.first_token or now
                metrics.last_token = now
                stream.deliver(StepOutput(stream.request_id, [token], **base))
                if await pause(script.pace):
                    return stream.deliver(StepOutput(stream.request_id, [], "abort", **base))
            if script.end == "hang" and not cut:
                await stream.aborted.wait()
                return stream.deliver(StepOutput(stream.request_id, [], "abort", **base))
            if script.end == "break":
                await asyncio.sleep(0.05)
                return stream.break_off()
            end = "length" if cut else script.end
            stream.deliver(
                StepOutput(
                    stream.request_id,
                    [257] if end == "stop" else [],
                    end,
                    error="the engine fell over" if end == "error" else None,
                    **base,
                )
            )
        finally:
            self.running -= 1
