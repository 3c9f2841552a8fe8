"""Job: one generation, owned by the server and only watched by pages."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app.figures import Figures, figures_line
from app.records import TurnRow
from app.store import NotFound, Store, StoreError
from app.thinking import ThinkingSplit, split_thinking

if TYPE_CHECKING:
    from engine.outputs import Delta
    from engine.request_stream import RequestStream

log = logging.getLogger(__name__)

UPDATES_PER_SECOND = 12
SAVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """What a watcher sees at one moment.

    text            the whole reply so far (after "continue": the earlier part included)
    phase           "waiting" (queued) | "prefill" | "decode" | "done" (ended; stored, where `unsaved` is "")
    computed_tokens prompt tokens whose KV exists, of prompt_tokens: "prefill 4,096 / 9,000"
    status          the turn's status: "running", then "done" | "stopped" | "cut" | "error"
    block_table     the sequence's physical block ids, in logical order; [] until the first token
    unsaved         why the last save failed ("database or disk is full"), "" where it did not
    """

    chat_id: str
    turn_id: int
    text: str
    phase: str
    computed_tokens: int
    prompt_tokens: int
    status: str
    figures: Figures
    block_table: list[int] = field(default_factory=list)
    unsaved: str = ""

    @property
    def done(self) -> bool:
        return self.phase == "done"

    @property
    def split(self) -> ThinkingSplit:
        """(thinking, answer, closed) of the text."""
        return split_thinking(self.text)

    @property
    def line(self) -> str:
        """The figures line; while it runs without its last word."""
        return figures_line(self.figures)


class Job:
    """One running generation. It ends by itself, by `stop`, by deletion of its chat, by shutdown, or when
    nobody watched it for `abandon_after` seconds; never because a watcher left. Lives on one event loop."""

    def __init__(
        self,
        store: Store,
        user: str,
        chat_id: str,
        turn: TurnRow,
        stream: RequestStream,
        figures: Figures,
        *,
        owner: int,
        wanted_tokens: int | None,
        abandon_after: float | None,
        on_end: Callable[[Job], None],
    ) -> None:
        """Start at once. turn: the reply as stored, its text and ids so far included. wanted_tokens: the user's
        limit on new tokens (None: none), which tells a full context from a reached limit. on_end is called once the
        end was stored; where that failed, `unsaved` says why, and `turn` is what is still to be stored."""
        self.user = user
        self.chat_id = chat_id
        self.turn_id = turn.id
        self.owner = owner
        self._store = store
        self._turn = turn
        self._stream = stream
        self._figures = figures
        self._wanted_tokens = wanted_tokens
        self._abandon_after = abandon_after
        self._on_end = on_end
        self._pieces = [turn.text]
        self._ids_before = list(turn.reply)
        self._new_ids: list[int] = []
        self._phase = "waiting"
        self._computed_tokens = 0
        self._block_table: list[int] = []
        self._unsaved = ""
        self._cut_by = ""
        self._started = time.perf_counter()
        self._changed = False
        self._watchers: set[asyncio.Event] = set()
        self._ended = asyncio.Event()
        self._abandonment: asyncio.TimerHandle | None = None
        self._count_down()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"job-{turn.id}")

    @property
    def done(self) -> bool:
        """The reply has ended; it is stored, unless `unsaved` says why not."""
        return self._phase == "done"

    @property
    def num_watchers(self) -> int:
        """How many watch it now."""
        return len(self._watchers)

    @property
    def turn(self) -> TurnRow:
        """The row of the reply, as the last save had it."""
        return self._turn

    @property
    def unsaved(self) -> str:
        """Why the last save failed; "" where it did not."""
        return self._unsaved

    def snapshot(self) -> JobSnapshot:
        """The present state, without waiting."""
        return JobSnapshot(
            chat_id=self.chat_id,
            turn_id=self.turn_id,
            text=self._text(),
            phase=self._phase,
            computed_tokens=self._computed_tokens,
            prompt_tokens=self._figures.prompt_tokens,
            status=self._turn.status,
            figures=replace(self._figures),
            block_table=list(self._block_table),
            unsaved=self._unsaved,
        )

    async def watch(self) -> AsyncGenerator[JobSnapshot, None]:
        """`async for snapshot in job.watch()`: the present state at once, then changes at most UPDATES_PER_SECOND
        times a second, the last one with done=True. Any number may watch; leaving ends nothing. On a finished job
        it yields the final snapshot and ends."""
        # Each watcher has its own event: one shared event would be cleared by whoever wakes first.
        changed = asyncio.Event()
        self._watchers.add(changed)
        self._count_down()
        try:
            while True:
                changed.clear()
                snapshot = self.snapshot()
                yield snapshot
                if snapshot.done:
                    return
                await _wait(self._ended, 1 / UPDATES_PER_SECOND)
                await changed.wait()
        finally:
            self._watchers.discard(changed)
            self._count_down()

    def stop(self, cut_by: str = "user") -> None:
        """Ask the engine to free the request now; the final text and figures still reach the watchers. cut_by: who
        ends it, as in Figures. A second call does nothing."""
        if not self._cut_by and not self.done:
            self._cut_by = cut_by
            self._stream.abort()

    async def wait(self) -> JobSnapshot:
        """The final snapshot, once the reply has ended and was stored or could not be."""
        await self._ended.wait()
        return self.snapshot()

    # -- the generation ----------------------------------------------------------------------------------------
    async def _run(self) -> None:
        saver = asyncio.create_task(self._save_regularly())
        try:
            async for delta in self._stream:
                self._take(delta)
            if not self._figures.finish:
                raise RuntimeError("the engine's stream ended without a reason")
        except Exception as error:
            # Whatever broke belongs under the reply, where the user looks; the log gets the traceback.
            log.exception("the reply of turn %d broke off", self.turn_id)
            self._figures.finish, self._figures.error = "error", str(error) or type(error).__name__
        saver.cancel()
        self._figures.seconds = time.perf_counter() - self._started
        self._turn.status = _status(self._figures)
        await self._save()
        self._phase = "done"
        if self._abandonment is not None:
            self._abandonment.cancel()
        self._on_end(self)
        self._ended.set()
        self._wake_watchers()

    def _take(self, delta: Delta) -> None:
        figures = self._figures
        self._pieces.append(delta.text)
        self._new_ids.extend(delta.token_ids)
        # A stop string takes back ids that were already handed over.
        del self._new_ids[delta.num_output_tokens :]
        figures.output_tokens = len(self._new_ids)
        figures.prompt_tokens = delta.num_prompt_tokens or figures.prompt_tokens
        figures.cached_tokens = delta.num_cached_tokens
        figures.ttft = delta.metrics.ttft
        figures.decode_rate = delta.metrics.decode_rate(len(self._new_ids))
        figures.num_preemptions = delta.metrics.num_preemptions
        self._computed_tokens = delta.num_computed_tokens
        if delta.block_table is not None:
            self._block_table = delta.block_table
        if figures.ttft > 0:
            self._phase = "decode"
        elif delta.num_computed_tokens:
            self._phase = "prefill"
        if delta.finish_reason is not None:
            figures.finish, figures.error = delta.finish_reason, delta.error
            figures.stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            figures.context_full = delta.finish_reason == "length" and (
                self._wanted_tokens is None or len(self._new_ids) < self._wanted_tokens
            )
            # The engine's own shutdown ends requests with "abort" too.
            figures.cut_by = (self._cut_by or "shutdown") if delta.finish_reason == "abort" else ""
        self._changed = True
        self._wake_watchers()

    def _text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()

    # -- what keeps it -----------------------------------------------------------------------------------------
    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            if self._changed:
                self._changed = False
                await self._save()

    async def _save(self) -> None:
        turn = self._turn
        turn.text, turn.reply = self._text(), self._ids_before + self._new_ids
        turn.figures = self._figures.to_json()
        fault = ""
        try:
            await self._store.save_turn(self.user, self.chat_id, turn)
        except NotFound:
            # The chat was deleted while it answered: there is nothing left to keep.
            log.info("turn %d is gone, its reply is dropped", self.turn_id)
        except (sqlite3.Error, StoreError) as error:
            # A full disk must not end the reply; the page says that it is not kept, and the next save tries again.
            fault = str(error)
            if fault != self._unsaved:
                log.exception("the reply of turn %d could not be saved", self.turn_id)
            self._changed = True
        if fault != self._unsaved:
            self._unsaved = fault
            self._wake_watchers()

    def _count_down(self) -> None:
        """Start, or with a watcher present stop, the clock after which an unwatched job ends."""
        if self._abandonment is not None:
            self._abandonment.cancel()
            self._abandonment = None
        if self._abandon_after is not None and not self._watchers and not self.done:
            loop = asyncio.get_running_loop()
            self._abandonment = loop.call_later(self._abandon_after, self.stop, "abandoned")


def _status(figures: Figures) -> str:
    if figures.finish == "error":
        return "error"
    if figures.finish == "abort":
        return "cut" if figures.cut_by == "shutdown" else "stopped"
    return "done"


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until the event or the time, whichever is first."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
