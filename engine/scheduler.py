"""Scheduler: which tokens of which sequences the next step computes.

One step is one ragged batch: first the decodes, one token each, then as many prompt tokens as the budget
leaves, in chunks (Sarathi-Serve, arXiv:2403.02310), so that a long prompt never stalls the streams of others.
Every running sequence that decodes is in every step, so a stream waits one step for its next token.
When blocks run out, the sequence that the waiting queue would serve last is preempted: its blocks are released (and
stay findable) and it is computed again later, from whatever of them is still cached then.

Where many short prompts come at once, a step does not take as many of them as it could hold, but enough to keep the
device busy: the first of them have their answer's beginning sooner, and the last hardly later.

BACKGROUND requests run only while there is no other. When one arrives, they are out of the very next step; they keep
their blocks while they wait, and are the first to lose them when blocks are needed.

A plan may be made while the step before it runs (see LLMEngine): what that step samples then counts as a token already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.outputs import RequestPriority
from engine.sequence import Sequence, SequenceStatus
from engine.waiting_queue import WaitingQueue, by_queue_key

# A step of so many prompts, and so many tokens of prompts, is as good for the device as a larger one.
_ENOUGH_PROMPTS = 8
_ENOUGH_TOKENS = 2048
# To look a member up in its enum takes ten times as long as this name does, and it is asked of every sequence.
_RUNNING, _FINISHED, _BACKGROUND = SequenceStatus.RUNNING, SequenceStatus.FINISHED, RequestPriority.BACKGROUND


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of seq are computed; `samples` where that reaches its last token."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    life: int = 0  # the sequence's when it was planned

    @property
    def is_stale(self) -> bool:
        """The sequence has ended or was preempted since: what this computes is nobody's."""
        return self.seq.life != self.life or self.seq.status is _FINISHED


@dataclass(slots=True)
class StepPlan:
    """One step: decodes first, of one token each and all sampled from, then prefill chunks. `finished` are sequences
    that ended while planning."""

    items: list[ScheduledSequence] = field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    finished: list[Sequence] = field(default_factory=list)


def _queue_key_beside(seq: Sequence, fork: Sequence) -> tuple[int, int, int]:
    """The queue key of a continuation of the request that seq belongs to."""
    return (*by_queue_key(seq)[:2], fork.arrival_order)


def _members(seq: Sequence) -> tuple[Sequence, ...]:
    """The sequences that are preempted together: a search's beams, otherwise seq alone."""
    return seq.beam.sequences if seq.beam else (seq,)


