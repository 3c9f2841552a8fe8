"""Requests with several results, on the reader's side: n continuations, and the beams of a search.

Both have the interface of engine.stream.StreamState, which is one continuation's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.detokenizer import Detokenizer
from engine.faults import root_cause
from engine.outputs import BeamResult, CompletionOutput, Delta, RequestMetrics, RequestOutput, StepOutput
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.stream import StreamState

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

logger = logging.getLogger("pageturn.engine")

# (request id, reason, index of one of n continuations or None): how a stream ends its request in the engine
Abort = Callable[[int, str, int | None], None]


def open_state(
    request_id: int,
    prompt_ids: list[int],
    params: SamplingParams | BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> StreamState | ForkedState | BeamState:
    """What turns the steps of such a request into text."""
    if isinstance(params, BeamSearchParams):
        return BeamState(request_id, prompt_ids, tokenizer)
    if params.n > 1:
        return ForkedState(request_id, prompt_ids, params, tokenizer)
    return StreamState(request_id, prompt_ids, params, tokenizer)


def feed(state: StreamState | ForkedState | BeamState, step: StepOutput, abort: Abort) -> Delta | None:
    """Take one step's output in, and end in the engine what its text ends: by a stop string, or because it cannot be
    made, which ends this continuation alone. None where that had ended already."""
    try:
        delta = state.feed(step)
    except Exception as error:
        logger.exception("the text of request %d cannot be made", step.request_id)
        abort(step.request_id, "abort", step.index)
        return state.fail(step.index, f"the text of this reply cannot be made: {root_cause(error)}")
    if delta is not None and state.stopped_by_text:
        abort(step.request_id, "stop", step.index)
    return delta


class ForkedState:
    """n continuations. The request has ended when all of them have."""

    def __init__(
        self, request_id: int, prompt_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.request_id = request_id
        self.num_outputs = params.n
        self._states = [StreamState(request_id, prompt_ids, params, tokenizer, index) for index in range(params.n)]
        self._last = self._states[0]

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self._states)

    @property
    def stopped_by_text(self) -> bool:
        """Whether the continuation that was fed last ended with that, by a stop string."""
        return self._last.stopped_by_text

    @property
    def metrics(self) -> RequestMetrics:
        return self._states[0].metrics

    def feed(self, step: StepOutput) -> Delta | None:
        """As StreamState.feed; None where that continuation had already ended."""
        state = self._states[step.index]
        if state.finished:
            return None
        self._last = state
        return state.feed(step)

    def fail(self, index: int, error: str) -> Delta:
        """As StreamState.fail, of the continuation `index`."""
        return self._states[index].fail(index, error)

    def output(self) -> RequestOutput:
        """All continuations as they stand."""
        output = self._states[0].output()
        output.outputs[1:] = [state.completion() for state in self._states[1:]]
        if not self.finished:
            output.finish_reason = None
        output.error = next((state.error for state in self._states if state.error), None)
        return output


class BeamState:
    """A beam search, which has nothing to show before its end."""

    stopped_by_text = False
    num_outputs = 1

    def __init__(self, request_id: int, prompt_ids: list[int], tokenizer: Tokenizer | None) -> None:
        self.request_id = request_id
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._last = StepOutput(request_id, [], num_prompt_tokens=len(prompt_ids))
        self._outputs: list[CompletionOutput] = []

    @property
    def finished(self) -> bool:
        return self._last.finish_reason is not None

    @property
    def metrics(self) -> RequestMetrics:
        return self._last.metrics

    def feed(self, step: StepOutput) -> Delta:
        """Take one step's output in; the delta of the last one is the best beam."""
        self._last = step
        self._outputs = [self._completion(i, beam) for i, beam in enumerate(step.beams or ())]
        if step.finish_reason and not self._outputs:
            self._outputs = [CompletionOutput(finish_reason=step.finish_reason)]
        best = self._outputs[0] if self._outputs else CompletionOutput()
        return Delta(
            text=best.text,
            token_ids=best.token_ids,
            num_output_tokens=len(best.token_ids),
            finish_reason=step.finish_reason,
            error=step.error,
            num_prompt_tokens=step.num_prompt_tokens,
            num_cached_tokens=step.num_cached_tokens,
            num_computed_tokens=step.num_computed_tokens,
            block_table=step.block_table,
            metrics=step.metrics,
        )

    def fail(self, index: int, error: str) -> Delta:
        """As StreamState.fail."""
        return self.feed(StepOutput(self.request_id, [], "error", error, index=index))

    def output(self) -> RequestOutput:
        """All beams, best first; none before the end."""
        best = self._outputs[0] if self._outputs else CompletionOutput()
        return RequestOutput(
            request_id=self.request_id,
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=self._last.finish_reason,
            error=self._last.error,
            num_prompt_tokens=self._last.num_prompt_tokens,
            num_cached_tokens=self._last.num_cached_tokens,
            outputs=self._outputs,
            metrics=self._last.metrics,
        )

    def _completion(self, index: int, beam: BeamResult) -> CompletionOutput:
        text = ""
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, self._prompt_ids)
            text = detokenizer.push(beam.token_ids) + (detokenizer.finish() if beam.token_ids else "")
        return CompletionOutput(text, beam.token_ids, beam.finish_reason, index=index, score=beam.score)
