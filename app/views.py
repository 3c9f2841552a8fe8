"""What the page is shown of chats and turns, and the walks over the tree of turns that this needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app.chat_settings import ChatSettings
from app.figures import Figures, figures_line, notes
from app.records import TurnRow
from app.thinking import ThinkingSplit, split_thinking

if TYPE_CHECKING:
    from app.jobs import Job
    from app.unsaved import UnsavedReply


@dataclass(frozen=True, slots=True)
class ChatInfo:
    """One row of the list of chats. created, updated: seconds since the epoch. snippet: where a search hit, the
    text around it, else "". owner: its slot on KV blocks; 0 while it has none. leaf: see ChatView."""

    id: str
    title: str
    created: float
    updated: float
    answering: bool = False
    snippet: str = ""
    owner: int = 0
    leaf: int = 0


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn of the open branch.

    status      "done" | "running" | "stopped" | "cut" (the server ended in mid-reply) | "error"
    line        the figures line under a reply, "" for a user's turn
    notes       sentences on the prompt: older turns left out, replies encoded anew, the first differing token
    siblings    ids of the turns with the same parent, oldest first, this one among them: branches to `open_branch`
    can_continue  a reply that did not end by itself
    unsaved     why the text is not on disk, in the database's words; "" where it is
    """

    id: int
    role: str
    text: str
    status: str
    created: float
    figures: Figures | None = None
    line: str = ""
    notes: tuple[str, ...] = ()
    siblings: tuple[int, ...] = ()
    can_continue: bool = False
    unsaved: str = ""

    @property
    def split(self) -> ThinkingSplit:
        """(thinking, answer, closed) of the text."""
        return split_thinking(self.text)


@dataclass(frozen=True, slots=True)
class ChatView:
    """An open chat: the turns of its open branch, root first, the last one's id `leaf` (0: none yet). `job` is its
    running generation, whose turn (if on this branch) is the last of `turns`; `unsaved` its ended reply that is not on
    disk yet; `context_used` of `context_limit` tokens are taken (None: not known of replies that came from elsewhere;
    limit 0: not loaded)."""

    id: str
    title: str
    settings: ChatSettings
    turns: list[TurnView] = field(default_factory=list)
    job: Job | None = None
    unsaved: UnsavedReply | None = None
    owner: int = 0
    leaf: int = 0
    context_used: int | None = 0
    context_limit: int = 0


def context_used(branch: Sequence[TurnRow]) -> int | None:
    """Tokens, see ChatView."""
    replies = [turn for turn in branch if turn.role == "assistant"]
    last = next((turn.figures for turn in reversed(replies) if turn.figures), None)
    if last is None:
        return None if any(turn.status != "running" for turn in replies) else 0
    return last.get("prompt_tokens", 0) + last.get("output_tokens", 0)


def branch_to(turns: Sequence[TurnRow], leaf: int | None) -> list[TurnRow]:
    """The branch from the root to `leaf`; [] for None."""
    by_id = {turn.id: turn for turn in turns}
    branch: list[TurnRow] = []
    while leaf is not None:
        branch.append(by_id[leaf])
        leaf = by_id[leaf].parent
    return branch[::-1]


def can_continue(turn: TurnRow, turns: Sequence[TurnRow]) -> bool:
    """A reply that did not end by itself and that nothing followed."""
    return _unfinished(turn) and all(other.parent != turn.id for other in turns)


def turn_views(
    turns: Sequence[TurnRow], branch: Sequence[TurnRow], job: Job | None, unsaved: UnsavedReply | None = None
) -> list[TurnView]:
    """The branch as shown; the running reply as its job has it. The rows have `unsaved`'s turn as it ended."""
    children: dict[int | None, list[int]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn.id)
    views = []
    for turn in branch:
        running = job is not None and job.turn_id == turn.id
        view = TurnView(
            id=turn.id,
            role=turn.role,
            text=turn.text,
            # Marked as running but without a job: it never began.
            status="cut" if turn.status == "running" else turn.status,
            created=turn.created,
            siblings=tuple(children[turn.parent]),
            can_continue=not running and _unfinished(turn) and turn.id not in children,
            unsaved=unsaved.reason if unsaved is not None and unsaved.turn.id == turn.id else "",
        )
        if turn.role == "assistant":
            figures = Figures.from_json(turn.figures) if turn.figures else Figures()
            if running:
                assert job is not None
                snapshot = job.snapshot()
                figures = snapshot.figures
                view = replace(view, text=snapshot.text, status=snapshot.status, unsaved=snapshot.unsaved)
            elif view.status == "cut" and not figures.finish:
                # The server died without a last word; this is it.
                figures.finish, figures.cut_by = "abort", "shutdown"
            view = replace(view, figures=figures, line=figures_line(figures), notes=tuple(notes(figures)))
        views.append(view)
    return views


def _unfinished(turn: TurnRow) -> bool:
    finish = (turn.figures or {}).get("finish", "")
    return turn.role == "assistant" and (turn.status in ("stopped", "cut", "running", "error") or finish == "length")
