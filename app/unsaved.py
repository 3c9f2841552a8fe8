"""Unsaved: ended replies whose last save failed, kept in memory and tried again until they are on disk.

A full disk must not cost what the engine has said. Of a chat there is one such reply at most: no other begins there
before it is on disk, since it would answer a text that a crash could still take back.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from app.records import TurnRow
from app.store import NotFound, Store, StoreError

log = logging.getLogger(__name__)

RETRY_EVERY_S = 3.0


@dataclass(slots=True)
class UnsavedReply:
    """turn: the row as it is to be stored, with its last status and figures. reason: why it is not on disk, in the
    database's words. settled: set once it is stored, or its chat deleted."""

    user: str
    chat_id: str
    turn: TurnRow
    reason: str
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def over(self, turns: Sequence[TurnRow]) -> list[TurnRow]:
        """The chat's rows as they will be once this one is stored."""
        mine = self.turn
        return [
            # The place in the tree and the time are the database's to give.
            replace(mine, parent=turn.parent, created=turn.created) if turn.id == mine.id else turn
            for turn in turns
        ]

    async def settled_within(self, seconds: float) -> bool:
        """Wait at most as long; whether it is settled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.settled.wait()
        return self.settled.is_set()


class Unsaved:
    """The unsaved replies by chat. Lives on one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._replies: dict[str, UnsavedReply] = {}
        self._retrying: asyncio.Task[None] | None = None

    def get(self, chat_id: str) -> UnsavedReply | None:
        """The chat's unsaved reply."""
        return self._replies.get(chat_id)

    def keep(self, reply: UnsavedReply) -> None:
        """Show `reply` from now on as its chat's, and try to store it every RETRY_EVERY_S seconds."""
        self._replies[reply.chat_id] = reply
        if self._retrying is None or self._retrying.done():
            self._retrying = asyncio.create_task(self._retry(), name="unsaved-replies")

    async def save(self, chat_id: str) -> UnsavedReply | None:
        """Try now; returns the chat's reply if it still is not on disk."""
        reply = self._replies.get(chat_id)
        if reply is None:
            return None
        try:
            # Handed to the writer before anything else may happen: a later write to this turn comes after it there.
            await self._store.save_turn(reply.user, chat_id, reply.turn)
        except NotFound:
            log.info("turn %d is gone, its reply is dropped", reply.turn.id)
        except (sqlite3.Error, StoreError) as error:
            if str(error) != reply.reason:  # what it was kept for is in the log
                log.warning("the reply of turn %d cannot be saved: %s", reply.turn.id, error)
                reply.reason = str(error)
            return self._replies.get(chat_id)
        else:
            log.warning("the reply of turn %d is saved now", reply.turn.id)
        if self._replies.get(chat_id) is reply:
            self.drop(chat_id)
        return None

    def drop(self, chat_id: str) -> None:
        """Forget the chat's reply: it is stored, or its chat was deleted."""
        if reply := self._replies.pop(chat_id, None):
            reply.settled.set()

    async def close(self) -> None:
        """Try all a last time, and no more."""
        if self._retrying is not None:
            self._retrying.cancel()
        for chat_id in list(self._replies):
            if reply := await self.save(chat_id):
                log.error("the end of the reply of turn %d is lost: %s", reply.turn.id, reply.reason)
                self.drop(chat_id)

    async def _retry(self) -> None:
        while self._replies:
            await asyncio.sleep(RETRY_EVERY_S)
            for chat_id in list(self._replies):
                await self.save(chat_id)
