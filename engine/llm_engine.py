"""LLMEngine: requests in, step outputs out; plan ► launch ► collect.

Where the runner offers it (decodes as CUDA graphs do), step n + 1 is planned and launched before the tokens of step n
are collected, so that the device goes from one to the next without waiting for the host:

    host     plan 2  launch 2  | wait for 1, apply 1, report 1 | plan 3  launch 3 | wait for 2 ...
    device   ........ step 1 ........ | ........ step 2 ........ | ...

A token that is not known yet counts as one (Sequence.num_placeholders), and the device takes its id from where step n
leaves it. What step n turns out to have ended is in step n + 1 for nothing: its token is dropped, and its blocks can go
to others at once, because the device does one thing after the other. Steps that need more than that run one at a time.
"""

from __future__ import annotations

import itertools
import logging
import random
import time

from engine.beam_search import BeamSearch
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.events import EventLog
from engine.explain import Explanation, explain
from engine.faults import root_cause
from engine.loading import EngineParts, Progress, load_parts
from engine.model_runner import StepHandle
from engine.noise import fork_seed
from engine.origin import Origin
from engine.outputs import RequestPriority, StepOutput, TokenLogprobs
from engine.recovery import Flight, StepExecutor
from engine.request_checks import check_request
from engine.sampler import BAD_TOKEN
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.stats import EngineStats
from engine.step_budget import StepBudget
from engine.tensor_parallel import RanksLost

logger = logging.getLogger("pageturn.engine")

# After a step that met a fault so many run one at a time, in which faults can be told apart.
_STEPS_IN_LOCKSTEP = 16


