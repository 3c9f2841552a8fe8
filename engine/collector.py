"""Collector: what the tokens of a step that is done mean for its sequences.

A sequence's tokens and its count of computed ones change here and nowhere else (but for a beam's, see BeamSearch): a
block is indexed once the step that filled it is done, and a sequence ends with the token that ends it.
"""

from __future__ import annotations

import time

from engine.live_requests import LiveRequests
from engine.model_runner import StepHandle
from engine.outputs import StepOutput, TokenLogprobs
from engine.sampler import BAD_TOKEN
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence


class Collector:
    """Of one engine."""

    def __init__(self, scheduler: Scheduler, requests: LiveRequests) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._requests = requests

    def apply(self, plan: StepPlan, token_ids: list[int], handle: StepHandle) -> tuple[list[StepOutput], int]:
        """Append what was sampled (token_ids, in the plan's order), index the blocks that were filled, end what is
        done; returns an output for each sequence that is still there, and how many of the tokens were dropped."""
        outputs: list[StepOutput] = []
        dropped = 0
        sampled = iter(token_ids)
        now = time.perf_counter()
        for seq, logprobs in handle.prompt_logprobs:
            assert seq.prompt_logprobs is not None
            seq.prompt_logprobs.extend(logprobs)
        block_size = self._blocks.block_size
        for item in plan.items:
            seq, end = item.seq, item.start + item.num_tokens
            if item.is_stale:  # ended meanwhile, by a stop, an abort or another beam of its search; or preempted
                if item.samples:
                    next(sampled)
                    dropped += 1
                continue
            seq.num_computed_tokens = end
            if not item.samples:
                self._blocks.index_full_blocks(seq)
                outputs.append(self._requests.output(seq, []))
                continue
            seq.num_placeholders -= 1
            token = next(sampled)
            if token == BAD_TOKEN:
                # What this sequence wrote cannot be trusted, nor what it read: nobody may find it again. Nor what the
                # other beams of its search wrote, which end with it before their own logits are looked at.
                for one in seq.beam.sequences if seq.beam else (seq,):
                    self._blocks.distrust(one)
                for one in seq.drawn:
                    self._requests.finish(one, "error", "the model produced logits that are not finite", outputs)
                for _ in seq.drawn[1:]:  # drawn from the same logits
                    next(sampled)
                dropped += len(seq.drawn)
                continue
            if item.num_tokens > 1 or end % block_size == 0:  # a decode fills a block once in block_size steps
                self._blocks.index_full_blocks(seq)
            if seq.beam is not None:
                self._report_beam(seq, handle.logprobs[seq], now, outputs)
                continue
            forks = seq.forks
            if forks:
                self._scheduler.start_forks(seq)
            self._take(seq, token, handle, now, outputs)
            for fork in forks:
                self._take(fork, next(sampled), handle, now, outputs)
        return outputs, dropped

    def _take(self, seq: Sequence, token: int, handle: StepHandle, now: float, outputs: list[StepOutput]) -> None:
        seq.token_ids.append(token)
        metrics, count = seq.metrics, seq.num_output_tokens
        if not metrics.first_token:
            metrics.first_token = now
        metrics.last_token = now
        logprobs = None if seq.num_logprobs is None else [handle.logprobs[seq]]
        if token in seq.stop_ids:
            self._requests.finish(seq, "stop", None, outputs, [token], logprobs)
        elif count >= seq.max_tokens:
            self._requests.finish(seq, "length", None, outputs, [token], logprobs)
        else:
            table = list(seq.block_table) if count == 1 else None
            outputs.append(self._requests.output(seq, [token], table, logprobs))

    def _report_beam(self, seq: Sequence, logprobs: TokenLogprobs, now: float, outputs: list[StepOutput]) -> None:
        assert seq.beam is not None
        metrics = seq.beam.sequences[0].metrics
        metrics.first_token = metrics.first_token or now
        metrics.last_token = now
        if seq.beam.report(seq, logprobs) and not seq.beam.advance(self._scheduler.share):
            self._requests.finish(seq, "length", None, outputs)