class Scheduler:
    """Owns the waiting and the running sequences. `token_budget` may be lowered between steps.

    running holds every sequence with blocks, the paused BACKGROUND ones included; those do not count towards
    max_num_seqs.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.token_budget = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_steps = 0  # plans made: the clock by which waiting requests age
        self._foreground = False  # the step being planned has other than BACKGROUND work

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq, self.num_steps)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> StepPlan:
        """Choose the next step's tokens and give them their blocks."""
        plan = StepPlan()
        self.num_steps += 1
        self._pause_or_resume_background()
        prefills = self._plan_decodes(plan)
        # A lowered budget bounds the prompt tokens, never the decodes.
        budget = max(self.token_budget, plan.num_tokens + 1) - plan.num_tokens
        budget = min(budget, self.max_num_batched_tokens - plan.num_tokens)
        prefills.sort(key=by_queue_key)
        # A prompt begun goes on before those that came later, but not before more urgent ones.
        budget = self._admit_waiting(plan, budget, before=prefills[0] if prefills else None)
        for seq in prefills:
            if budget <= 0:
                break
            budget -= self._schedule(plan, seq, budget)
        self._admit_waiting(plan, budget)
        return plan

    def can_plan_ahead(self) -> bool:
        """Whether the next step can be planned before the tokens of the one that runs are known: nobody has to be
        preempted for it or paused, and nobody waits for more than a token of its own."""
        if self.blocks.num_available < len(self.running):
            return False
        return not any(seq.forks or seq.is_scored or seq.priority == _BACKGROUND for seq in self.running)

    def revert(self, items: list[ScheduledSequence]) -> None:
        """Undo what was planned but did not happen: these tokens are to be computed yet. Blocks stay allocated."""
        for item in items:
            if not item.is_stale:
                item.seq.num_planned_tokens -= item.num_tokens
                item.seq.num_placeholders -= item.samples

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, to be computed again."""
        for seq in list(self.running):
            self._preempt(StepPlan(), seq)

    def finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """End seq wherever it stands; its blocks come back exactly once. A second call is a no-op."""
        if seq.is_finished:
            return
        if seq.status is not SequenceStatus.UNBORN:
            (self.waiting if seq.status is SequenceStatus.WAITING else self.running).remove(seq)
        self.blocks.release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.error = error

    def start_forks(self, seq: Sequence) -> None:
        """seq has just computed its prompt: its forks run beside it on the same blocks, or, beyond max_num_seqs, wait
        for a place (and then find the prompt in the cache, where it still is)."""
        for fork in seq.forks:
            fork.was_admitted = True
            fork.num_cached_tokens = seq.num_cached_tokens
            if len(self._active()) < self.max_num_seqs:
                self.share(seq, fork)
            else:
                fork.queue_key = _queue_key_beside(seq, fork)
                fork.metrics.first_scheduled = seq.metrics.first_scheduled
                fork.status = SequenceStatus.WAITING
                self.add(fork)
        seq.forks = ()

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let child run on what parent has computed, in place of any blocks of its own."""
        self.blocks.release(child)
        self.blocks.fork(parent, child)
        child.metrics.first_scheduled = parent.metrics.first_scheduled
        if child.status is SequenceStatus.UNBORN:
            child.queue_key = _queue_key_beside(parent, child)
            child.status = SequenceStatus.RUNNING
            self.running.append(child)

    # -- internals ------------------------------------------------------------------------------------

    def _active(self) -> list[Sequence]:
        """The running sequences that take part in steps now."""
        return [seq for seq in self.running if seq.status is _RUNNING]

    def _pause_or_resume_background(self) -> None:
        background = [seq for seq in self.running if seq.priority == _BACKGROUND]
        # BACKGROUND comes last, so the queue's head tells whether anything else waits.
        waits = bool(self.waiting) and not _is_background(self.waiting[0])
        self._foreground = waits or len(background) < len(self.running)
        for seq in background:
            seq.status = SequenceStatus.PAUSED if self._foreground else SequenceStatus.RUNNING

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Plan a token of each sequence that decodes; returns those that have more to compute after what is in flight.

        One pass, with little done for each: of a step of hundreds of decodes it is most of the planning.
        """
        items, prefills, block_size = plan.items, [], self.blocks.block_size
        for seq in self.running.copy():
            # An earlier turn of this loop may have preempted or ended it.
            if seq.status is not _RUNNING:
                continue
            start, placeholders, prompt = seq.num_planned_tokens, seq.num_placeholders, seq.num_prompt_tokens
            num_tokens = len(seq.token_ids) + placeholders
            if placeholders and num_tokens - prompt >= seq.max_tokens:
                continue  # a step in flight samples the last token that it may have
            if num_tokens != start + 1 or start < prompt:
                if num_tokens != start:
                    prefills.append(seq)
                continue
            is_full = start == len(seq.block_table) * block_size
            if (is_full or seq.may_write_to_shared) and not self._make_room(plan, seq):
                continue
            items.append(ScheduledSequence(seq, start, 1, True, seq.life))
            seq.num_planned_tokens, seq.num_placeholders = num_tokens, placeholders + 1
        plan.num_decodes = plan.num_tokens = len(items)
        return [seq for seq in prefills if seq.status is _RUNNING]

    def _make_room(self, plan: StepPlan, seq: Sequence) -> bool:
        """Find seq a block for its next token, by preempting others where need be."""
        while not self.blocks.grow(seq, seq.num_tokens):
            own = _members(seq)
            if len(self.running) <= len(own) and all(other in own for other in self.running):
                if self.blocks.release_pin_for(seq):
                    continue
                # Every block of the pool is its own: there is nothing to wait for.
                for member in own:
                    self._unplan(plan, member)
                    self.finish(member, "length")
                plan.finished.append(seq)
                return False
            self._preempt(plan, max(self.running, key=by_queue_key))
            if seq.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan, budget: int, before: Sequence | None = None) -> int:
        """Admit from the queue, with `before` only what is served before it; returns the budget left."""
        if not self.waiting:
            return budget
        active = len(self._active())
        while self.waiting and budget > 0 and active < self.max_num_seqs:
            head = self.waiting[0]
            if (before is not None and by_queue_key(head) > by_queue_key(before)) or _is_large(plan):
                break
            if _is_background(head) and self._foreground:
                break
            if self._outgrew_the_pool(head):
                # It did so before it was preempted (a longer prompt is refused at entry).
                self.finish(head, "length")
                plan.finished.append(head)
                continue
            seq = self._admit_one(plan, before, active)
            if seq is None:
                break
            active += 1
            budget -= self._schedule(plan, seq, budget)
        return budget

    def _admit_one(self, plan: StepPlan, before: Sequence | None, active: int) -> Sequence | None:
        """Admit the one that may overtake, or else the head; None where neither finds room."""
        head = self.waiting[0]
        favourite = self.waiting.favourite(self.blocks.resident_prefix, before)
        for seq in dict.fromkeys((favourite, head)):
            if seq is not head and self._outgrew_the_pool(seq):
                continue
            if not self._has_place(seq, active):
                continue
            matched = self.blocks.match_prefix(seq)
            if not self._find_room(plan, seq, matched, active):
                continue
            self.waiting.take(seq)
            self.blocks.admit(seq, matched)
            seq.status = SequenceStatus.RUNNING
            if not seq.was_admitted:
                seq.was_admitted = True
                seq.num_cached_tokens = seq.num_computed_tokens
            self.running.append(seq)
            return seq
        if not active:
            raise RuntimeError(f"{head} fits the pool of {self.blocks.num_blocks} blocks but finds no room in it")
        return None

    def _find_room(self, plan: StepPlan, seq: Sequence, matched: list[int], active: int) -> bool:
        """Whether seq can be admitted now: for the queue's head paused requests give way, and where nothing runs
        also pins."""
        # Each running sequence may want its next block before this one is done.
        reserve = min(active, self.blocks.num_blocks // 8)
        if self.blocks.can_admit(seq, matched, reserve):
            return True
        if seq is not self.waiting[0]:
            return False
        paused = sorted((s for s in self.running if s.status is SequenceStatus.PAUSED), key=by_queue_key)
        needed = self.blocks.blocks_for(len(seq.token_ids)) - len(matched) + reserve
        if active and needed > self.blocks.num_available + sum(len(s.block_table) for s in paused):
            return False  # not even then
        while not self.blocks.can_admit(seq, matched, reserve):
            if paused:
                self._preempt(plan, paused.pop())
            elif active or not self.blocks.release_pin_for(seq):
                return False
        return True

    def _outgrew_the_pool(self, seq: Sequence) -> bool:
        return self.blocks.blocks_for(len(seq.token_ids)) > self.blocks.num_blocks

    def _has_place(self, seq: Sequence, active: int) -> bool:
        """Whether seq and the forks that it will have (beams must run together) fit beside the `active` ones and the
        forks that those will have."""
        taken = active + sum(len(other.forks) for other in self._active())
        return taken + min(1 + len(seq.forks), self.max_num_seqs) <= self.max_num_seqs or not active

    def _preempt(self, plan: StepPlan, seq: Sequence) -> None:
        """Take seq's blocks back and let it wait; the beams of one search go together."""
        if not _holds_blocks(seq):
            return  # it went with another beam
        for member in _members(seq):
            if not _holds_blocks(member):
                continue
            self.running.remove(member)
            self._unplan(plan, member)
            member.num_placeholders = 0
            member.life += 1
            self.blocks.events.add("preempt", member.owner, member.request_id, len(member.block_table))
            self.blocks.release(member)
            member.status = SequenceStatus.UNBORN if member.beam else SequenceStatus.WAITING
        if seq.beam:
            seq = seq.beam.restart()
            seq.status = SequenceStatus.WAITING
        seq.metrics.num_preemptions += 1
        self.add(seq)

    def _unplan(self, plan: StepPlan, seq: Sequence) -> None:
        for i, item in enumerate(plan.items):
            if item.seq is seq:
                del plan.items[i]
                plan.num_tokens -= item.num_tokens
                plan.num_decodes -= 1
                seq.num_placeholders -= item.samples
                return

    def _schedule(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        start = seq.num_planned_tokens
        count = min(seq.num_uncomputed_tokens, budget)
        samples = count == seq.num_uncomputed_tokens
        plan.items.append(ScheduledSequence(seq, start, count, samples, seq.life))
        plan.num_tokens += count
        seq.num_planned_tokens += count
        seq.num_placeholders += samples
        return count


def _is_large(plan: StepPlan) -> bool:
    """One more prompt like those in it would make the step larger than need be: beside decodes than the next power of
    two, for which there is a captured step anyway (see graph_shapes.py)."""
    prompts, tokens = len(plan.items) - plan.num_decodes, plan.num_tokens - plan.num_decodes
    enough = max(_ENOUGH_TOKENS, 1 << (tokens - 1).bit_length()) if plan.num_decodes else _ENOUGH_TOKENS
    return prompts >= _ENOUGH_PROMPTS and tokens + tokens // prompts > enough


def _holds_blocks(seq: Sequence) -> bool:
    return seq.status in (SequenceStatus.RUNNING, SequenceStatus.PAUSED)


def _is_background(seq: Sequence) -> bool:
    return seq.priority == _BACKGROUND
