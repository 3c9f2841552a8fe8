"""shown and shortened: what somebody gave, as the words of its refusal quote it.

A refusal must not be as long as what it refuses.
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """`repr(value)`, at most MAX_SHOWN_CHARS characters of it."""
    # Text is cut first: there may be megabytes of it.
    return shortened(repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str | bytes) else value))


def shortened(text: str) -> str:
    """The text; where it has more than MAX_SHOWN_CHARS characters, its beginning and "…"."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
