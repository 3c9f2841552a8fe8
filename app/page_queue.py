"""PageQueue: Gradio's queue of events for a port that anyone can reach, and for more than forty tabs.

Gradio's own runs 40 events at a time, of which every tab that follows a reply holds one; it forgets the oldest of 2,000
sessions, though it streams; it keeps what nobody reads; and a session that it does not find ends the queue for all.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import gradio as gr
from fastapi import HTTPException
from gradio.queueing import Event, Queue
from gradio.utils import LRUCache

log = logging.getLogger("pageturn.page")

MAX_RUNNING = 1_000  # events at a time; a tab that follows a reply holds one
MAX_WAITING = 2_000
MAX_SESSIONS = 4_000  # loads of the page with events that run, wait or are not read
MAX_UNREAD = 100  # events of a session whose outcome its page has not read
UNREAD_SECONDS = 60.0  # after which a session that reads nothing makes room for others
POLL_SECONDS = 0.02  # between two looks for a new event; Gradio's millisecond costs an idle server 7 % of a core
_SESSION = re.compile(r"[\w-]{1,64}", re.ASCII)


class PageQueue(Queue):
    """Of one page. Its books by session: pending_messages_per_session, what is to be read; pending_event_ids_session,
    the events whose outcome was not read yet."""

    def __init__(self, blocks: gr.Blocks) -> None:
        super().__init__(
            live_updates=True,
            concurrency_count=MAX_RUNNING,
            update_intervals=1,
            max_size=MAX_WAITING,
            blocks=blocks,
            default_concurrency_limit=None,
        )
        # Full only of what _make_room() keeps, so that it drops nothing by itself.
        self.pending_messages_per_session = LRUCache(MAX_SESSIONS + 1)
        self.sleep_when_free = POLL_SECONDS
        self._last_event: dict[str, float] = {}  # by session; time.monotonic()

    async def push(self, body: Any, request: Any, username: str | None) -> Any:
        """Take an event. HTTPException 400 where its session is none that a page has, 429 where that reads nothing,
        503 where there is no room."""
        session = body.session_hash
        if not isinstance(session, str) or not _SESSION.fullmatch(session):
            raise HTTPException(400, "session_hash must be 1 to 64 letters, digits, - or _")
        if self._num_unread(session) >= MAX_UNREAD:
            raise HTTPException(429, f"{MAX_UNREAD} events of this page wait to be read: reload it")
        if session not in self.pending_messages_per_session:
            self._make_room()
            if len(self.pending_messages_per_session) >= MAX_SESSIONS:
                raise HTTPException(503, f"{MAX_SESSIONS:,} pages are busy, which is the limit: try again later")
        self._last_event[session] = time.monotonic()
        return await super().push(body, request, username)

    def _make_room(self) -> None:
        """Once many sessions are known, forget those that have nothing to read, and those that have not read for long
        what is there for them. Gradio makes a session anew with its next event."""
        sessions = self.pending_messages_per_session
        if len(self._last_event) < MAX_SESSIONS // 2:
            return
        waiting = [event for queue in self.event_queue_per_concurrency_id.values() for event in queue.queue]
        running = [event for job in self.active_jobs if job for event in job]
        busy = {event.session_hash for event in waiting + running if event.alive}
        long_ago = time.monotonic() - UNREAD_SECONDS
        for session in [s for s in sessions if s not in busy]:
            unread = self.pending_event_ids_session.get(session)
            if not unread or self._last_event.get(session, 0.0) < long_ago:
                del sessions[session]
        for session in [s for s in self._last_event if s not in sessions]:
            del self._last_event[session]
            self.pending_event_ids_session.pop(session, None)

    def _num_unread(self, session: str) -> int:
        unread = self.pending_event_ids_session.get(session, set())
        messages = self.pending_messages_per_session.get(session)
        if len(unread) >= MAX_UNREAD and (messages is None or messages.empty()):
            # All was read that there is: of the others the outcome went with a connection that broke.
            unread.intersection_update(self.event_ids_to_events)
        return len(unread)

    def send_message(self, event: Event, event_message: Any) -> None:
        """Nothing is sent to a session that has gone."""
        if event.session_hash in self.pending_messages_per_session:
            super().send_message(event, event_message)

    async def start_processing(self) -> None:
        """Until the server ends: a fault in here ends what runs, never what is to come."""
        while True:
            try:
                return await super().start_processing()
            except Exception:
                log.exception("the page's queue broke off; it begins anew")
                self.stopped = False

    def compute_analytics_summary(self, records: Any) -> dict[str, Any]:
        """Nobody looks at it, and it takes a table of all events for each one that fails."""
        return self.cached_event_analytics_summary
