"""EngineStats: counters since the start, and the rates of the last moments."""

from __future__ import annotations

import time
from collections import deque

# Prompt tokens below which a step's time says little of the prefill rate: on a card 64 take as long as hundreds.
_MIN_PREFILL_SAMPLE = {"cpu": 64, "cuda": 2048}
_WINDOW_SECONDS = 3.0
_SMOOTHING = 0.3


def min_prefill_sample(device_type: str, most_tokens: int) -> int:
    """Prompt tokens of the shortest step that tells the rate, where none may have more than most_tokens."""
    return min(_MIN_PREFILL_SAMPLE[device_type], most_tokens)


class EngineStats:
    """Written by the thread that steps the engine; reading single fields from others is safe. prefill_rate: tokens/s
    measured before the first step; 0: not yet. min_sample: see min_prefill_sample()."""

    def __init__(self, prefill_rate: float, min_sample: int) -> None:
        self.num_requests = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prefill_tokens = 0
        self.output_tokens = 0
        self.prefill_rate = prefill_rate
        self._min_sample = min_sample
        self._recent: deque[tuple[float, int]] = deque()

    def record_step(self, prefill_tokens: int, sampled_tokens: int, num_decodes: int, seconds: float) -> None:
        """Take one step into account; prefill_tokens are prompt tokens computed, seconds its duration."""
        self.num_steps += 1
        self.prefill_tokens += prefill_tokens
        self.output_tokens += sampled_tokens
        now = time.perf_counter()
        self._recent.append((now, sampled_tokens))
        while self._recent and self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()
        if prefill_tokens >= self._min_sample and prefill_tokens > 4 * num_decodes and seconds > 0:
            rate = prefill_tokens / seconds
            self.prefill_rate += (rate - self.prefill_rate) * (_SMOOTHING if self.prefill_rate else 1.0)

    def record_admission(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    @property
    def decode_rate(self) -> float:
        """Output tokens per second over the last 3 s; 0.0 when nothing was sampled in them."""
        recent = self._recent.copy()
        since = time.perf_counter() - _WINDOW_SECONDS
        tokens = [(t, n) for t, n in recent if t >= since]
        if not tokens:
            return 0.0
        span = max(time.perf_counter() - tokens[0][0], 0.2)
        return sum(n for _, n in tokens) / span

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came out of the cache, [0, 1]."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
