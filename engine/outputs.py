"""What the engine says: StepOutput of one step, Delta of a stream, RequestOutput of a finished request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple


class RequestPriority(IntEnum):
    """Higher values are served first; within one priority the earlier arrival is."""

    BACKGROUND = 0
    LOW = 1
    NORMAL = 2
    HIGH = 3


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of time.perf_counter(); 0.0 where not reached yet."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; 0.0 before it."""
        return max(0.0, self.first_token - self.arrival) if self.first_token else 0.0

    def decode_rate(self, num_output_tokens: int) -> float:
        """Tokens per second after the first token; 0.0 for fewer than two tokens."""
        seconds = self.last_token - self.first_token
        return (num_output_tokens - 1) / seconds if num_output_tokens > 1 and seconds > 0 else 0.0


class TokenLogprobs(NamedTuple):
    """One token's log-probability, and (token id, log-probability) of the likeliest ones there, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class BeamResult(NamedTuple):
    """One beam: its new token ids without the end-of-sequence id, its score, and how it ended ("stop" | "length")."""

    token_ids: list[int]
    score: float
    finish_reason: str


@dataclass(slots=True)
class StepOutput:
    """What one step did for one request. The engine thread sends these to the event loops as they are.

    new_token_ids       tokens sampled in this step (an end-of-sequence id included)
    finish_reason       None while it runs, else "stop" | "length" | "abort" | "error"
    num_prompt_tokens   0 where the sender knows no figures (a thread that has lost its engine): earlier ones stand
    num_computed_tokens prompt tokens whose KV exists now (prefill progress), of num_prompt_tokens
    block_table         the sequence's physical blocks; set on the first token and at the end, else None
    index               which of the request's n continuations this is about
    ends_request        where there is a finish_reason: nothing follows on any of them
    logprobs            of new_token_ids, where asked for
    prompt_logprobs     with the first token, where asked for; entry i is prompt token i's, entry 0 None
    beams               beam search: at the end, best first
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    index: int = 0
    ends_request: bool = True
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    beams: list[BeamResult] | None = None

    def copy_figures(self, other: StepOutput) -> None:
        """Take over the counts of tokens and the times of another step's output."""
        self.num_prompt_tokens, self.num_cached_tokens = other.num_prompt_tokens, other.num_cached_tokens
        self.num_computed_tokens, self.metrics = other.num_computed_tokens, other.metrics


@dataclass(slots=True)
class Delta:
    """What a stream's reader gets: everything that happened since the last read, merged.

    text is what may be shown now (stop strings and broken characters are held back); token_ids are the new
    ids, without the end-of-sequence id. num_output_tokens counts the ids of the whole request that its text
    covers: after a stop string it is smaller than the number of ids received, and the reader cuts its list
    there. stop_reason is the stop string or the stop token id that ended it.

    index says which of the request's n continuations it is about; each has its own finish_reason, and the stream
    ends with the last. logprobs are those of the tokens whose text has been shown in full by now and was not
    before: none is given for what a stop string may still take back.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class _DictLike:
    """Lets a result be read as out["text"] as well as out.text."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(key)
        return getattr(self, key)

    def keys(self) -> list[str]:
        return [f.name for f in fields(self)]  # type: ignore[arg-type]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.keys() else default

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Any:
        return iter(self.keys())


@dataclass(slots=True)
class CompletionOutput(_DictLike):
    """One generated continuation. token_ids leave out the end-of-sequence id that ended it; after a stop
    string they are cut at the last token of which the kept text shows anything. score is a beam's."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    score: float | None = None


@dataclass(slots=True)
class RequestOutput(_DictLike):
    """The result of one request; also reads as a dict. Top-level fields mirror outputs[0], but for finish_reason,
    which stays None until all of them have ended."""

    request_id: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
