"""SamplingParams: how the next token of one request is chosen, every field checked on entry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.shown import shown

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000  # as much text may be held back, and to find that it is none of 16 takes 1.5 ms
MAX_LOGPROBS = 20
MAX_N = 16
MAX_BIAS = 100.0
MAX_TEMPERATURE = 1000.0  # all tokens are as good as equally likely; float32, which samplers compute in, ends at 3e38
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 1000.0  # beyond them logits are none that float32 holds
MAX_LENGTH_PENALTY = 5.0  # likewise scores: of 100,000 tokens it divides by 1e25


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; a bad value raises ValueError naming field, value and range. They do not change
    (a request that runs holds them): dataclasses.replace(params, temperature=0.5) makes others.

    temperature         [0, 1000]; 0 is greedy
    top_p               [0, 1]; the smallest set of most likely tokens with at least this mass; 0 is greedy
    top_k               >= 0; 0 keeps all, 1 is greedy
    min_p               [0, 1]; drops tokens below min_p times the most likely one's probability
    repetition_penalty  [0.001, 1000]; divides positive and multiplies negative logits of tokens seen in prompt or
                        output (Keskar et al., CTRL, arXiv:1909.05858)
    presence_penalty    [-2, 2]; subtracted once from tokens seen in the output
    frequency_penalty   [-2, 2]; subtracted per occurrence in the output
    max_tokens          >= 1 new tokens
    min_tokens          0..max_tokens; before as many tokens neither an end-of-sequence token nor a stop id is chosen,
                        and no stop string is looked for in their text
    seed                None or 0 <= seed < 2**63; the same seed gives the same tokens whatever else is in the batch
    stop                a string or up to 16 strings of up to 1,000 characters; the text ends before the first that
                        appears
    stop_token_ids      ids that end the request as the end-of-sequence token does
    ignore_eos          the end-of-sequence token does not end the request
    logprobs            None or 0..20: of every output token the log-probability, and as many of the likeliest
                        alternatives; log_softmax of the model's own logits, before bias, penalties and temperature
    logit_bias          {token id: -100..100} added to the model's logits before everything else
    n                   1..16 continuations of one computation of the prompt; each has its own noise, and the first is
                        what n=1 gives with the same seed
    prompt_logprobs     as logprobs, of every prompt token after the first; the prompt is then computed whole
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    _greedy: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)):
            raise ValueError(f"stop={shown(self.stop)} must be a string or a list of strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {shown(text)}; every entry must be a string of at least one character")
            if len(text) > MAX_STOP_CHARS:
                raise ValueError(
                    f"stop holds a string of {len(text):,} characters ({shown(text)}); at most {MAX_STOP_CHARS:,} "
                    "are allowed: shorten it"
                )
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ValueError(f"stop_token_ids={shown(self.stop_token_ids)} must be a list of integers >= 0")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={shown(self.ignore_eos)} must be True or False")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _integer("n", self.n, 1, MAX_N)
        checked = {
            "stop": tuple(stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": _checked_bias(self.logit_bias),
            "_greedy": self.temperature == 0 or self.top_p == 0 or self.top_k == 1,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # as dataclasses do where they are frozen

    @property
    def greedy(self) -> bool:
        """True where the settings leave only the most likely token: temperature 0, top_p 0 or top_k 1."""
        return self._greedy

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search, with transformers' meaning of every field (num_beams, max_new_tokens, ...).

    beam_width      >= 1 beams, which run at the same time
    max_tokens      >= 1 new tokens
    length_penalty  [-5, 5]; a beam's score is its log-probability divided by its new tokens to this power: above 0
                    favours long ones
    early_stopping  True: ends with beam_width finished beams; False: once no better one is likely; "never": once
                    no better one is possible
    """

    beam_width: int = 5
    max_tokens: int = 50
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, None)
        _integer("max_tokens", self.max_tokens, 1, None)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={shown(self.early_stopping)} must be True, False or 'never'")


def _checked_bias(bias: Any) -> dict[int, float] | None:
    """A copy, None where it is empty."""
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias={shown(bias)} must be a dict of token ids and numbers from -100 to 100")
    for token, value in bias.items():
        _integer("logit_bias", token, 0, None)
        _number(f"logit_bias[{shown(token)}]", value, -MAX_BIAS, MAX_BIAS)
    return dict(bias) or None


def _number(name: str, value: Any, low: float, high: float) -> None:
    text = _range(low, high)
    # By comparison, which integers too large for a float pass, too, and NaN does not.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name}={shown(value)} must be a finite number {text}")
    if not low <= value <= high:
        raise ValueError(f"{name}={shown(value)} must be {text}")


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={shown(value)} must be an integer {_range(low, high)}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={shown(value)} must be {_range(low, high).removeprefix('of ')}")


def _range(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"between {low} and {high}"
