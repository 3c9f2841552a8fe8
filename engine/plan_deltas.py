"""A step's plan as it travels to the ranks: what is new since the last one, never whole histories.

PlanEncoder stands beside the engine, PlanDecoder on every rank; both remember what has been sent of each sequence.
A decoding sequence costs a step its id, one token and, every block_size steps, one block, however long it is. One that
was preempted comes back with a block table of its own, and of its tokens with those that are new.

Tokens that were sampled reach the ranks this way too, once the engine has seen them. A step that is launched before
that (launch_ahead.py) takes them from where the step before left them on each rank; then a sequence's tokens here end
before the place that the step starts at.

A sequence that was forked off another one of its request is told by that other one, and its prompt is not sent again.
A beam, whose tokens and blocks are replaced between steps, costs what differs from those that it had.

Most steps are the one before once more, every sequence a token further and those gone that have ended: decodes. They
are told in the fewest words, because at hundreds of sequences the telling takes as long as a part of the step.

Knows nothing of processes or tensors. A message is made of plain tuples and lists, which pickle fastest:

    ("plan", ended, new, forks, items, num_decodes)
    ended  [seq_id]          not to be heard of again
    new    [(seq_id, request_id, index, prompt ids, params, seed, max_tokens, stop_ids, num_logprobs)]
    forks  [(seq_id, index, seed, seq_id of another one of its request)]
    items  [(seq_id, start, num_tokens, samples, tokens kept, tokens behind them, blocks kept, blocks behind them,
             seq_ids of the unborn forks that are drawn beside it, entries of its prompt_logprobs so far)]
                             the last is 0 where the step adds none

    ("on", ended, count, tokens, blocks)
    ended  as above; the sequences of the last plan but these, each at the next place
    count  of tokens that each of them has more; tokens are all of those, sequence by sequence
    blocks [(index in the plan, [block])] for those that have more of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus

Message = tuple[Any, ...]


@dataclass(slots=True)
class _Sent:
    """What the ranks know of a sequence: num_tokens first entries of tokens, num_blocks of table.

    These are the sequence's own lists of then: the engine only extends them, or gives the sequence others. One thing
    is cut: the tokens of a search that starts again, whose lead is sent as a bare prompt before anything is appended.
    """

    request_id: int
    tokens: list[int]
    num_tokens: int
    table: list[int]
    num_blocks: int
    start: int = -1  # of the last plan's item


class PlanEncoder:
    """Plans in, messages out, in the order in which the ranks will read them."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._of_request: dict[int, list[int]] = {}  # the seq_ids of each request that the ranks know
        self._ended: list[int] = []
        self._decoding: list[tuple[Sequence, _Sent]] = []  # the last plan, if it was nothing but decodes

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; the next message says so. An id that was never sent is a no-op."""
        sent = self._sent.pop(seq_id, None)
        if sent is None:
            return
        self._ended.append(seq_id)
        known = self._of_request[sent.request_id]
        known.remove(seq_id)
        if not known:
            del self._of_request[sent.request_id]

    def encode(self, plan: StepPlan) -> Message:
        """What the ranks need to run this plan."""
        ended, self._ended = self._ended, []
        if ended:
            self._decoding = [(seq, sent) for seq, sent in self._decoding if seq.seq_id in self._sent]
        if (news := self._goes_on(plan)) is not None:
            return "on", ended, *news
        new: list[tuple[Any, ...]] = []
        forks: list[tuple[Any, ...]] = []
        items: list[tuple[Any, ...]] = []
        for item in plan.items:
            seq, drawn_beside = item.seq, item.seq.drawn[1:] if item.samples else ()
            for one in (seq, *drawn_beside):
                if one.seq_id not in self._sent:
                    self._introduce(one, new, forks)
            # How many it has is told with every chunk: of a step that was sent only the engine knows if it counted.
            unscored = seq.unscored_prompt(item.start, item.start + item.num_tokens)
            num_scored = len(seq.prompt_logprobs) if unscored and seq.prompt_logprobs is not None else 0
            news = _news(seq, self._sent[seq.seq_id])
            fork_ids = [fork.seq_id for fork in drawn_beside]
            items.append((seq.seq_id, item.start, item.num_tokens, item.samples, *news, fork_ids, num_scored))
            self._sent[seq.seq_id].start = item.start
        self._decoding = []
        if plan.num_decodes == len(plan.items):
            self._decoding = [(item.seq, self._sent[item.seq.seq_id]) for item in plan.items]
        return "plan", ended, new, forks, items, plan.num_decodes

    def _goes_on(self, plan: StepPlan) -> tuple[int, list[int], list[tuple[int, list[int]]]] | None:
        """Of a plan that is the last one a token further: (new tokens of each, all of them, new blocks), noted as sent.
        None of any other plan."""
        items, decoding = plan.items, self._decoding
        if not items or len(items) != len(decoding) or plan.num_decodes != len(items):
            return None
        count = len(items[0].seq.token_ids) - decoding[0][1].num_tokens
        if count < 0:
            return None
        tokens: list[int] = []
        for item, (seq, sent) in zip(items, decoding, strict=True):
            ids = seq.token_ids
            if item.seq is not seq or item.start != sent.start + 1 or not item.samples:
                return None
            if ids is not sent.tokens or seq.block_table is not sent.table or len(ids) - sent.num_tokens != count:
                return None
            tokens += ids[-count:] if count else ()
        blocks: list[tuple[int, list[int]]] = []
        for i, (_, sent) in enumerate(decoding):
            sent.start += 1
            sent.num_tokens += count
            if len(sent.table) > sent.num_blocks:
                blocks.append((i, sent.table[sent.num_blocks :]))
                sent.num_blocks = len(sent.table)
        return count, tokens, blocks

    def _introduce(self, seq: Sequence, new: list[tuple], forks: list[tuple]) -> None:
        """Tell the ranks of seq, by another one of its request where they know one."""
        known = self._of_request.setdefault(seq.request_id, [])
        if known:
            forks.append((seq.seq_id, seq.index, seq.seed, known[0]))
        else:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            who = (seq.seq_id, seq.request_id, seq.index, prompt)
            new.append((*who, seq.params, seq.seed, seq.max_tokens, seq.stop_ids, seq.num_logprobs))
        known.append(seq.seq_id)
        self._sent[seq.seq_id] = _Sent(seq.request_id, seq.token_ids, seq.num_prompt_tokens, [], 0)


def _news(seq: Sequence, sent: _Sent) -> tuple[int, list[int], int, list[int]]:
    """(tokens that stay, those behind them, blocks that stay, those behind them), noted as sent."""
    tokens, table = seq.token_ids, seq.block_table
    tokens_kept = _num_kept(sent.tokens, sent.num_tokens, tokens, seq.num_prompt_tokens)
    blocks_kept = _num_kept(sent.table, sent.num_blocks, table, 0)
    sent.tokens, sent.num_tokens = tokens, len(tokens)
    sent.table, sent.num_blocks = table, len(table)
    return tokens_kept, tokens[tokens_kept:], blocks_kept, table[blocks_kept:]


def _num_kept(sent: list[int], count: int, now: list[int], agreed: int) -> int:
    """How many of the first `count` entries of `sent` stand unchanged at the front of `now`; `agreed` are known to."""
    stop = min(count, len(sent), len(now))
    if sent is now:
        return stop
    return next((i for i in range(agreed, stop) if sent[i] != now[i]), stop)


class PlanDecoder:
    """Messages in, plans out, over sequences of its own."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._plan = StepPlan()

    def decode(self, message: Message) -> tuple[StepPlan, list[int]]:
        """The plan, and the ids of sequences that have ended, which the caller forgets before it runs the plan. It
        holds until the next call, which may return the same object, changed."""
        kind, ended, *rest = message
        if ended:
            for seq_id in ended:
                del self._sequences[seq_id]
            self._plan.items = [item for item in self._plan.items if item.seq.seq_id in self._sequences]
        self._plan = self._go_on(*rest) if kind == "on" else self._begin(*rest)
        return self._plan, ended

    def _go_on(self, count: int, tokens: list[int], blocks: list[tuple[int, list[int]]]) -> StepPlan:
        plan = self._plan
        plan.num_decodes = plan.num_tokens = len(plan.items)
        for i, item in enumerate(plan.items):
            item.start += 1
            item.seq.token_ids += tokens[i * count : (i + 1) * count]
        for i, more in blocks:
            plan.items[i].seq.block_table += more
        return plan

    def _begin(self, new: list[tuple], forks: list[tuple], items: list[tuple], num_decodes: int) -> StepPlan:
        for seq_id, request_id, index, prompt, params, seed, max_tokens, stop_ids, num_logprobs in new:
            seq = Sequence(request_id, prompt, params, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids)
            seq.seq_id, seq.index, seq.num_logprobs = seq_id, index, num_logprobs
            self._sequences[seq_id] = seq
        for seq_id, index, seed, other_id in forks:
            self._sequences[seq_id] = _fork(self._sequences[other_id], seq_id, index, seed)
        # What is in no plan may be preempted or paused, and must not keep a runner's row from those that run.
        for item in self._plan.items:
            item.seq.status = SequenceStatus.WAITING
        plan = StepPlan(num_decodes=num_decodes)
        for seq_id, start, num_tokens, samples, tokens_kept, tokens, blocks_kept, blocks, fork_ids, num_scored in items:
            seq = self._sequences[seq_id]
            seq.status = SequenceStatus.RUNNING
            seq.token_ids[tokens_kept:] = tokens
            if blocks_kept == len(seq.block_table):
                seq.block_table += blocks
            else:
                # A new list: the runner takes its identity for that of the table.
                seq.block_table = seq.block_table[:blocks_kept] + blocks
            seq.forks = tuple([self._sequences[fork_id] for fork_id in fork_ids])
            seq.prompt_logprobs = [None] * num_scored or None
            plan.items.append(ScheduledSequence(seq, start, num_tokens, samples))
            plan.num_tokens += num_tokens
        return plan


def _fork(other: Sequence, seq_id: int, index: int, seed: int) -> Sequence:
    """A sequence of the same request as `other`, and like it before its first token."""
    prompt = other.token_ids[: other.num_prompt_tokens]
    seq = Sequence(
        other.request_id, prompt, other.params, seed=seed, max_tokens=other.max_tokens, stop_ids=other.stop_ids
    )
    seq.seq_id, seq.index, seq.num_logprobs = seq_id, index, other.num_logprobs
    seq.status = SequenceStatus.WAITING
    return seq
