"""Which steps can be launched behind another one before that one's tokens are known. It follows from the plans alone,
so the engine's process knows it of graphs that are in others (TensorParallelRunner)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from engine.graph_sampling import draws
from engine.graph_shapes import Shape
from engine.scheduler import ScheduledSequence, StepPlan


def shape_of(plan: StepPlan, shapes: Sequence[Shape]) -> Shape | None:
    """The first of the shapes, which are cheapest first, that holds the plan's step; None where there is none, or the
    step is to report what no graph computes."""
    decodes, chunks = plan.num_decodes, plan.items[plan.num_decodes :]
    if any(item.seq.prompt_logprobs is not None for item in chunks):
        return None
    size = decodes, plan.num_tokens - decodes, len(chunks)
    return next((shape for shape in shapes if shape.holds(*size)), None)


def drawn_by(plan: StepPlan) -> frozenset[int]:
    """Ids of the sequences whose tokens a captured step of this plan leaves where the next one finds them: of all that
    are sampled from, or, where one of them needs more than the captured draw, of none."""
    drawn = []
    for item in plan.items:
        if item.samples:
            if item.seq.forks or not draws(item.seq, item.start + item.num_tokens):
                return frozenset()
            drawn.append(item.seq.seq_id)
    return frozenset(drawn)


def can_follow(items: list[ScheduledSequence], drawn: Container[int]) -> bool:
    """Whether a captured step of these can be sent before the tokens of the last one are known: each that is missing is
    one that the last step draws, and the captured draw is all that the new step needs."""
    for item in items:
        seq, end = item.seq, item.start + item.num_tokens
        if end > len(seq.token_ids) and seq.seq_id not in drawn:
            return False
        if item.samples and (seq.forks or not draws(seq, end)):
            return False
    return True
