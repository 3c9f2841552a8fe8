"""LLMEngine: requests in, step outputs out; plan ► launch ► collect."""

from __future__ import annotations

import itertools
import random
import time

from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.events import EventLog
from engine.explain import Explanation, explain
from engine.loading import EngineParts, Progress, load_parts
from engine.origin import Origin
from engine.outputs import RequestPriority, StepOutput
from engine.recovery import StepExecutor
from engine.sampler import BAD_TOKEN
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.stats import EngineStats
from engine.step_budget import StepBudget
from engine.tensor_parallel import RanksLost


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
        self._live: dict[int, Sequence] = {}
        self._pending: list[StepOutput] = []

    # -- requests -------------------------------------------------------------------------------------

    def validate(
        self, prompt_ids: list[int], params: SamplingParams, priority: int = RequestPriority.NORMAL
    ) -> None:
        """Raise ValueError for an empty prompt, an id outside the vocabulary, text stops without a tokenizer, or
        a priority that is none."""
        if priority not in tuple(RequestPriority):
            names = ", ".join(f"{p.value} ({p.name})" for p in RequestPriority)
            raise ValueError(f"priority={priority!r} must be one of {names}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r} must be a SamplingParams; beam search is not available yet")
        if not prompt_ids:
            raise ValueError("prompt has 0 tokens; at least 1 is needed")
        size = self.model_config.vocab_size
        if not all(isinstance(i, int) for i in prompt_ids):
            wrong = next(i for i in prompt_ids if not isinstance(i, int))
            raise ValueError(f"prompt holds {wrong!r}; token ids must be integers from 0 to {size - 1}")
        if min(prompt_ids) < 0 or max(prompt_ids) >= size:
            wrong = next(i for i in prompt_ids if not 0 <= i < size)
            raise ValueError(f"prompt holds token id {wrong}; ids of this model go from 0 to {size - 1}")
        for token in params.stop_token_ids:
            if token >= size:
                raise ValueError(f"stop_token_ids holds {token}; ids of this model go from 0 to {size - 1}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model's folder has none; use stop_token_ids")

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
        sampling_params: SamplingParams | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        owner: int = 0,
        turn: int = 0,
        cache_salt: str = "",
        request_id: int | None = None,
        arrival: float | None = None,
    ) -> int:
        """Queue a request and return its id.

        owner and turn are stamped on the blocks it writes, which serve only requests of the same cache_salt (see
        Origin); arrival (time.perf_counter() seconds) starts its TTFT. Raises ValueError as validate() and Origin
        do. A prompt that cannot be served ends in the next step with finish_reason "error" and both numbers.
        """
        origin = Origin(owner, turn, cache_salt)
        params = sampling_params or SamplingParams()
        prompt_ids = self.encode(prompt)
        self.validate(prompt_ids, params, priority)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.model_config.eos_token_ids)
        seq = Sequence(
            self.new_request_id() if request_id is None else request_id,
            prompt_ids,
            params,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=min(params.max_tokens, self.max_model_len - len(prompt_ids)),
            stop_ids=frozenset(stop_ids),
            priority=RequestPriority(priority),
            arrival_order=next(self._arrivals),
            owner=owner,
            turn=turn,
            salt=origin.salt,
        )
        seq.metrics.arrival = time.perf_counter() if arrival is None else arrival
        error = self._unservable(len(prompt_ids))
        if error is not None:
            seq.finish_reason, seq.error = "error", error
            self._pending.append(self._output(seq, []))
            self.events.add("error", owner, seq.request_id, 0, error)
            return seq.request_id
        self._live[seq.request_id] = seq
        self.scheduler.add(seq)
        return seq.request_id

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """End a request and free its blocks now; unknown or finished ids are a no-op.

        Its last output, with `reason`, comes with the next step.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return
        self._finish(seq, reason, None, self._pending)

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
        return self.blocks.unpin(owner)

    # -- the step -------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Run one step and return what it did for each request that it touched."""
        outputs, self._pending = self._pending, []
        if not self.scheduler.has_work():
            return outputs
        started = time.perf_counter()
        plan = self.scheduler.plan()
        for seq in plan.finished:
            self._close(seq)
            outputs.append(self._output(seq, []))
        if not plan.items:
            return outputs
        self._note_first_schedule(plan, started)
        if self.blocks.doubtful_in_use:
            self.runner.scrub(self.blocks.doubtful_in_use)
            self.blocks.doubtful_in_use.clear()
        try:
            outcome = self.executor.run(plan)
        except RanksLost as loss:
            self.scheduler.revert(plan.items)
            self._pending = outputs + self._pending
            if self._ranks_just_lost:
                raise  # twice, and no step done in between: the cause lies in what is computed
            self._ranks_just_lost = True
            self._start_over(loss)
            return []
        except BaseException:
            # Ctrl-C lands here: the same tokens are planned again, and what ended meanwhile is still to be told.
            self.scheduler.revert(plan.items)
            self._pending = outputs + self._pending
            raise
        self._ranks_just_lost = False
        self.scheduler.revert(outcome.postponed)
        for seq, cause in outcome.failed:
            self._finish(seq, "error", cause, outputs)
        prefill = decodes = sampled = 0
        for part, token_ids, _ in outcome.done:
            outputs.extend(self._apply(part, token_ids))
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

    def _note_first_schedule(self, plan: StepPlan, now: float) -> None:
        for item in plan.items:
            seq = item.seq
            if not seq.metrics.first_scheduled:
                seq.metrics.first_scheduled = now
                self.stats.record_admission(seq.num_prompt_tokens, seq.num_cached_tokens)

    def _apply(self, plan: StepPlan, token_ids: list[int]) -> list[StepOutput]:
        """Append what was sampled, index the blocks that were filled, end what is done."""
        outputs: list[StepOutput] = []
        sampled = iter(token_ids)
        now = time.perf_counter()
        for item in plan.items:
            seq = item.seq
            seq.num_computed_tokens = seq.num_planned_tokens
            new: list[int] = []
            if item.samples:
                token = next(sampled)
                seq.num_placeholders -= 1
                if token == BAD_TOKEN:
                    # What this sequence wrote cannot be trusted, nor what it read: nobody may find it again.
                    self.blocks.distrust(seq)
                    self._finish(seq, "error", "the model produced logits that are not finite", outputs)
                    continue
                new = [token]
                seq.token_ids.append(token)
                if not seq.metrics.first_token:
                    seq.metrics.first_token = now
                seq.metrics.last_token = now
            self.blocks.index_full_blocks(seq)
            reason = self._finish_reason(seq, new)
            if reason is not None:
                self._finish(seq, reason, None, outputs, new)
                continue
            first = bool(new) and seq.num_output_tokens == 1
            outputs.append(self._output(seq, new, list(seq.block_table) if first else None))
        return outputs

    def _finish_reason(self, seq: Sequence, new: list[int]) -> str | None:
        if not new:
            return None
        if new[0] in seq.stop_ids:
            return "stop"
        return "length" if seq.num_output_tokens >= seq.max_tokens else None

    def _finish(
        self, seq: Sequence, reason: str, error: str | None, outputs: list[StepOutput], new: list[int] | None = None
    ) -> None:
        table, computed = list(seq.block_table), seq.num_computed_tokens  # both end with it
        self.scheduler.finish(seq, reason, error)
        self._close(seq)
        outputs.append(self._output(seq, new or [], table, computed))

    def _close(self, seq: Sequence) -> None:
        del self._live[seq.request_id]
        self.runner.forget(seq.request_id)
        self.stats.num_preemptions += seq.metrics.num_preemptions
        kind = seq.finish_reason if seq.finish_reason in ("abort", "error") else "finish"
        self.events.add(kind, seq.owner, seq.request_id, seq.num_output_tokens, seq.error or "")

    def _output(
        self, seq: Sequence, new: list[int], block_table: list[int] | None = None, computed: int | None = None
    ) -> StepOutput:
        computed = min(seq.num_computed_tokens if computed is None else computed, seq.num_prompt_tokens)
        return StepOutput(
            request_id=seq.request_id,
            new_token_ids=new,
            finish_reason=seq.finish_reason,
            error=seq.error,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_computed_tokens=seq.num_prompt_tokens if seq.num_output_tokens else computed,
            block_table=block_table,
            metrics=seq.metrics,
        )
