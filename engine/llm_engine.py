"""LLMEngine: requests in, step outputs out; plan ► launch ► collect."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable

from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.device import DeviceManager
from engine.events import EventLog
from engine.model_runner import ModelRunner
from engine.outputs import RequestPriority, StepOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.stats import EngineStats
from models import catalog
from models.loader import load_tokenizer, read_config

logger = logging.getLogger("pageturn.engine")

# On a CPU a step should last no longer than this, so that streams keep flowing and an abort acts at once.
_TARGET_STEP_SECONDS = 0.3
_MIN_CHUNK = 64


class LLMEngine:
    """One model, one KV pool, many requests. Not thread-safe: one thread owns it (see EngineThread).

    Raises ValueError (of the catalog, the loader or the configuration) where the model cannot be served.
    progress(stage, percent) is called while loading.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> None:
        report = progress or (lambda stage, percent: None)
        self.config = config
        self.path = catalog.resolve(config.model, report)
        report("reading the model's header", 0.0)
        self.model_config = read_config(self.path)
        self.tokenizer = load_tokenizer(self.path)
        devices = DeviceManager(config)
        self.device = devices.resolve()
        on_cpu = self.device.device.type == "cpu"
        self.max_model_len = self._max_model_len()
        self._fixed_budget = config.max_num_batched_tokens is not None or not on_cpu
        max_tokens = config.max_num_batched_tokens or (max(1024, config.max_num_seqs) if on_cpu else 8192)
        self.runner = ModelRunner(
            self.path, self.model_config, self.device, max_num_seqs=config.max_num_seqs, max_num_tokens=max_tokens,
            max_model_len=self.max_model_len, progress=report,
        )
        num_blocks = config.num_kvcache_blocks
        if num_blocks == -1:
            # More than every sequence at full length can never be used.
            most = config.max_num_seqs * -(-self.max_model_len // self.device.block_size)
            num_blocks = min(devices.kv_budget_bytes(self.device) // self.runner.kv_bytes_per_block(), most)
            if num_blocks < 1:
                raise ValueError(
                    f"no memory for a single KV block of {self.runner.kv_bytes_per_block()} bytes; free some memory "
                    "or set num_kvcache_blocks"
                )
        self.num_parameters = sum(p.numel() for p in self.runner.model.parameters())
        self.runner.allocate_kv_cache(num_blocks)
        self.runner.warm_up(report)
        self.events = EventLog()
        self.blocks = BlockManager(
            num_blocks, self.device.block_size, enable_prefix_caching=config.enable_prefix_caching, events=self.events
        )
        self.scheduler = Scheduler(self.blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=max_tokens)
        if not self._fixed_budget:
            self.scheduler.token_budget = 256
        self.stats = EngineStats()
        self._ids = itertools.count(1)
        self._arrivals = itertools.count()
        self._random = random.Random(config.seed)
        self._live: dict[int, Sequence] = {}
        self._pending: list[StepOutput] = []
        logger.info(
            "KV pool: %d blocks of %d tokens, %.0f MiB; max_model_len %d", num_blocks, self.device.block_size,
            num_blocks * self.runner.kv_bytes_per_block() / 2**20, self.max_model_len,
        )

    @property
    def model_name(self) -> str:
        """What the API and the page call the model."""
        return catalog.display_name(self.config.model, self.path)

    # -- requests -------------------------------------------------------------------------------------

    def validate(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise ValueError for an empty prompt, an id outside the vocabulary, or text stops without a tokenizer."""
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
        if not isinstance(prompt, str):
            return list(prompt)
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
        request_id: int | None = None,
        arrival: float | None = None,
    ) -> int:
        """Queue a request and return its id.

        owner is a small integer stamped on the blocks it writes; arrival (time.perf_counter() seconds) starts
        its TTFT. Raises ValueError as validate() does. A prompt that cannot be served ends in the next step
        with finish_reason "error" and both numbers.
        """
        params = sampling_params or SamplingParams()
        prompt_ids = self.encode(prompt)
        self.validate(prompt_ids, params)
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
        table = list(seq.block_table)
        self.scheduler.finish(seq, reason)
        self._close(seq)
        self._pending.append(self._output(seq, [], table))

    def is_finished(self) -> bool:
        """True when no request is left and no output waits for a step()."""
        return not (self._live or self._pending)

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
        handle = self.runner.launch(plan)
        token_ids, bad_rows = self.runner.collect(handle)
        outputs.extend(self._apply(plan, token_ids, bad_rows))
        seconds = time.perf_counter() - started
        prefill = plan.num_tokens - plan.num_decodes
        self.stats.record_step(prefill, len(token_ids), plan.num_decodes, seconds)
        if not self._fixed_budget and self.stats.prefill_rate:
            chunk = int(self.stats.prefill_rate * _TARGET_STEP_SECONDS)
            self.scheduler.token_budget = max(_MIN_CHUNK, min(chunk, self.scheduler.max_num_batched_tokens))
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the block bookkeeping balances."""
        self.blocks.check_integrity(self.scheduler.running)

    def exit(self) -> None:
        """End every request and let go of the model; the engine cannot be used afterwards."""
        for request_id in list(self._live):
            self.abort(request_id)
        self.runner.kv_cache = None
        del self.runner

    # -- internals ------------------------------------------------------------------------------------

    def _max_model_len(self) -> int:
        limit = self.model_config.max_position_embeddings
        wanted = self.config.max_model_len
        if wanted is None:
            return limit
        if wanted > limit:
            raise ValueError(f"max_model_len={wanted} is above the model's own limit of {limit} tokens")
        return wanted

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

    def _note_first_schedule(self, plan: StepPlan, now: float) -> None:
        for item in plan.items:
            seq = item.seq
            if not seq.metrics.first_scheduled:
                seq.metrics.first_scheduled = now
                self.stats.record_admission(seq.num_prompt_tokens, seq.num_cached_tokens)

    def _apply(self, plan: StepPlan, token_ids: list[int], bad_rows: list[bool]) -> list[StepOutput]:
        """Append what was sampled, index the blocks that were filled, end what is done."""
        outputs: list[StepOutput] = []
        sampled = iter(zip(token_ids, bad_rows, strict=True))
        now = time.perf_counter()
        for item in plan.items:
            seq = item.seq
            seq.num_computed_tokens = seq.num_planned_tokens
            new: list[int] = []
            if item.samples:
                token, bad = next(sampled)
                seq.num_placeholders -= 1
                if bad:
                    # What this sequence wrote cannot be trusted: end it before its blocks are indexed.
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
        table = list(seq.block_table)
        self.scheduler.finish(seq, reason, error)
        self._close(seq)
        outputs.append(self._output(seq, new or [], table))

    def _close(self, seq: Sequence) -> None:
        del self._live[seq.request_id]
        self.runner.forget(seq.request_id)
        self.stats.num_preemptions += seq.metrics.num_preemptions
        kind = seq.finish_reason if seq.finish_reason in ("abort", "error") else "finish"
        self.events.add(kind, seq.owner, seq.request_id, seq.num_output_tokens, seq.error or "")

    def _output(self, seq: Sequence, new: list[int], block_table: list[int] | None = None) -> StepOutput:
        computed = min(seq.num_computed_tokens, seq.num_prompt_tokens)
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
