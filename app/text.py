"""What may be stored as a message or a title, and the title that a first message gives."""

from __future__ import annotations

from typing import Any

from app.errors import BlankMessage

MAX_MESSAGE_CHARS = 1_000_000
MAX_TITLE_CHARS = 200
AUTO_TITLE_CHARS = 48


def storable(text: str) -> str:
    """The text as UTF-8 can hold it: a lone surrogate, which a browser may send, becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def message_text(text: Any) -> str:
    """A message as it is stored. Raises BlankMessage, or ValueError for what is no text or too long."""
    if not isinstance(text, str):
        raise ValueError(f"the message is of type {type(text).__name__}; it must be text")
    if not text.strip():
        raise BlankMessage("the message is blank")
    if len(text) > MAX_MESSAGE_CHARS:
        raise ValueError(
            f"the message has {len(text):,} characters; at most {MAX_MESSAGE_CHARS:,} are taken: shorten it"
        )
    return storable(text)


def title_text(title: Any) -> str:
    """A title given by a user, on one line. Raises ValueError."""
    words = " ".join(storable(title).split()) if isinstance(title, str) else ""
    if not 1 <= len(words) <= MAX_TITLE_CHARS:
        raise ValueError(f"a title has 1 to {MAX_TITLE_CHARS} characters, this one has {len(words):,}")
    return words


def title_of(message: str) -> str:
    """The first words of a first message."""
    line = " ".join(message[: 4 * AUTO_TITLE_CHARS].split())
    if len(line) <= AUTO_TITLE_CHARS:
        return line
    head = line[:AUTO_TITLE_CHARS]
    # Scripts without spaces are cut where the room ends, others before the word that does not fit.
    return (head.rpartition(" ")[0] or head) + "…"
