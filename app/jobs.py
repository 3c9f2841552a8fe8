"""Job: one generation, owned by the server and only watched by pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from app.figures import Figures, figures_line
from app.thinking import ThinkingSplit, split_thinking

UPDATES_PER_SECOND = 12


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """What a watcher sees at one moment.

    text            the whole reply so far (after "continue": the earlier part included)
    phase           "waiting" (queued) | "prefill" | "decode" | "done"
    computed_tokens prompt tokens whose KV exists, of prompt_tokens: "prefill 4,096 / 9,000"
    status          the turn's status: "running", then "done" | "stopped" | "cut" | "error"
    block_table     the sequence's physical block ids, in logical order; [] until the first token
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
    nobody watched it for `--abandon-after` seconds; never because a watcher left."""

    chat_id: str
    turn_id: int  # the assistant turn it writes
    owner: int  # the chat's owner slot, as stamped on KV blocks

    @property
    def done(self) -> bool:
        raise NotImplementedError

    def snapshot(self) -> JobSnapshot:
        """The present state, without waiting."""
        raise NotImplementedError

    def watch(self) -> AsyncIterator[JobSnapshot]:
        """`async for snapshot in job.watch()`: the present state at once, then changes at most
        UPDATES_PER_SECOND times a second, the last one with done=True. Any number may watch; leaving ends nothing.
        On a finished job it yields the final snapshot and ends."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask the engine to free the request now; the final text and figures still reach the watchers."""
        raise NotImplementedError

    async def wait(self) -> JobSnapshot:
        """The final snapshot, once the turn is stored."""
        raise NotImplementedError
