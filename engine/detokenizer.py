"""Detokenizer: a request's token ids as text, in pieces that never have to be taken back.

Two things hold text back: a character whose bytes are not all there yet, and an end that could still become a
stop string. Everything else is given out with the token that completed it. The result does not depend on how
the ids are grouped into pushes.

What is shown is the text of the output ids. Bytes that can never become a character turn into U+FFFD, as with
Python's "replace". Two cases at the edges:

- The prompt ends within a character: once the output completes it, that character is shown in full, for it
  was not part of the prompt's text; if the output goes on differently, the prompt's broken half is dropped.
- The output ends within a character: the half is dropped rather than shown as U+FFFD. The ids keep it, so a
  continuation (whose prompt then ends within that character) shows it whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_UTF8 = 4  # bytes of the longest character
_CONTEXT = 6  # prompt tokens that a tokenizer without byte-level tokens sees before the first output token
# Such a tokenizer may show a whole run of bytes as broken for the sake of its last character: all that the
# window holds of earlier ones, and up to three more bytes. A longer run will never become whole.
_MAX_BROKEN = _CONTEXT + 2 * (_MAX_UTF8 - 1)


class TokenDecoder(Protocol):
    """What the detokenizer needs of models.tokenizer.Tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...


class Detokenizer:
    """One request's incremental decoder. `stop` holds the stop strings; special tokens are not shown.

    Where several stop strings come into question, the one that is complete first wins, and of those complete
    with the same character the one that begins first: the result is known as soon as any has appeared.

    The text of the first min_tokens ids is shown as it comes: no stop string is looked for in it.

    stopped  the stop string that was met, or None. It is never part of the text.
    """

    def __init__(
        self, tokenizer: TokenDecoder, prompt_ids: Sequence[int], stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        # A byte-level tokenizer knows the bytes of every token, so any id tells which kind this one is.
        byte_level = tokenizer.token_bytes(0) is not None
        self._decoder = (_ByteDecoder if byte_level else _TextDecoder)(tokenizer, prompt_ids)
        self._stops, self._has_stops = _StopFinder(stop), bool(stop)
        self._min_tokens = min_tokens
        self._ends: list[int] = []  # characters of text after each pushed id
        self._length = 0  # characters of text so far, held back ones included
        self._kept = 0
        self.stopped: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown now; "" after a stop."""
        if self.stopped is not None:
            return ""
        pieces, ends, length = [], self._ends, self._length
        unsearched = max(0, self._min_tokens - len(ends)) if self._has_stops else len(ids)
        for token_id in ids:
            piece = self._decoder.push(token_id)
            length += len(piece)
            ends.append(length)
            pieces.append(piece)
        self._length = length
        text = "".join(pieces[:unsearched])
        if len(pieces) > unsearched:
            shown, self.stopped = self._stops.push("".join(pieces[unsearched:]))
            text += shown
        self._kept += len(text)
        return text

    def finish(self) -> str:
        """What was still held back, for a request that ended without a stop string; "" after one."""
        if self.stopped is not None or not self._ends:  # nothing was pushed: what is held back is the prompt's
            return ""
        rest = self._decoder.finish()
        if rest:
            self._length += len(rest)
            self._ends[-1] = self._length
        if len(self._ends) < self._min_tokens:
            text = rest
        else:
            text, self.stopped = self._stops.push(rest)
            text += self._stops.finish()
        self._kept += len(text)
        return text

    @property
    def kept_tokens(self) -> int:
        """How many of the pushed ids the kept text covers.

        After a stop: up to the last id of which the kept text shows anything. Otherwise all of them.
        """
        if self.stopped is None:
            return len(self._ends)
        shown = bisect_left(self._ends, self._kept) + 1 if self._kept else 0
        return max(shown, self._min_tokens)

    @property
    def shown_tokens(self) -> int:
        """How many of the pushed ids, counted from the first, the text so far shows in full."""
        return self.kept_tokens if self.stopped is not None else bisect_right(self._ends, self._kept)


class _ByteDecoder:
    """Byte-level tokens: incremental UTF-8 over their bytes."""

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._pending = self._prompt_tail(prompt_ids)
        self._broken = self._pending.decode("utf-8", "replace")  # what the prompt's half is if never completed

    def push(self, token_id: int) -> str:
        # An id in a padded part of the vocabulary has no bytes and shows nothing.
        data = self._pending + (self._token_bytes(token_id) or b"")
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._broken and text:
            completed = text[0] != REPLACEMENT or data.startswith(REPLACEMENT.encode())
            text = text if completed else text[len(self._broken) :]
            self._broken = ""
        return text

    def finish(self) -> str:
        """Nothing: what is pending is part of a character, and half characters are not shown."""
        return ""

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes at the prompt's end that only begin a character; b"" where it ends with a whole one."""
        tail = b""
        for token_id in reversed(prompt_ids):
            data = self._token_bytes(token_id)
            if not data:  # no character extends over a special token
                break
            tail = data + tail
            if len(tail) >= _MAX_UTF8:
                break
        # Cut within a character, the first bytes may decode to U+FFFD; only where the decoding stops matters.
        return tail[utf_8_decode(tail, "replace", False)[1] :]


class _TextDecoder:
    """Other tokenizers: the difference between two decodes of a short window of ids.

    The window begins a few tokens before the output, because what a token looks like may depend on its
    neighbour (a leading space, bytes that join into a character).
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        # _shown is the text of the window's first _num_shown ids, which the reader has.
        self._window, self._num_shown, self._shown = self._prompt_window(prompt_ids)
        self._from_prompt = self._num_shown < len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(REPLACEMENT))
        if 0 < broken <= _MAX_BROKEN or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        if self._from_prompt:  # still broken: the half that the prompt began did not become a character
            self._from_prompt = False
            new = new.lstrip(REPLACEMENT)
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def finish(self) -> str:
        """The text before a character that never became whole."""
        return self._decode(self._window).rstrip(REPLACEMENT)[len(self._shown) :]

    def _prompt_window(self, prompt_ids: Sequence[int]) -> tuple[list[int], int, str]:
        """The prompt's last ids from the start of a character on; how many of them make whole ones; their text."""
        for length in range(_CONTEXT, _CONTEXT + _MAX_UTF8):
            window = list(prompt_ids[-length:])
            for cut in range(min(_MAX_UTF8, len(window) + 1)):
                whole = len(window) - cut
                text = self._decode(window[:whole])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return window, whole, text
        return [], 0, ""  # bytes without a character: nothing that the output could join


class _StopFinder:
    """Cuts a text that arrives in pieces before the first stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text to show, the stop string met or None). After a stop the rest of the text is gone."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            return text[: best[1]], best[2]
        cut = self._safe_length(text)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text

    def _safe_length(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(text)
