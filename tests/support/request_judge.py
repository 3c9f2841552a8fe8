"""A request, what must come of it, and what has come of it: the judge of the property tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.origin import Origin
from engine.outputs import RequestPriority, StepOutput
from engine.request_stream import BlockingStream, Submission
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.sequence import as_array
from history_model import EOS, expected_beams, expected_output


@dataclass
class Judge:
    """What an engine over the stand-in model may say of a request: every continuation's right tokens in order, each
    once, and one end that is true. Anything else fails an assertion.

    pool_tokens, block_size, max_len   of the engine
    wanted, got      the right tokens of each continuation, and those that have come
    ends             how continuations have ended
    excuses          words of which an error must hold one; empty: this request has no reason to fail
    aborted          continuations that may end with "abort"
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    priority: RequestPriority
    origin: Origin
    pool_tokens: int
    block_size: int
    max_len: int
    excuses: set[str] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    ends: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompt = as_array(self.prompt)
        request = Submission(self.request_id, self.prompt, prompt, self.params, self.priority, self.origin, 0.0)
        self.stream = BlockingStream(request, None, lambda *_: None)
        self.wanted: list[list[int]] = [[]]
        if isinstance(self.params, SamplingParams):
            stops = {EOS, *self.params.stop_token_ids}
            self.wanted = [
                expected_output(self.prompt, self.params.max_tokens, self.max_len, i, stops, self.params.min_tokens)
                for i in range(self.params.n)
            ]
        self.got: list[list[int]] = [[] for _ in self.wanted]
        self._deltas: list[list[int]] = [[] for _ in self.wanted]
        self._room = self.pool_tokens if len(self.prompt) < self.max_len else self.max_len - 1

    @property
    def _most_tokens(self) -> int:
        return min(self.params.max_tokens, self.max_len - len(self.prompt))

    @property
    def ended(self) -> bool:
        return len(self.ends) == len(self.wanted)

    def take(self, output: StepOutput) -> None:
        """One step's output."""
        index, reason = output.index, output.finish_reason
        assert index not in self.ends, "an output after the last one"
        got, wanted = self.got[index], self.wanted[index]
        got += output.new_token_ids[: -1 if reason == "stop" and output.new_token_ids else None]
        if isinstance(self.params, SamplingParams):
            assert got == wanted[: len(got)]
        if reason is not None:
            self.ends[index] = reason
            assert output.ends_request == self.ended
            self._check_end(output)
        self.stream.put(output)

    def read(self) -> None:
        """What a reader that comes by now gets: the steps since it came last, merged."""
        while self.stream._unread:
            delta = next(iter(self.stream))
            if isinstance(self.params, SamplingParams):
                self._deltas[delta.index] += delta.token_ids

    def check_all_came(self) -> None:
        """At the end: the reader has what the engine has said, no token lost or doubled."""
        self.read()
        assert self.ended and self.stream._state.finished
        if isinstance(self.params, SamplingParams):
            outputs = self.stream.output().outputs
            assert self._deltas == self.got == [o.token_ids for o in outputs]
            assert {o.index: o.finish_reason for o in outputs} == self.ends

    def _check_end(self, output: StepOutput) -> None:
        reason, error = output.finish_reason, output.error or ""
        if len(self.prompt) > self._room:
            assert reason == "error" and f"has {len(self.prompt)} tokens" in error and str(self._room) in error
        elif reason == "error":
            assert any(excuse in error for excuse in self.excuses), error
        elif reason == "abort":
            assert output.index in self.aborted
        elif isinstance(self.params, BeamSearchParams):
            need = len(self.prompt) + self.params.max_tokens + self.block_size
            if self.params.beam_width * need <= self.pool_tokens:
                beams = [(b.token_ids, b.score) for b in output.beams or ()]
                assert beams == expected_beams(self.prompt, self.params, self.max_len)
        elif reason == "stop":
            assert self.got[output.index] == self.wanted[output.index]
            assert len(self.got[output.index]) < self._most_tokens
        else:
            # All that was asked for, or all that the model's length or the pool can hold.
            assert reason == "length"
            count = len(self.got[output.index])
            assert count == self._most_tokens or len(self.prompt) + count >= self.pool_tokens
