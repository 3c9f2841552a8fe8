"""The worst steps that an engine may be asked for, run once for their memory to be measured before the KV pool takes
what is left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner

# All that a draw can be asked to hold copies of the logits for.
_DEMANDING = SamplingParams(
    temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logit_bias={0: 1.0}, logprobs=20,
)  # fmt: skip


def run_worst_steps(runner: ModelRunner, max_num_seqs: int) -> None:
    """Run them eagerly, before the pool is allocated; the runner is left as it was.

    They are a full step of prompt tokens from one sequence at the model's longest, and one from as many sequences as
    may run, each of which samples. All sequences share the few blocks that a chunk needs: what the keys and values
    are does not matter.
    """
    longest = min(runner.max_blocks_per_seq * runner.block_size, runner.model_config.max_position_embeddings)
    most = min(runner.max_num_tokens, longest)
    runner.allocate_kv_cache(-(-most // runner.block_size))
    try:
        for count in sorted({1, max_num_seqs}):
            plan = _plan(runner, count, longest)
            runner.collect(runner.launch(plan))
            for item in plan.items:
                runner.forget(item.seq.seq_id)
    finally:
        runner.release_kv_cache()


def _plan(runner: ModelRunner, count: int, longest: int) -> StepPlan:
    """A step of `count` sequences' last prompt tokens. The first sequence has `longest` tokens, of which all but these
    count as cached; of the others nothing is."""
    share, more = divmod(runner.max_num_tokens, count)
    plan = StepPlan()
    for i in range(count):
        size = min(share + (i < more), longest)
        seq = _sequence(longest if i == 0 else size, runner)
        plan.items.append(ScheduledSequence(seq, len(seq.token_ids) - size, size, samples=True))
        plan.num_tokens += size
    return plan


def _sequence(length: int, runner: ModelRunner) -> Sequence:
    assert runner.kv_cache is not None
    num_blocks = runner.kv_cache.shape[2]
    seq = Sequence(-1, [0] * length, _DEMANDING, seed=0, max_tokens=1, stop_ids=frozenset())
    seq.status = SequenceStatus.RUNNING
    seq.block_table = [i % num_blocks for i in range(-(-length // runner.block_size))]
    return seq
