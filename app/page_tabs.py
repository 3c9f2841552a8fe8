"""Which of a tab's events may still show something: the newest one, and only for the chat that the tab shows."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 10_000  # tabs; of the least recently used the server forgets what they show, so they ask anew


class Tabs:
    """A tab is known by Gradio's session hash. Numbers grow with every event, so the greatest is the newest."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._events = 0

    def show(self, session: str, chat: str) -> int:
        """An event is about to show `chat` in this tab; returns its number."""
        self._events += 1
        self._newest[session] = (self._events, chat)
        self._newest.move_to_end(session)
        while len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return self._events

    def follow(self, session: str, chat: str) -> int:
        """An event is about to follow `chat`'s reply; its number, or 0 if the tab shows another chat by now."""
        return self.show(session, chat) if self.shows(session) == chat else 0

    def shows(self, session: str) -> str | None:
        """The chat that the tab's newest event shows ("": a new one), None if the tab is not known."""
        return self._newest.get(session, (0, None))[1]

    def is_newest(self, session: str, number: int) -> bool:
        return self._newest.get(session, (0, ""))[0] == number
