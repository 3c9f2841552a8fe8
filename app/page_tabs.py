"""Which of a tab's events may still show something: the newest one, and only for the chat that the tab shows."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

REMEMBERED = 10_000  # tabs; of the least recently used the server forgets what they show, so they ask anew


class Tab(NamedTuple):
    """Where an event comes from. session: one load of the page in one tab, as Gradio calls it. choice: how often the
    reader had turned to a chat there; an event of fewer times than the tab has seen comes late."""

    session: str
    choice: int = 0


class _Shown(NamedTuple):
    number: int
    chat: str
    choice: int


_NOTHING = _Shown(0, "", 0)


class Tabs:
    """Numbers grow with every event, so the greatest is the newest."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, _Shown] = OrderedDict()
        self._events = 0

    def show(self, tab: Tab, chat: str) -> int:
        """An event is about to show `chat` in this tab; returns its number, or 0 if the reader has turned elsewhere."""
        if self.has_turned(tab):
            return 0
        self._events += 1
        self._newest[tab.session] = _Shown(self._events, chat, tab.choice)
        self._newest.move_to_end(tab.session)
        while len(self._newest) > REMEMBERED:
            self._newest.popitem(last=False)
        return self._events

    def follow(self, tab: Tab, chat: str) -> int:
        """An event is about to follow `chat`'s reply; its number, or 0 if the tab shows another chat by now."""
        return self.show(tab, chat) if self.shows(tab) == chat else 0

    def shows(self, tab: Tab) -> str | None:
        """The chat that the tab's newest event shows ("": a new one), None if the tab is not known."""
        return self._newest[tab.session].chat if tab.session in self._newest else None

    def has_turned(self, tab: Tab) -> bool:
        """Whether the reader has turned to a chat since the event was sent."""
        return tab.choice < self._newest.get(tab.session, _NOTHING).choice

    def newest(self, tab: Tab) -> int:
        """The number of the tab's newest event, 0 if the tab is not known."""
        return self._newest.get(tab.session, _NOTHING).number

    def is_newest(self, tab: Tab, number: int) -> bool:
        return number > 0 and self.newest(tab) == number
