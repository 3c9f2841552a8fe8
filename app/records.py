"""ChatRow and TurnRow: what the database keeps of a chat and of a turn, and how ids become bytes."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat. settings: only what was changed. leaf: id of the open branch's last turn, None in an empty chat.
    named: the title was given by the user and stays."""

    id: str
    title: str
    named: bool
    settings: dict[str, Any]
    created: float
    updated: float
    leaf: int | None
    snippet: str = ""


@dataclass(slots=True)
class TurnRow:
    """One turn. For a reply: the prompt it answered is full_ids(the reply before it)[:common] + suffix, and `reply`
    are the ids it wrote; `fingerprint` names the tokenizer and template that these ids belong to, None: no ids."""

    id: int
    parent: int | None
    role: str
    text: str
    status: str = "done"
    created: float = 0.0
    figures: dict[str, Any] | None = None
    fingerprint: str | None = None
    common: int = 0
    suffix: Sequence[int] = field(default_factory=list)
    reply: Sequence[int] = field(default_factory=list)


def newest_leaf(turns: Iterable[tuple[int, int | None]], turn_id: int) -> int:
    """From a turn down to a leaf, the newest child each time. turns: (id, parent) of a chat's, oldest first."""
    newest_child = {parent: child for child, parent in turns}
    while turn_id in newest_child:
        turn_id = newest_child[turn_id]
    return turn_id


def full_ids(path: Sequence[TurnRow]) -> list[int]:
    """All ids of a branch (root first) up to its last reply: that reply's prompt and what it wrote. [] without one."""
    ids: list[int] = []
    for turn in path:
        if turn.role == "assistant":
            ids = [*ids[: turn.common], *turn.suffix, *turn.reply]
    return ids


def pack(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _unpack(blob: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(blob)
    return ids.tolist()


def chat_row(row: sqlite3.Row, snippet: str = "") -> ChatRow:
    settings = json.loads(row["settings"])
    return ChatRow(
        row["id"], row["title"], bool(row["named"]), settings, row["created"], row["updated"], row["leaf"], snippet
    )


def turn_row(row: sqlite3.Row) -> TurnRow:
    return TurnRow(
        id=row["id"],
        parent=row["parent"],
        role=row["role"],
        text=row["text"],
        status=row["status"],
        created=row["created"],
        figures=None if row["figures"] is None else json.loads(row["figures"]),
        fingerprint=row["fingerprint"],
        common=row["common"],
        suffix=_unpack(row["suffix"]),
        reply=_unpack(row["reply"]),
    )
