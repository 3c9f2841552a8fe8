"""One blank page becomes one chat, however quickly its first message is sent twice."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

REMEMBERED = 1_000  # blank pages; of the oldest the server forgets what became of them
_BLANK = re.compile(r"new-[0-9a-f]{16}")


@dataclass(slots=True)
class BlankPage:
    """chat: the id of the chat that it became, "" before; text: that chat's first message."""

    chat: str = ""
    text: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class NewChats:
    """A page on which no chat is open names itself "new-" and 16 hex digits until it shows one."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, str], BlankPage] = OrderedDict()

    @asynccontextmanager
    async def page(self, user: str, target: str) -> AsyncIterator[BlankPage]:
        """The blank page that `target` names (any other text: one of its own), held while its message is sent."""
        page = BlankPage()
        if _BLANK.fullmatch(target):
            page = self._pages.setdefault((user, target), page)
            while len(self._pages) > REMEMBERED:
                self._pages.popitem(last=False)
        async with page.lock:
            yield page
