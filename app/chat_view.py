"""How an open chat becomes the messages of gr.Chatbot, and how a message's index leads back to its turn.

A reply is up to three messages of one bubble: its thinking (folded), its answer, and the line of figures with the
links that act on it. Long chats show their last WINDOW turns; the rest comes with "load older".
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from app.chat import ChatView, JobSnapshot, TurnView

# All that ASCII has beside letters, digits and spaces, line breaks too: whatever begins a line begins none.
_MARKUP = {code: f"&#{code};" for code in range(128) if not chr(code).isalnum() and chr(code) != " "}
WINDOW = 40  # turns; at 12 updates a second 200 of them kept a browser's main thread 70 % busy


@dataclass(slots=True)
class Rendered:
    """messages: the Chatbot's value; turns[i]: the turn that messages[i] belongs to; first: id of the oldest turn
    shown (0: none); hidden: how many older ones are not."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[TurnView] = field(default_factory=list)
    first: int = 0
    hidden: int = 0


def render(
    view: ChatView,
    first: int = 0,
    snapshot: JobSnapshot | None = None,
    known: dict[int, list[dict[str, Any]]] | None = None,
) -> Rendered:
    """The chat's branch from turn `first` on (0, or a turn of another branch: its last WINDOW turns).

    `snapshot` replaces the text of the turn that it tells of. known: messages by turn, of this view, which it fills.
    """
    known = {} if known is None else known
    start = next((i for i, turn in enumerate(view.turns) if turn.id == first), max(0, len(view.turns) - WINDOW))
    shown = view.turns[start:]
    rendered = Rendered(first=shown[0].id if shown else 0, hidden=start)
    asked: TurnView | None = None
    for turn in shown:
        if turn.role == "user":
            asked = turn
        if snapshot is not None and snapshot.turn_id == turn.id and not snapshot.done:
            messages = _running(snapshot)
        elif turn.id in known:
            messages = known[turn.id]
        else:
            is_user = turn.role == "user"
            messages = known[turn.id] = [_message(as_typed(turn.text), "user")] if is_user else _reply(turn, asked)
        rendered.messages += messages
        rendered.turns += [turn] * len(messages)
    return rendered


def as_typed(text: str) -> str:
    """A user's text such that the page shows it as it was typed: the Chatbot takes every message for Markdown with
    HTML, of which tags vanish and __init__ turns bold. assets/page.js reads it back, for the edit box and for copies,
    by the seven digits of the first character."""
    return f"&#{ord(text[0]):07d};{text[1:].translate(_MARKUP)}" if text else ""


def older(view: ChatView, first: int) -> int:
    """The id to render from so that WINDOW more turns show than from turn `first` on."""
    start = next((i for i, turn in enumerate(view.turns) if turn.id == first), len(view.turns))
    return view.turns[max(0, start - WINDOW)].id if view.turns else 0


def _reply(turn: TurnView, asked: TurnView | None) -> list[dict[str, Any]]:
    split = turn.split
    messages = []
    if split.thinking:
        title = "Thoughts" if split.closed else "Thoughts (cut off)"
        messages.append(_message(split.thinking, title=title, status="done"))
    if split.answer:
        messages.append(_message(split.answer))
    line = turn.line or {"cut": "cut off: the server ended during this reply", "error": "error"}.get(turn.status, "")
    parts = [f'<span class="pt-figures">{html.escape(line)}</span>'] if line else []
    parts += [_note(note) for note in (*turn.notes, *_unsaved(turn.unsaved))]
    links = _links(turn, asked)
    if links:
        parts.append(f'<span class="pt-links">{links}</span>')
    messages.append(_message(f'<span class="pt-line">{"".join(parts)}</span>'))
    return messages


def _running(snapshot: JobSnapshot) -> list[dict[str, Any]]:
    split = snapshot.split
    messages = []
    if split.thinking:
        title, status = ("Thoughts", "done") if split.closed else ("Thinking…", "pending")
        messages.append(_message(split.thinking, title=title, status=status))
    if split.answer:
        messages.append(_message(split.answer))
    if not messages:
        messages.append(_message(f'<span class="pt-line"><span class="pt-pending">{_progress(snapshot)}</span></span>'))
    messages += [_message(f'<span class="pt-line">{_note(words)}</span>') for words in _unsaved(snapshot.unsaved)]
    return messages


def _note(words: str) -> str:
    return f'<span class="pt-note">{html.escape(words)}</span>'


def _unsaved(reason: str) -> list[str]:
    """What is said of a reply that is not on disk, for the database's `reason`; nothing for ""."""
    when = "there is room" if "full" in reason else "that works"
    return [f"not on disk yet: {reason}; it is saved as soon as {when}"] if reason else []


def _progress(snapshot: JobSnapshot) -> str:
    prefill = f"prefill {snapshot.computed_tokens:,} / {snapshot.prompt_tokens:,}" if snapshot.prompt_tokens else ""
    if snapshot.phase == "waiting":
        return f"waiting for the engine… {prefill}"
    return prefill if snapshot.phase == "prefill" and prefill else "…"


def _links(turn: TurnView, asked: TurnView | None) -> str:
    """Links that assets/page.js turns into actions; a forged one in a reply can only act on the reader's own chat."""
    links = []
    if turn.can_continue:
        links.append(f'<a href="#pt-continue-{turn.id}">Continue</a>')
    links.append(f'<a href="#pt-retry-{turn.id}">Regenerate</a>')
    for name, branch in (("message", asked), ("reply", turn)):
        if branch is not None and len(branch.siblings) > 1:
            at = branch.siblings.index(branch.id)
            if at > 0:
                links.append(f'<a href="#pt-branch-{branch.siblings[at - 1]}" title="earlier {name}">‹</a>')
            links.append(f"<span>{name} {at + 1}/{len(branch.siblings)}</span>")
            if at + 1 < len(branch.siblings):
                links.append(f'<a href="#pt-branch-{branch.siblings[at + 1]}" title="later {name}">›</a>')
    return " ".join(links)


def _message(text: str, role: str = "assistant", **metadata: str) -> dict[str, Any]:
    """As a part of a message: of one that is a string gr.Chatbot takes the indentation and the tabs away."""
    message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": text}]}
    if metadata:
        message["metadata"] = metadata
    return message
