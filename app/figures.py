"""Figures of one reply: what it cost, what it reused, why it ended, and the line that says so under it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class Figures:
    """What is known of one generation; kept with the turn as JSON, so a reload shows the same line.

    ttft, seconds           seconds from submission to the first token, and to the end
    prompt_tokens           ids of the whole prompt; cached_tokens of them came from the KV cache
    output_tokens           ids of the reply (of this run: after "continue" the earlier ids are part of the prompt)
    decode_rate             tokens per second after the first one; 0.0 for fewer than two
    finish                  "" while it runs, else "stop" | "length" | "abort" | "error"
    stop_string             the stop string that ended it, None for the end-of-sequence token
    context_full            it ended because prompt + output reached max_model_len
    cut_by                  for "abort": "user", "abandoned", "shutdown" or "deleted"
    error                   the cause, for "error"
    block_size              tokens a KV block holds: cached_tokens // block_size blocks were reused
    reused_prefix           leading ids the prompt shares with all that was stored before it on this branch
    diverged_at             index of the first id that differs from what was stored; None where nothing differs
    diverged_token          that id as text, as the new prompt has it
    stored_before           ids stored before this turn on this branch (0 for a first turn)
    left_out                older turns that were left out of the prompt to fit the context
    encoded_anew            earlier replies whose stored ids were of another model and were encoded anew
    """

    ttft: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_rate: float = 0.0
    finish: str = ""
    stop_string: str | None = None
    context_full: bool = False
    cut_by: str = ""
    error: str | None = None
    block_size: int = 0
    reused_prefix: int = 0
    diverged_at: int | None = None
    diverged_token: str | None = None
    stored_before: int = 0
    left_out: int = 0
    encoded_anew: int = 0
    num_preemptions: int = 0
    max_tokens: int = 0
    model: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Figures:
        """Read what `to_json` wrote; a field of another version is dropped, a missing one takes its default."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


def finish_words(figures: Figures) -> str:
    """Why a reply ended, in words; "" while it runs."""
    if figures.finish == "error":
        return f"error: {figures.error or 'unknown cause'}"
    if figures.finish == "abort":
        return {
            "abandoned": "stopped (nobody was watching)",
            "shutdown": "cut off (the server ended)",
        }.get(figures.cut_by, "stopped")
    if figures.finish == "length":
        return "context full" if figures.context_full else "length limit (max tokens)"
    if figures.finish == "stop":
        return "stop string" if figures.stop_string is not None else "end of turn"
    return ""


def figures_line(figures: Figures) -> str:
    """The line under a reply: `TTFT 41 ms · 1,090 prompt (1,024 cached) · 212 out · 58 tok/s · end of turn`.

    A part that has no value (no first token yet, a rate over fewer than two tokens) is left out.
    """
    parts = []
    if figures.ttft > 0:
        parts.append(f"TTFT {figures.ttft * 1000:,.0f} ms")
    if figures.prompt_tokens:
        parts.append(f"{figures.prompt_tokens:,} prompt ({figures.cached_tokens:,} cached)")
        parts.append(f"{figures.output_tokens:,} out")
    if figures.decode_rate > 0:
        rate = figures.decode_rate
        parts.append(f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
    parts.append(finish_words(figures))
    return " · ".join(p for p in parts if p)


def notes(figures: Figures) -> list[str]:
    """What else the page should say of a reply's prompt, one sentence each; usually nothing."""
    said = []
    if figures.left_out:
        turns = "1 older turn was" if figures.left_out == 1 else f"{figures.left_out} older turns were"
        said.append(f"{turns} left out to fit the context.")
    if figures.encoded_anew:
        replies = "1 earlier reply was" if figures.encoded_anew == 1 else f"{figures.encoded_anew} earlier replies were"
        said.append(f"{replies} encoded anew: imported, or of another model.")
    # (Blocks of a sibling branch may hold more than this branch's own stored tokens.)
    if figures.diverged_at is not None and not figures.left_out and figures.cached_tokens <= figures.reused_prefix:
        said.append(
            f"{figures.reused_prefix:,} of {figures.stored_before:,} stored tokens still match; the first that "
            f"differs is token {figures.diverged_at:,} ({figures.diverged_token!r})."
        )
    return said
