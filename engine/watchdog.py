"""Watchdog: notices a step that goes on far beyond what its work can take.

A thread that is stuck in native code cannot be interrupted, so all that can be done is to tell everybody who waits
for it. (Native code that also holds the interpreter's lock stops this thread too, and with it the whole process.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.faults import StepStuck

if TYPE_CHECKING:
    from engine.recovery import StepExecutor

# A busy or swapping machine makes a step many times slower; being wrong costs everybody's replies, being late little.
PATIENCE_SECONDS = 120.0
MARGIN = 20
TICK_SECONDS = 1.0


class Watchdog:
    """Watches one executor's launches from a thread of its own, which sleeps while the engine is idle.

    on_stuck is called once, on that thread. seconds_per_token: what a token may take before any step was measured.
    """

    def __init__(
        self, executor: StepExecutor, on_stuck: Callable[[StepStuck], None], *, seconds_per_token: float
    ) -> None:
        self._executor = executor
        self._on_stuck = on_stuck
        self._seconds_per_token = seconds_per_token
        self._working = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watchdog", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """The engine has nothing to do."""
        self._working.clear()

    def wake(self) -> None:
        """The engine is about to work."""
        self._working.set()

    def end(self) -> None:
        """Stop watching. Called by the engine's thread."""
        self._ended.set()
        self._working.set()

    def deadline(self, num_tokens: int) -> float:
        """Seconds that a launch of so many tokens may take: by far more than the longest so far, as that scales."""
        seconds, tokens = self._executor.longest
        if not seconds:
            return PATIENCE_SECONDS + self._seconds_per_token * num_tokens
        return PATIENCE_SECONDS + MARGIN * seconds * max(1.0, num_tokens / tokens)

    def _run(self) -> None:
        launch, waited = -1, 0.0
        while True:
            self._working.wait()
            if self._ended.wait(TICK_SECONDS):
                return
            executor = self._executor
            tokens = executor.tokens_in_flight
            if not tokens or executor.launches != launch:
                launch, waited = executor.launches, 0.0
                continue
            # Ticks, not the clock: while the whole process is suspended neither thread gets on.
            waited += TICK_SECONDS
            limit = self.deadline(tokens)
            if waited > limit:
                self._on_stuck(
                    StepStuck(f"a step of {tokens} tokens did not end within its deadline of {limit:.0f} seconds")
                )
                return
