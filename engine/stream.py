"""StreamState: turns the steps of one request into text; runs where the text is read, not in the engine thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.detokenizer import Detokenizer
from engine.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput, StepOutput, TokenLogprobs
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


class StreamState:
    """Accumulates one request, or its continuation `index`. Without a tokenizer it keeps ids only.

    A stop string is found here. The caller must then end the request in the engine: `stopped_by_text` is set
    and the state is finished, whatever the engine still sends.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.num_outputs = 1
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.stopped_by_text = False
        self.num_prompt_tokens = len(prompt_ids)
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.metrics = RequestMetrics()
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._num_logprobs_given = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_ids, tuple(params.stop), params.min_tokens) if tokenizer else None
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, step: StepOutput) -> Delta:
        """Take one step's output in; returns what is new for the reader."""
        ids, reason, text = step.new_token_ids, step.finish_reason, ""
        if reason == "stop" and ids:
            if ids[-1] in self.params.stop_token_ids:
                self.stop_reason = ids[-1]
            ids = ids[:-1]
        self.token_ids += ids
        if self.logprobs is not None and step.logprobs:
            self.logprobs.extend(step.logprobs[: len(ids)])
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = step.prompt_logprobs
        if step.num_prompt_tokens:
            self.num_cached_tokens, self.num_computed_tokens = step.num_cached_tokens, step.num_computed_tokens
            self.metrics = step.metrics
        self.error = step.error
        if self._detokenizer is not None:
            text = self._detokenizer.push(ids) if ids else ""
            if reason is not None:
                text += self._detokenizer.finish()
            if self._detokenizer.stopped is not None:
                self.stopped_by_text = reason is None
                reason, self.stop_reason = "stop", self._detokenizer.stopped
                del self.token_ids[self._detokenizer.kept_tokens :]
                if self.logprobs is not None:
                    del self.logprobs[self._detokenizer.kept_tokens :]
            self.text += text
        self.finish_reason = reason
        # By position, which takes a third of the time: there is one of these for every token of every stream.
        return Delta(
            text,
            ids,
            len(self.token_ids),
            reason,
            self.stop_reason,
            step.error,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_computed_tokens,
            step.block_table,
            self.metrics,
            self.index,
            None if self.logprobs is None else self._new_logprobs(self.logprobs),
            step.prompt_logprobs,
        )

    def fail(self, index: int, error: str) -> Delta:
        """End without text: what is fed raises something. index: this continuation's."""
        self._detokenizer = None
        return self.feed(StepOutput(self.request_id, [], "error", error, index=index))

    def _new_logprobs(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those of the tokens that are shown in full and were not before; at the end, of all that are left."""
        shown = len(self.token_ids)
        if self._detokenizer is not None and not self.finished:
            shown = min(shown, self._detokenizer.shown_tokens)
        first, self._num_logprobs_given = self._num_logprobs_given, max(shown, self._num_logprobs_given)
        return logprobs[first:shown]

    def completion(self) -> CompletionOutput:
        """This continuation as it stands."""
        logprobs = None if self.logprobs is None else self.logprobs.copy()
        return CompletionOutput(
            self.text, self.token_ids.copy(), self.finish_reason, self.stop_reason, logprobs, self.index
        )

    def output(self) -> RequestOutput:
        """The request as it stands; later steps do not change what was returned."""
        completion = self.completion()
        return RequestOutput(
            request_id=self.request_id,
            text=self.text,
            token_ids=completion.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=completion.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[completion],
            metrics=self.metrics,
        )


def merge(older: Delta | None, newer: Delta) -> Delta:
    """One delta that says what both said, so that a slow reader's backlog does not grow with every step."""
    if older is None:
        return newer
    newer.text = older.text + newer.text
    older.token_ids.extend(newer.token_ids)  # in place: copying at every step would add up to the square of them
    newer.token_ids = older.token_ids
    if older.logprobs is not None:
        older.logprobs.extend(newer.logprobs or [])
        newer.logprobs = older.logprobs
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    if newer.block_table is None:
        newer.block_table = older.block_table
    return newer


def merge_steps(older: StepOutput | None, newer: StepOutput) -> StepOutput:
    """merge() for what was not yet turned into text. `newer` is the later one of the same request."""
    if older is None:
        return newer
    older.new_token_ids.extend(newer.new_token_ids)
    newer.new_token_ids = older.new_token_ids
    if older.logprobs is not None:
        older.logprobs.extend(newer.logprobs or [])
        newer.logprobs = older.logprobs
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    if newer.block_table is None:
        newer.block_table = older.block_table
    if not newer.num_prompt_tokens:  # the engine's last word, which has no figures
        newer.copy_figures(older)
    return newer