class LLMEngine:
    """One model, one KV pool, many requests. Not thread-safe: one thread owns it (see EngineThread).

    Loads what config names unless the loaded parts are given; progress(stage, percent) is called meanwhile.
    Raises ValueError where the model cannot be served.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, *, parts: EngineParts | None = None
    ) -> None:
        self._progress = progress or (lambda stage, percent: None)
        parts = parts or load_parts(config, self._progress)
        self.config = config
        self.model_name = parts.model_name
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self.device = parts.device
        self.runner = parts.runner
        self.executor = StepExecutor(parts.runner)
        self.ranks = parts.ranks
        self._ranks_just_lost = False
        self.num_parameters = parts.num_parameters
        self.max_model_len = parts.max_model_len
        self.events = EventLog()
        self.blocks = BlockManager(
            parts.num_blocks,
            parts.device.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            events=self.events,
        )
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=parts.max_num_batched_tokens
        )
        self._budget = StepBudget(parts.max_num_batched_tokens) if parts.adaptive_budget else None
        if self._budget is not None:
            self.scheduler.token_budget = self._budget.tokens
        self.stats = EngineStats()
        self._ids = itertools.count(1)
        self._arrivals = itertools.count()
        self._random = random.Random(config.seed)
        self._live: dict[int, Sequence] = {}  # by request, the one that computes the prompt
        self._forks: dict[int, list[Sequence]] = {}  # by request of several, those that have not ended
        self._pending: list[StepOutput] = []
        self._ahead: Flight | None = None  # the next step, launched already
        self._lockstep = 0  # steps still to run one at a time
        self._ended = False

    # -- requests -------------------------------------------------------------------------------------

    def validate(
        self,
        prompt_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        priority: int = RequestPriority.NORMAL,
    ) -> None:
        """Raise ValueError as request_checks.check_request()."""
        limits = self.scheduler.max_num_seqs, self.model_config, self.tokenizer is not None
        check_request(prompt_ids, params, priority, *limits)

    def new_request_id(self) -> int:
        """A request id not used before in this engine; may be called from any thread."""
        return next(self._ids)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; special tokens typed in text are encoded as text. Ids pass unchanged."""
        if isinstance(prompt, (list, tuple)):
            return list(prompt)
        if not isinstance(prompt, str):
            raise ValueError(f"prompt={prompt!r} must be text or a list of token ids")
        if self.tokenizer is None:
            raise ValueError("this model's folder has no tokenizer: give the prompt as a list of token ids")
        return self.tokenizer.encode(prompt, add_bos=True)

    def add_request(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
        request_id: int | None = None,
        arrival: float | None = None,
        validated: bool = False,
    ) -> int:
        """Queue a request and return its id.

        owner and turn are stamped on the blocks it writes, which serve only requests of the same cache_salt (see
        Origin); arrival (time.perf_counter() seconds) starts its TTFT; validated: validate() has passed it (a look at
        every id of a long prompt costs a fifth of a millisecond). Raises ValueError as validate() and Origin do,
        RuntimeError after exit(). A prompt that cannot be served ends in the next step with finish_reason "error" and
        both numbers.
        """
        origin = Origin(owner, turn, cache_salt)
        if self._ended:
            raise RuntimeError("this engine has ended: exit() was called; make a new one")
        params = SamplingParams() if sampling_params is None else sampling_params
        prompt_ids = self.encode(prompt)
        if not validated:
            self.validate(prompt_ids, params, priority)
        beams = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(temperature=0, max_tokens=params.max_tokens, seed=0)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.model_config.eos_token_ids)
        count = beams.beam_width if beams else params.n
        arrival_order, *_ = (next(self._arrivals) for _ in range(count))
        seq = Sequence(
            self.new_request_id() if request_id is None else request_id,
            prompt_ids,
            params,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=min(params.max_tokens, self.max_model_len - len(prompt_ids)),
            stop_ids=frozenset(stop_ids),
            priority=RequestPriority(priority),
            arrival_order=arrival_order,
            owner=owner,
            turn=turn,
            salt=origin.salt,
        )
        seq.metrics.arrival = time.perf_counter() if arrival is None else arrival
        error = self._unservable(len(prompt_ids))
        if error is not None:
            seq.finish_reason, seq.error = "error", error
            for index in range(1 if beams else count):
                output = self._output(seq, [])
                output.index, output.ends_request = index, index == count - 1 or beams is not None
                self._pending.append(output)
            self.events.add("error", owner, seq.request_id, 0, error)
            return seq.request_id
        if count > 1:
            seq.make_forks([fork_seed(seq.seed, index) for index in range(1, count)])
            self._forks[seq.request_id] = [seq, *seq.forks]
        if beams:
            BeamSearch(seq, beams, seq.stop_ids, seq.max_tokens)
        self._live[seq.request_id] = seq
        self.scheduler.add(seq)
        return seq.request_id

    def abort(self, request_id: int, reason: str = "abort", index: int | None = None) -> None:
        """End a request, or of its n continuations the one with `index`, and free the blocks now; what is unknown or
        has ended is a no-op.

        The last outputs, with `reason`, come with the next step.
        """
        lead = self._live.get(request_id)
        if lead is None:
            return
        for seq in self._forks.get(request_id, [lead]).copy():
            if index is None or (seq.index == index and not lead.forks):
                self._finish(seq, reason, None, self._pending)
            if lead.beam:
                return  # its beams have ended with it

    def is_finished(self) -> bool:
        """True when no request is left and no output waits for a step()."""
        return not (self._live or self._pending)

    # -- the cache ------------------------------------------------------------------------------------

    def explain(self, prompt: str | list[int], cache_salt: str = "") -> Explanation:
        """What the prompt would find in the cache if it were admitted now; changes nothing. ValueError as
        add_request()."""
        prompt_ids, params = self.encode(prompt), SamplingParams()
        self.validate(prompt_ids, params)
        salt = Origin(cache_salt=cache_salt).salt
        seq = Sequence(0, prompt_ids, params, seed=0, max_tokens=1, stop_ids=frozenset(), salt=salt)
        return explain(self.blocks, seq)

    def pin(self, owner: int) -> int:
        """Keep a conversation's blocks from eviction, see BlockManager.pin."""
        return self.blocks.pin(Origin(owner).owner)

    def unpin(self, owner: int) -> int:
        """Let them be evicted again, see BlockManager.unpin."""
        return self.blocks.unpin(Origin(owner).owner)

    # -- the step -------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Run one step and return what it did for each request that it touched."""
        outputs, self._pending = self._pending, []
        started = time.perf_counter()
        flight, self._ahead = self._ahead, None
        if flight is not None and all(item.is_stale for item in flight.plan.items):
            self.executor.drop(flight)
            flight = None
        if flight is None and not self.scheduler.has_work():
            return outputs
        plan = flight.plan if flight is not None else self._plan(outputs)
        if not plan.items:
            return outputs
        try:
            if flight is None:
                self._note_first_schedule(plan)
                self._prepare_blocks()
            outcome = self.executor.run(plan, flight, self._launch_ahead)
        except RanksLost as loss:
            self._take_back(plan)
            self._pending = outputs + self._pending
            if self._ranks_just_lost:
                raise  # twice, and no step done in between: the cause lies in what is computed
            self._ranks_just_lost = True
            self._start_over(loss)
            return []
        except BaseException:
            # Ctrl-C lands here: the same tokens are planned again, and what ended meanwhile is still to be told.
            self._take_back(plan)
            self._pending = outputs + self._pending
            raise
        self._lockstep = max(self._lockstep - 1, 0)
        if not outcome.calm:
            self._lockstep = _STEPS_IN_LOCKSTEP
            self._take_back(StepPlan())
        self._ranks_just_lost = False
        self.scheduler.revert(outcome.postponed)
        for seq, cause in outcome.failed:
            if seq.is_finished:  # a beam, whose search has ended with another beam
                continue
            for one in seq.drawn:  # with the continuations that wait for its prompt
                self._finish(one, "error", cause, outputs)
        prefill = decodes = sampled = 0
        for part, token_ids, handle in outcome.done:
            outputs.extend(self._apply(part, token_ids, handle))
            decodes += part.num_decodes
            prefill += part.num_tokens - part.num_decodes
            sampled += len(token_ids)
        seconds = time.perf_counter() - started
        self.stats.record_step(prefill, sampled, decodes, seconds)
        if self._budget is not None and len(outcome.done) == 1:  # a step that broke up says nothing of the rate
            self._budget.record(prefill, decodes, seconds)
            self.scheduler.token_budget = self._budget.tokens
        return outputs

    def watch(self) -> None:
        """To be called now and then while there is nothing to do: ranks that have died are replaced before a request
        waits for them."""
        if self.ranks is not None and (loss := self.ranks.loss()) is not None:
            self._start_over(loss)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the block bookkeeping balances."""
        self.blocks.check_integrity(self.scheduler.running)

    def exit(self) -> None:
        """End every request and let go of the model; the engine cannot be used afterwards."""
        self._ended = True
        self._take_back(StepPlan())
        for request_id in list(self._live):
            self.abort(request_id)
        self.runner.exit()

    # -- internals ------------------------------------------------------------------------------------

    def _unservable(self, num_prompt_tokens: int) -> str | None:
        if num_prompt_tokens >= self.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens; with at least one token of output the limit is "
                f"{self.max_model_len - 1} (max_model_len {self.max_model_len})"
            )
        needed = self.blocks.blocks_for(num_prompt_tokens)
        if needed > self.blocks.num_blocks:
            room = self.blocks.num_blocks * self.blocks.block_size
            return (
                f"the prompt has {num_prompt_tokens} tokens; the KV cache holds {room} "
                f"({self.blocks.num_blocks} blocks of {self.blocks.block_size})"
            )
        return None

    def _start_over(self, loss: RanksLost) -> None:
        """The ranks are gone, and with them what stood in the pool: replace them, and compute every request again."""
        assert self.ranks is not None
        self.scheduler.preempt_all()
        self.blocks.clear_cache(pinned_too=True)
        self.ranks.rebuild(loss, self._progress)

    def _plan(self, outputs: list[StepOutput]) -> StepPlan:
        plan = self.scheduler.plan()
        for seq in plan.finished:
            self._finish(seq, "length", None, outputs)
        return plan

    def _launch_ahead(self) -> None:
        """While a step runs: plan the next one and launch it behind that, where both can be done already."""
        if not self.runner.leads or self._lockstep or not self.executor.is_calm:
            return
        if not (self.scheduler.has_work() and self.scheduler.can_plan_ahead()):
            return
        plan = self._plan(self._pending)
        try:
            if plan.items and self.runner.can_follow(plan):
                self._note_first_schedule(plan)
                self._prepare_blocks()
                self._ahead = self.executor.begin(plan)
        except RanksLost:
            raise
        except Exception as error:
            logger.warning("a step could not be launched ahead, and is planned again: %s", root_cause(error))
            self._lockstep = _STEPS_IN_LOCKSTEP
        finally:
            if self._ahead is None:
                self.scheduler.revert(plan.items)

    def _take_back(self, plan: StepPlan) -> None:
        """Undo a plan that did not run, and the one that was launched ahead."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            self.executor.drop(flight)
            self.scheduler.revert(flight.plan.items)
        self.scheduler.revert(plan.items)

    def _prepare_blocks(self) -> None:
        """What the planning left to be done in the pool before the plan's step writes there."""
        if self.blocks.doubtful_in_use:
            self.runner.scrub(self.blocks.doubtful_in_use)
            self.blocks.doubtful_in_use.clear()
        if self.blocks.pending_copies:
            self.runner.copy_blocks(self.blocks.pending_copies)
            self.blocks.pending_copies.clear()

    def _note_first_schedule(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        for item in plan.items:
            seq = item.seq
            if not seq.metrics.first_scheduled:
                seq.metrics.first_scheduled = now
                self.stats.record_admission(seq.num_prompt_tokens, seq.num_cached_tokens)

    def _apply(self, plan: StepPlan, token_ids: list[int], handle: StepHandle) -> list[StepOutput]:
        """Append what was sampled, index the blocks that were filled, end what is done."""
        outputs: list[StepOutput] = []
        sampled = iter(token_ids)
        now = time.perf_counter()
        for seq, logprobs in handle.prompt_logprobs:
            assert seq.prompt_logprobs is not None
            seq.prompt_logprobs.extend(logprobs)
        for item in plan.items:
            seq = item.seq
            if item.is_stale:  # ended meanwhile, by a stop, an abort or another beam of its search; or preempted
                if item.samples:
                    next(sampled)
                continue
            seq.num_computed_tokens = item.start + item.num_tokens
            if not item.samples:
                self.blocks.index_full_blocks(seq)
                outputs.append(self._output(seq, []))
                continue
            seq.num_placeholders -= 1
            token = next(sampled)
            if token == BAD_TOKEN:
                # What this sequence wrote cannot be trusted, nor what it read: nobody may find it again. Nor what the
                # other beams of its search wrote, which end with it before their own logits are looked at.
                for one in seq.beam.sequences if seq.beam else (seq,):
                    self.blocks.distrust(one)
                for one in seq.drawn:
                    self._finish(one, "error", "the model produced logits that are not finite", outputs)
                for _ in seq.drawn[1:]:  # drawn from the same logits
                    next(sampled)
                continue
            self.blocks.index_full_blocks(seq)
            if seq.beam is not None:
                self._report_beam(seq, handle.logprobs[seq], now, outputs)
                continue
            forks = seq.forks
            if forks:
                self.scheduler.start_forks(seq)
            self._take(seq, token, handle, now, outputs)
            for fork in forks:
                self._take(fork, next(sampled), handle, now, outputs)
        return outputs

    def _take(self, seq: Sequence, token: int, handle: StepHandle, now: float, outputs: list[StepOutput]) -> None:
        new = [token]
        seq.token_ids.append(token)
        if not seq.metrics.first_token:
            seq.metrics.first_token = now
        seq.metrics.last_token = now
        logprobs = None if seq.num_logprobs is None else [handle.logprobs[seq]]
        reason = self._finish_reason(seq, new)
        if reason is not None:
            self._finish(seq, reason, None, outputs, new, logprobs)
            return
        first = seq.num_output_tokens == 1
        outputs.append(self._output(seq, new, list(seq.block_table) if first else None, logprobs))

    def _report_beam(self, seq: Sequence, logprobs: TokenLogprobs, now: float, outputs: list[StepOutput]) -> None:
        assert seq.beam is not None
        metrics = seq.beam.sequences[0].metrics
        metrics.first_token = metrics.first_token or now
        metrics.last_token = now
        if seq.beam.report(seq, logprobs) and not seq.beam.advance(self.scheduler.share):
            self._finish(seq, "length", None, outputs)

    def _finish_reason(self, seq: Sequence, new: list[int]) -> str | None:
        if not new:
            return None
        if new[0] in seq.stop_ids:
            return "stop"
        return "length" if seq.num_output_tokens >= seq.max_tokens else None

    def _finish(
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
            self.scheduler.finish(one, reason, error)
            self._close(one)
        last = self._output(seq.beam.sequences[0] if seq.beam else seq, new or [], table, logprobs, computed)
        if seq.beam:
            last.beams = seq.beam.results()
            if reason == "length" and last.beams:
                last.finish_reason = last.beams[0].finish_reason
        outputs.append(last)

    def _close(self, seq: Sequence) -> None:
        """Forget seq, which has ended, and its request where no other continuation of it is left."""
        self.runner.forget(seq.seq_id)
        self.stats.num_preemptions += seq.metrics.num_preemptions
        others = self._forks.get(seq.request_id)
        if others is not None:
            others.remove(seq)
            if others:
                return
            del self._forks[seq.request_id]
        del self._live[seq.request_id]
        kind = seq.finish_reason if seq.finish_reason in ("abort", "error") else "finish"
        self.events.add(kind, seq.owner, seq.request_id, seq.num_output_tokens, seq.error or "")

    def _output(
        self,
        seq: Sequence,
        new: list[int],
        block_table: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        computed: int | None = None,
    ) -> StepOutput:
        computed = min(seq.num_computed_tokens if computed is None else computed, seq.num_prompt_tokens)
        output = StepOutput(
            request_id=seq.request_id,
            new_token_ids=new,
            finish_reason=seq.finish_reason,
            error=seq.error,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_computed_tokens=seq.num_prompt_tokens if seq.num_output_tokens else computed,
            block_table=block_table,
            metrics=seq.metrics,
            index=seq.index,
            logprobs=logprobs,
        )
        if seq.finish_reason is not None:
            output.ends_request = seq.request_id not in self._live
        if seq.prompt_logprobs is not None and new and seq.num_output_tokens == 1:
            output.prompt_logprobs = seq.prompt_logprobs
        return output
