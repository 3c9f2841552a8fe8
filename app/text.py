"""What may be stored as a message or a title, and the title that a first message gives."""

from __future__ import annotations

import re
from typing import Any

from app.errors import BlankMessage

MAX_MESSAGE_CHARS = 1_000_000
MAX_TITLE_CHARS = 200
AUTO_TITLE_CHARS = 48
UNSEEN_TITLE = "(blank)"
# White space, control characters, what Unicode calls default-ignorable (zero-width spaces, marks of direction,
# variation selectors, fillers, tags), and the braille pattern without a dot.
_UNSEEN = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff]+"
)


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
    """The first words of a first message, from the first character that can be seen."""
    if unseen := _UNSEEN.match(message):
        message = message[unseen.end() :]
    if not message:
        return UNSEEN_TITLE
    # So many words fill the room however short they are; the last item is the whole rest.
    line = " ".join(message.split(maxsplit=AUTO_TITLE_CHARS))
    if len(line) <= AUTO_TITLE_CHARS:
        return line
    head = line[:AUTO_TITLE_CHARS]
    # Scripts without spaces are cut where the room ends, others before the word that does not fit.
    return (head.rpartition(" ")[0] or head) + "…"
