"""A step's plan as it travels to the ranks: what is new since the last one, never whole histories.

PlanEncoder stands beside the engine, PlanDecoder on every rank; both remember what has been sent of each request.
A decoding request costs a step its id, one token and, every block_size steps, one block, however long it is. One that
was preempted comes back with a block table of its own, and of its tokens with those that are new.

Tokens that were sampled reach the ranks this way too, with the next step, and not by a broadcast within the step:
the engine must see them first in any case, to decide who goes on, and a collective more would lengthen every step.

Knows nothing of processes or tensors. A message is made of plain tuples and lists, which pickle fastest:

    (ended, new, items, num_decodes)
    ended  [seq_id]          not to be heard of again
    new    [(seq_id, request_id, prompt ids, params, seed, max_tokens, stop_ids)]
    items  [(seq_id, start, num_tokens, samples, new token ids, blocks kept, new blocks)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus

Message = tuple[list[int], list[tuple], list[tuple], int]


@dataclass(slots=True)
class _Sent:
    """What the ranks know of a request. table is the list itself: an admission after a preemption has another."""

    num_tokens: int
    table: list[int]
    num_blocks: int
    last_block: int


class PlanEncoder:
    """Plans in, messages out, in the order in which the ranks will read them."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._ended: list[int] = []

    def forget(self, seq_id: int) -> None:
        """The request has ended; the next message says so. An id that was never sent is a no-op."""
        if self._sent.pop(seq_id, None) is not None:
            self._ended.append(seq_id)

    def encode(self, plan: StepPlan) -> Message:
        """What the ranks need to run this plan."""
        new: list[tuple[Any, ...]] = []
        items: list[tuple[Any, ...]] = []
        for item in plan.items:
            seq = item.seq
            sent = self._sent.get(seq.seq_id)
            if sent is None:
                prompt = seq.token_ids[: seq.num_prompt_tokens]
                new.append((seq.seq_id, seq.request_id, prompt, seq.params, seq.seed, seq.max_tokens, seq.stop_ids))
                sent = self._sent[seq.seq_id] = _Sent(len(prompt), seq.block_table, 0, -1)
            items.append((seq.seq_id, item.start, item.num_tokens, item.samples, *_news(seq, sent)))
        ended, self._ended = self._ended, []
        return ended, new, items, plan.num_decodes


def _news(seq: Sequence, sent: _Sent) -> tuple[list[int], int, list[int]]:
    """(new token ids, blocks that stay, blocks behind them), noted as sent."""
    table, kept = seq.block_table, sent.num_blocks
    if table is not sent.table or kept > len(table) or (kept and table[kept - 1] != sent.last_block):
        kept = 0
    news = seq.token_ids[sent.num_tokens :], kept, table[kept:]
    sent.num_tokens = len(seq.token_ids)
    sent.table, sent.num_blocks, sent.last_block = table, len(table), table[-1]
    return news


class PlanDecoder:
    """Messages in, plans out, over sequences of its own."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._planned: list[Sequence] = []

    def decode(self, message: Message) -> tuple[StepPlan, list[int]]:
        """The plan, and the ids of requests that have ended, which the caller forgets before it runs the plan."""
        ended, new, items, num_decodes = message
        for seq_id in ended:
            del self._sequences[seq_id]
        for seq_id, request_id, prompt, params, seed, max_tokens, stop_ids in new:
            seq = Sequence(request_id, prompt, params, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids)
            seq.seq_id = seq_id
            self._sequences[seq_id] = seq
        # What is in no plan may be preempted or paused, and must not keep a runner's row from those that run.
        for seq in self._planned:
            seq.status = SequenceStatus.WAITING
        plan = StepPlan(num_decodes=num_decodes)
        for seq_id, start, num_tokens, samples, tokens, kept, blocks in items:
            seq = self._sequences[seq_id]
            seq.status = SequenceStatus.RUNNING
            seq.token_ids += tokens
            if kept:
                seq.block_table += blocks
            else:
                seq.block_table = blocks  # a new list: the runner takes its identity for that of the table
            plan.items.append(ScheduledSequence(seq, start, num_tokens, samples))
            plan.num_tokens += num_tokens
        self._planned = [item.seq for item in plan.items]
        return plan, ended
