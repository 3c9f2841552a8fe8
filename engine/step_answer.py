"""What a step found, as it travels back from rank 0: in the order of its plan, without naming anyone.

awaited() makes the handle of a step that is computed elsewhere; to_answer() packs what a ModelRunner has collected
there; fill() brings it into the awaited handle, keyed by the engine's own sequences.
"""

from __future__ import annotations

from engine.model_runner import StepHandle
from engine.outputs import TokenLogprobs
from engine.scheduler import StepPlan

# Sampled ids; log-probabilities of those who want them; those of the chunks of prompts whose are wanted.
Answer = tuple[list[int], list[TokenLogprobs], list[list[TokenLogprobs]]]

EMPTY: Answer = [], [], []  # of a rank that is not asked


def awaited(plan: StepPlan) -> StepHandle:
    """The handle of `plan` before its answer: who draws and whose prompts are scored, in ModelRunner's order."""
    handle = StepHandle([seq for item in plan.items if item.samples for seq in item.seq.drawn], None)
    for item in plan.items:
        if item.seq.unscored_prompt(item.start, item.start + item.num_tokens):
            handle.prompt_logprobs.append((item.seq, []))
    return handle


def to_answer(handle: StepHandle, token_ids: list[int]) -> Answer:
    """Of a step that a runner has collected."""
    return token_ids, list(handle.logprobs.values()), [entries for _, entries in handle.prompt_logprobs]


def fill(handle: StepHandle, answer: Answer) -> list[int]:
    """Complete an awaited handle as ModelRunner.collect() does; returns the sampled ids."""
    token_ids, logprobs, prompt_logprobs = answer
    wanted = [seq for seq in handle.sequences if seq.num_logprobs is not None]
    handle.logprobs = dict(zip(wanted, logprobs, strict=True))
    scored = [seq for seq, _ in handle.prompt_logprobs]
    handle.prompt_logprobs = list(zip(scored, prompt_logprobs, strict=True))
    return token_ids
