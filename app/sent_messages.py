"""A message that a page sends is taken once, however often it comes, and a page without a chat becomes one chat."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

REMEMBERED = 10_000  # messages, and pages that they were sent from; the oldest are forgotten
BLANK = re.compile(r"new-[0-9a-f]{16}")  # what a page without a chat calls itself until it shows one
_NAME = re.compile(r"[0-9a-f]{16}")  # of a message
_TARGET = re.compile(r"[\w-]{1,64}", re.ASCII)  # what a chat's id and a page's name are; nothing longer is remembered


@dataclass(slots=True)
class _Page:
    """chat: the id of the chat that a page without one became, "" before. The lock is held while it sends."""

    chat: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SentMessages:
    """Of every user by the names that their pages gave them; texts that are no such names stand for nothing."""

    def __init__(self) -> None:
        self._taken: OrderedDict[tuple[str, str], str] = OrderedDict()  # (user, message): the chat that took it
        # (user, chat or page without one, or message)
        self._pages: OrderedDict[tuple[str, str], _Page] = OrderedDict()

    @asynccontextmanager
    async def sending(self, user: str, target: str, name: str) -> AsyncIterator[_Page]:
        """The page that sends the message `name` to `target`, a chat or a page without one (any other text: one of its
        own): one message at a time, and a message to one target at a time (a copy of a tab has another one)."""
        message = self._page(user, f"message {name}") if _NAME.fullmatch(name) else _Page()
        page = self._page(user, target) if _TARGET.fullmatch(target) else _Page()
        async with message.lock, page.lock:
            yield page

    def _page(self, user: str, target: str) -> _Page:
        page = self._pages.setdefault((user, target), _Page())
        self._pages.move_to_end((user, target))
        while len(self._pages) > REMEMBERED:
            self._pages.popitem(last=False)
        return page

    def note(self, user: str, name: str, chat: str) -> None:
        """The chat has taken the message."""
        if _NAME.fullmatch(name):
            self._taken[user, name] = chat
            while len(self._taken) > REMEMBERED:
                self._taken.popitem(last=False)

    def taken_by(self, user: str, name: str) -> str:
        """The id of the chat that took the message, "" where none has."""
        return self._taken.get((user, name), "")

    async def became(self, user: str, target: str) -> str:
        """The id of the chat that the page without one became, "" where it has not; waits for what it is sending."""
        if (page := self._pages.get((user, target))) is None:
            return ""
        async with page.lock:
            return page.chat
