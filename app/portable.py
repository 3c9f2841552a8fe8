"""A chat as JSON data, out and in again. Token ids stay behind: they mean nothing to another model, and what comes
in from a file must not be able to put arbitrary ids before the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.chat_settings import DEFAULTS
from app.records import ChatRow, TurnRow, newest_leaf
from app.text import MAX_MESSAGE_CHARS, MAX_TITLE_CHARS, storable
from engine.shown import shown

FORMAT, VERSION = "pageturn-chat", 1
MAX_TURNS = 10_000
_STATUSES = ("done", "cut", "stopped", "error")


def to_portable(chat: ChatRow, turns: Sequence[TurnRow]) -> dict[str, Any]:
    """All branches; ids are positions in "turns", a parent stands before its children."""
    position = {turn.id: index for index, turn in enumerate(turns)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": chat.title,
        "created": chat.created,
        "settings": chat.settings,
        "open": position.get(chat.leaf) if chat.leaf is not None else None,
        "turns": [
            {
                "parent": None if turn.parent is None else position[turn.parent],
                "role": turn.role,
                "text": turn.text,
                "status": "cut" if turn.status == "running" else turn.status,
                "created": turn.created,
                "figures": turn.figures,
            }
            for turn in turns
        ],
    }


def from_portable(data: Any) -> tuple[str, dict[str, Any], list[TurnRow], int | None]:
    """(title, settings, turns, open leaf) of what `to_portable` wrote, every value checked. Raises ValueError naming
    the first thing that is wrong. The open leaf is the newest one at or below "open": what is sent next goes under it,
    and is shown only at a branch's end."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'this is not an exported chat: "format" must be "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version != VERSION:  # True and 1.0 equal 1
        raise ValueError(f'the exported chat has "version" {shown(version)}; this PageTurn reads {VERSION}')
    title = data.get("title")
    if not isinstance(title, str) or len(title) > MAX_TITLE_CHARS:
        raise ValueError(f'"title" must be a string of at most {MAX_TITLE_CHARS} characters')
    settings = data.get("settings")
    if not isinstance(settings, dict):
        raise ValueError('"settings" must be an object')
    checked = DEFAULTS.changed(settings)
    settings = {name: getattr(checked, name) for name in settings}
    rows = data.get("turns")
    if not isinstance(rows, list) or len(rows) > MAX_TURNS:
        raise ValueError(f'"turns" must be a list of at most {MAX_TURNS:,} turns')
    turns: list[TurnRow] = []
    for index, row in enumerate(rows):
        turns.append(_turn(index, row, turns))
    answered = {turn.parent for turn in turns}
    for turn in turns:
        # Chats have none: a message is stored with its reply. The next one would stand under this one, as a reply.
        if turn.role == "user" and turn.id not in answered:
            way_on = f'add a turn with "parent" {turn.id} and "role" "assistant" (its "text" may be "")'
            raise ValueError(f'turns[{turn.id}] has "role" "user" and no reply under it: {way_on}, or leave it out')
    leaf = data.get("open")
    if leaf is not None and not _is_index(leaf, len(turns)):
        raise ValueError(f'"open" is {shown(leaf)}; it must be null or a position from 0 to {len(turns) - 1}')
    if leaf is not None:
        leaf = newest_leaf(((turn.id, turn.parent) for turn in turns), leaf)
    return storable(title), settings, turns, leaf


def _turn(index: int, row: Any, earlier: Sequence[TurnRow]) -> TurnRow:
    where = f"turns[{index}]"
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object")
    parent, role, text, status = row.get("parent"), row.get("role"), row.get("text"), row.get("status", "done")
    if parent is not None and not _is_index(parent, index):
        raise ValueError(f'{where} has "parent" {shown(parent)}; it must be null or the position of an earlier turn')
    expected = "user" if parent is None or earlier[parent].role == "assistant" else "assistant"
    if role != expected:
        raise ValueError(f'{where} has "role" {shown(role)}; here it must be "{expected}"')
    if not isinstance(text, str) or len(text) > MAX_MESSAGE_CHARS:
        raise ValueError(f'{where} has a "text" that is not a string of at most {MAX_MESSAGE_CHARS:,} characters')
    if status not in _STATUSES:
        raise ValueError(f'{where} has "status" {shown(status)}; it must be one of {", ".join(_STATUSES)}')
    created = row.get("created", 0.0)
    if isinstance(created, bool) or not isinstance(created, (int, float)) or not 0 <= created < 1e11:
        raise ValueError(f'{where} has "created" {shown(created)}; it must be seconds since 1970')
    # Figures are what another server measured: not taken over, they could say anything.
    return TurnRow(id=index, parent=parent, role=expected, text=storable(text), status=status, created=float(created))


def _is_index(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count
