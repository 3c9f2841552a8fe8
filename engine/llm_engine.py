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
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.beam_search import BeamSearch
from engine.block_manager import BlockManager
from engine.collector import Collector
from engine.config import EngineConfig
from engine.events import EventLog
from engine.explain import Explanation, explain
from engine.faults import is_out_of_memory, root_cause
from engine.live_requests import LiveRequests
from engine.loading import EngineParts, Progress, load_parts
from engine.noise import fork_seed
from engine.origin import Origin
from engine.outputs import RequestPriority, StepOutput
from engine.recovery import Flight, StepExecutor
from engine.request_checks import check_request, why_unservable
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.shown import shown
from engine.stats import EngineStats, min_prefill_sample
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
        longest = min(parts.max_num_batched_tokens, parts.max_model_len)
        self.stats = EngineStats(parts.prefill_rate, min_prefill_sample(self.device.device.type, longest))
        self.requests = LiveRequests(self.scheduler, self.runner, self.stats, self.events)
        self._collector = Collector(self.scheduler, self.requests)
        self._ids = itertools.count(1)
        self._arrivals = itertools.count()
        self._random = random.Random(config.seed)
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
    ) -> np.ndarray:
        """The prompt as int32 [T]; ValueError as request_checks.check_request()."""
        limits = self.scheduler.max_num_seqs, self.model_config, self.tokenizer is not None
        return check_request(prompt_ids, params, priority, *limits)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; special tokens typed in text are encoded as text. Ids pass unchanged."""
        if isinstance(prompt, (list, tuple)):
            return list(prompt)
        if not isinstance(prompt, str):
            raise ValueError(f"prompt={shown(prompt)} must be text or a list of token ids")
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
        validated: np.ndarray | None = None,
    ) -> int:
        """Queue a request and return its id.

        owner and turn are stamped on the blocks it writes, which serve only requests of the same cache_salt (see
        Origin); arrival (time.perf_counter() seconds) starts its TTFT; validated: what validate() gave for it, where it
        was called (a look at every id of a long prompt costs a tenth of a millisecond). Raises ValueError as validate()
        and Origin do, RuntimeError after exit(). A prompt that cannot be served ends in the next step with
        finish_reason "error" and both numbers.
        """
        origin = Origin(owner, turn, cache_salt)
        if self._ended:
            raise RuntimeError("this engine has ended: exit() was called; make a new one")
        params = SamplingParams() if sampling_params is None else sampling_params
        prompt_ids = self.encode(prompt)
        if validated is None:
            validated = self.validate(prompt_ids, params, priority)
        beams = params if isinstance(params, BeamSearchParams) else None
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(temperature=0, max_tokens=params.max_tokens, seed=0)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.model_config.eos_token_ids)
        count = beams.beam_width if beams else params.n
        arrival_order, *_ = (next(self._arrivals) for _ in range(count))
        seq = Sequence(
            next(self._ids) if request_id is None else request_id,
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
            prompt_array=validated,
        )
        seq.metrics.arrival = time.perf_counter() if arrival is None else arrival
        error = why_unservable(len(prompt_ids), self.max_model_len, self.blocks)
        if error is not None:
            self.requests.refuse(seq, error, self._pending)
            return seq.request_id
        if count > 1:
            seq.make_forks([fork_seed(seq.seed, index) for index in range(1, count)])
        if beams:
            BeamSearch(seq, beams, seq.stop_ids, seq.max_tokens)
        self.requests.add(seq)
        return seq.request_id

    def abort(self, request_id: int, reason: str = "abort", index: int | None = None) -> None:
        """End a request, or of its n continuations the one with `index`, and free the blocks now; what is unknown or
        has ended is a no-op.

        The last outputs, with `reason`, come with the next step.
        """
        self.requests.abort(request_id, reason, index, self._pending)

    def is_finished(self) -> bool:
        """True when no request is left and no output waits for a step()."""
        return not (self.requests.live or self._pending)

    # -- the cache ------------------------------------------------------------------------------------

    def explain(self, prompt: str | list[int], cache_salt: str = "") -> Explanation:
        """What the prompt would find in the cache if it were admitted now; changes nothing. ValueError as
        add_request(), and for a prompt that could never be served, with the words that its request would end with."""
        prompt_ids, params = self.encode(prompt), SamplingParams()
        validated = self.validate(prompt_ids, params)
        if (error := why_unservable(len(prompt_ids), self.max_model_len, self.blocks)) is not None:
            raise ValueError(error)
        salt = Origin(cache_salt=cache_salt).salt
        seq = Sequence(
            0, prompt_ids, params, seed=0, max_tokens=1, stop_ids=frozenset(), salt=salt, prompt_array=validated
        )
        return explain(self.blocks, seq)

    def pin(self, owner: int) -> int:
        """Keep a conversation's blocks from eviction, see BlockManager.pin."""
        return self.blocks.pin(Origin(owner).owner)

    def unpin(self, owner: int) -> int:
        """Let them be evicted again, see BlockManager.unpin."""
        return self.blocks.unpin(Origin(owner).owner)

    # -- the step -------------------------------------------------------------------------------------

    @property
    def is_ahead(self) -> bool:
        """The next step has been launched already."""
        return self._ahead is not None

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[StepOutput]:
        """Run one step and return what it did for each request that it touched.

        meanwhile: called, if a step is run, while it and perhaps the next one run: whatever it does, no step waits.
        """
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
            outcome = self.executor.run(plan, flight, partial(self._work_ahead, plan, meanwhile))
        except RanksLost as loss:
            self._take_back(plan)
            self._pending = outputs + self._pending
            if self._ranks_just_lost:
                raise  # twice, and no step done in between: the cause lies in what is computed
            self._ranks_just_lost = True
            try:
                self._start_over(loss)
            except BaseException:
                self._ranks_just_lost = False  # the next step starts them
                raise
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
                self.requests.finish(one, "error", cause, outputs)
        prefill = decodes = sampled = 0
        for part, token_ids, handle in outcome.done:
            told, dropped = self._collector.apply(part, token_ids, handle)
            outputs.extend(told)
            decodes += part.num_decodes
            prefill += part.num_tokens - part.num_decodes
            sampled += len(token_ids) - dropped
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
        for request_id in list(self.requests.live):
            self.abort(request_id)
        self.runner.exit()

    # -- internals ------------------------------------------------------------------------------------

    def _start_over(self, loss: RanksLost) -> None:
        """The ranks are gone, and with them what stood in the pool: replace them, and compute every request again."""
        assert self.ranks is not None
        self.scheduler.preempt_all()
        self.blocks.clear_cache(pinned_too=True)
        self.ranks.rebuild(loss, self._progress)

    def _plan(self, outputs: list[StepOutput]) -> StepPlan:
        plan = self.scheduler.plan()
        for seq in plan.finished:
            self.requests.finish(seq, "length", None, outputs)
        return plan

    def _work_ahead(self, plan: StepPlan, meanwhile: Callable[[], None] | None) -> None:
        """While the plan's step runs: what need not wait for its tokens."""
        try:
            self._launch_ahead()
        finally:
            if meanwhile is not None:
                meanwhile()
        for item in plan.items[plan.num_decodes :]:
            if not item.is_stale:
                self.blocks.note_contents(item.seq, min(item.start + item.num_tokens, len(item.seq.token_ids)))

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
        try:
            self._scrub_and_copy()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.runner.release_buffers()
            self._scrub_and_copy()

    def _scrub_and_copy(self) -> None:
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
