"""LiveRequests: the requests that have not ended, how one ends, and what is told of it.

Invariant: a request is live from add() until the last of its continuations has ended. Each ends once, with its beams
where it is one: its blocks come back, the runner forgets it, and its last output is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.events import EventLog
from engine.outputs import StepOutput, TokenLogprobs
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats

if TYPE_CHECKING:
    from engine.loading import Runner


class LiveRequests:
    """Of one engine. live: by request, the sequence that computes the prompt. forks: by request of several
    continuations, those that have not ended."""

    def __init__(self, scheduler: Scheduler, runner: Runner, stats: EngineStats, events: EventLog) -> None:
        self.live: dict[int, Sequence] = {}
        self.forks: dict[int, list[Sequence]] = {}
        self._written: dict[int, int] = {}  # by such a request, output tokens of its continuations that have ended
        self._scheduler = scheduler
        self.runner = runner
        self._stats = stats
        self._events = events

    def add(self, seq: Sequence) -> None:
        """Queue a request."""
        if seq.forks:
            self.forks[seq.request_id] = [seq, *seq.forks]
        self.live[seq.request_id] = seq
        self._scheduler.add(seq)

    def refuse(self, seq: Sequence, error: str, outputs: list[StepOutput]) -> None:
        """End a request that was never queued."""
        seq.finish_reason, seq.error = "error", error
        for index in range(seq.params.n):
            output = self.output(seq, [])
            output.index, output.ends_request = index, index == seq.params.n - 1
            outputs.append(output)
        self._events.add("error", seq.owner, seq.request_id, 0, error)

    def abort(self, request_id: int, reason: str, index: int | None, outputs: list[StepOutput]) -> None:
        """End a request, or of its n continuations the one with `index`; what is unknown or has ended is a no-op."""
        lead = self.live.get(request_id)
        if lead is None:
            return
        for seq in self.forks.get(request_id, [lead]).copy():
            if index is None or (seq.index == index and not lead.forks):
                self.finish(seq, reason, None, outputs)
            if lead.beam:
                return  # its beams have ended with it

    def finish(
        self,
        seq: Sequence,
        reason: str,
        error: str | None,
        outputs: list[StepOutput],
        new: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """End seq, with all beams of its search where it is one of them; outputs gets its last word."""
        table, computed = list(seq.block_table), seq.num_computed_tokens  # both end with it
        for one in seq.beam.sequences if seq.beam else (seq,):
            self._scheduler.finish(one, reason, error)
            self._close(one)
        last = self.output(seq.beam.sequences[0] if seq.beam else seq, new or [], table, logprobs, computed)
        if seq.beam:
            last.beams = seq.beam.results()
            if reason == "length" and last.beams:
                last.finish_reason = last.beams[0].finish_reason
        outputs.append(last)

    def output(
        self,
        seq: Sequence,
        new: list[int],
        block_table: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        computed: int | None = None,
    ) -> StepOutput:
        """What a step that sampled `new` has done for seq. computed: its num_computed_tokens, where they are lost."""
        num_prompt_tokens = seq.num_prompt_tokens
        num_output_tokens = len(seq.token_ids) - num_prompt_tokens
        if num_output_tokens:
            computed = num_prompt_tokens
        else:
            computed = min(seq.num_computed_tokens if computed is None else computed, num_prompt_tokens)
        # By position, which takes half the time: every step makes one for each sequence.
        output = StepOutput(
            seq.request_id,
            new,
            seq.finish_reason,
            seq.error,
            num_prompt_tokens,
            seq.num_cached_tokens,
            computed,
            block_table,
            seq.metrics,
            seq.index,
            True,
            logprobs,
        )
        if seq.finish_reason is not None:
            output.ends_request = seq.request_id not in self.live
        if seq.prompt_logprobs is not None and new and num_output_tokens == 1:
            output.prompt_logprobs = seq.prompt_logprobs
        return output

    def _close(self, seq: Sequence) -> None:
        """Forget seq, which has ended, and its request where no other continuation of it is left."""
        self.runner.forget(seq.seq_id)
        self._stats.num_preemptions += seq.metrics.num_preemptions
        others = self.forks.get(seq.request_id)
        if others is not None:
            others.remove(seq)
            if others:
                if not seq.beam:
                    self._written[seq.request_id] = self._written.get(seq.request_id, 0) + seq.num_output_tokens
                return
            del self.forks[seq.request_id]
        del self.live[seq.request_id]
        kind = seq.finish_reason if seq.finish_reason in ("abort", "error") else "finish"
        written = self._written.pop(seq.request_id, 0) + seq.num_output_tokens
        self._events.add(kind, seq.owner, seq.request_id, written, seq.error or "")
