"""StepBudget: how many prompt tokens a CPU step may compute, so that streams keep flowing and an abort acts at once."""

from __future__ import annotations

import time

# A step with streams waiting behind it lasts about this long; one of nothing but a prompt longer, because few large
# chunks compute a prompt faster than many small ones.
_SHARED_SECONDS = 0.3
_ALONE_SECONDS = 0.5
_MIN_TOKENS = 128
_FIRST_TOKENS = 512
_SAMPLE_TOKENS = 256  # fewer say little of the rate: a step has costs of its own
_SMOOTHING = 0.3
_MEMORY_SECONDS = 5.0


class StepBudget:
    """Learns the prefill rate from the steps that were run. `tokens` is the budget of the next step."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = min(_FIRST_TOKENS, max_tokens)
        self._rate = 0.0
        self._learned_alone = 0.0  # when a step without decodes last told the rate, in time.perf_counter() seconds

    def record(self, prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Take one step into account: its prompt tokens, its decodes, its duration."""
        now = time.perf_counter()
        # Decodes lengthen a step; what it says of the prompt's rate counts only where nothing better is known.
        tells = num_decodes == 0 or now - self._learned_alone > _MEMORY_SECONDS
        if tells and prefill_tokens >= min(_SAMPLE_TOKENS, self.tokens) and seconds > 0:
            rate = prefill_tokens / seconds
            self._rate += (rate - self._rate) * (_SMOOTHING if self._rate else 1.0)
            if num_decodes == 0:
                self._learned_alone = now
        if self._rate:
            wanted = int(self._rate * (_SHARED_SECONDS if num_decodes else _ALONE_SECONDS))
            self.tokens = max(min(_MIN_TOKENS, self.max_tokens), min(wanted, self.max_tokens))
