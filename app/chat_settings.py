"""The settings of one chat: sampling, system prompt, and what happens when its context is full."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from app.text import storable
from engine.sampling_params import SamplingParams
from engine.shown import shown

MAX_SYSTEM_PROMPT_CHARS = 100_000
# The page shows these as numbers; beyond it JSON and JavaScript lose digits, and no model has as many tokens.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of one chat; a bad value raises ValueError naming field, value and range.

    The sampling fields mean what SamplingParams says. max_tokens None: all that the context leaves.
    seed None: another one each time. stop: up to 16 strings of up to 1,000 characters.
    system_prompt "": the model's own default.
    thinking False asks templates that know `enable_thinking` to leave thinking out.
    leave_out_older True drops the oldest turns from a prompt that would not fit; False refuses it.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system_prompt: str = ""
    thinking: bool = True
    leave_out_older: bool = False

    def __post_init__(self) -> None:
        checked = self.sampling_params(rest_of_context=1 << 62)
        object.__setattr__(self, "stop", tuple(storable(text) for text in checked.stop))
        for name in ("top_k", "max_tokens"):
            if (getattr(self, name) or 0) > MAX_COUNT:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be at most {MAX_COUNT:,}")
        if not isinstance(self.system_prompt, str):
            raise ValueError(f"system_prompt={shown(self.system_prompt)} must be a string")
        if len(self.system_prompt) > MAX_SYSTEM_PROMPT_CHARS:
            raise ValueError(
                f"system_prompt has {len(self.system_prompt):,} characters; at most {MAX_SYSTEM_PROMPT_CHARS:,} "
                "are allowed: shorten it"
            )
        object.__setattr__(self, "system_prompt", storable(self.system_prompt))
        for name in ("thinking", "leave_out_older"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be True or False")

    def sampling_params(self, rest_of_context: int) -> SamplingParams:
        """What the engine gets; max_tokens is cut to `rest_of_context` (tokens, at least 1)."""
        wanted = rest_of_context if self.max_tokens is None else self.max_tokens
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=min(wanted, rest_of_context),
            seed=self.seed,
            stop=self.stop,
        )

    def changed(self, changes: dict[str, Any]) -> ChatSettings:
        """A copy with `changes`; an unknown name raises ValueError."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"{shown(name)} is not a chat setting; known are {', '.join(sorted(known))}")
        return replace(self, **changes)

    def with_stored(self, stored: dict[str, Any]) -> ChatSettings:
        """A copy with what was kept earlier. What this version refuses counts as not set: the chat must open."""
        settings = self
        for name, value in stored.items():
            with suppress(ValueError):
                settings = settings.changed({name: value})
        return settings

    def difference(self, defaults: ChatSettings) -> dict[str, Any]:
        """The fields that are not as in `defaults`: what is stored, so that the rest follows the model in use. As
        JSON gives them back, with lists for tuples."""
        mine, base = asdict(self), asdict(defaults)
        chosen = {name: value for name, value in mine.items() if value != base[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}


# A model of SmolLM2-135M's size loops and wanders when sampled as a large one is.
SMALL_MODEL_DEFAULTS = ChatSettings(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=512)
DEFAULTS = ChatSettings()
