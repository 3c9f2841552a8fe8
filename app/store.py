"""Store: users, chats, and each chat's turns as a tree with its token ids.

Every query names the user; what belongs to another user is not found. Writes go through the one writer thread and
return when they are committed; reads run on a worker thread. Imports neither torch nor Gradio.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from app.data_folder import DataFolder, DataFolderInUse, DataFolderUnwritable, StoreError
from app.database import Database, DatabaseCorrupt, DatabaseTooNew, Query, T
from app.records import ChatRow, TurnRow, chat_row, full_ids, newest_leaf, pack, turn_row

__all__ = [
    "ChatRow",
    "DataFolderInUse",
    "DataFolderUnwritable",
    "DatabaseCorrupt",
    "DatabaseTooNew",
    "NotFound",
    "Store",
    "StoreError",
    "TurnRow",
    "full_ids",
]

DATABASE_NAME = "pageturn.sqlite3"
SNIPPET_CHARS = 40  # shown before a search hit; twice as many after it


class NotFound(LookupError):
    """This user has no such chat or turn."""


class Store:
    """An open data folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Lock the folder and open its database. Raises StoreError: DataFolderUnwritable, DataFolderInUse,
        DatabaseCorrupt, DatabaseTooNew, each one line for the user. Replies that were running when the last server
        ended become "cut"."""
        self._folder = DataFolder(folder)
        try:
            self._db = Database(self._folder.path / DATABASE_NAME)
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        """Finish the writes handed in and give up the folder; a second call does nothing."""
        self._db.close()
        self._folder.close()

    async def _read(self, query: Query[T]) -> T:
        return await asyncio.to_thread(self._db.read, query)

    async def _write(self, query: Query[T], *, erase: bool = False) -> T:
        # A caller that goes away must not take a write out of the queue.
        return await asyncio.shield(asyncio.wrap_future(self._db.write(query, erase=erase)))

    # -- chats -------------------------------------------------------------------------------------------------
    async def create_chat(self, user: str, title: str = "") -> str:
        """Add an empty chat (and the user, if new); returns its id. A given title counts as named."""
        return await self._write(lambda db: _insert_chat(db, user, title, {}))

    async def chat(self, user: str, chat_id: str) -> ChatRow:
        """One chat; NotFound."""
        return await self._read(lambda db: chat_row(_own_chat(db, user, chat_id)))

    async def chats(self, user: str, limit: int, offset: int = 0) -> list[ChatRow]:
        """The user's chats, last updated first."""
        sql = "SELECT * FROM chats WHERE user_id = ? ORDER BY updated DESC, id LIMIT ? OFFSET ?"
        return await self._read(lambda db: [chat_row(row) for row in db.execute(sql, (user, limit, offset))])

    async def search(self, user: str, text: str, limit: int) -> list[ChatRow]:
        """Chats whose title or turns contain `text` in any case, last updated first, with the text around the hit.

        A plain scan of the user's own turns: it finds any substring in any script (FTS5's word index does not, for
        Chinese), and leaves no second copy of the text to delete.
        """
        needle = text.casefold()

        def query(db: sqlite3.Connection) -> list[ChatRow]:
            db.create_function("holds", 1, lambda value: needle in value.casefold(), deterministic=True)
            sql = """
                SELECT chats.*, (SELECT text FROM turns WHERE chat_id = chats.id AND holds(text) LIMIT 1) AS hit
                FROM chats WHERE user_id = ? AND (hit IS NOT NULL OR holds(title)) ORDER BY updated DESC, id LIMIT ?
            """
            return [chat_row(row, _snippet(row["hit"], needle)) for row in db.execute(sql, (user, limit))]

        return await self._read(query)

    async def rename(self, user: str, chat_id: str, title: str) -> None:
        """Set the title for good; NotFound."""
        await self._change_chat(user, chat_id, "title = ?, named = 1", title)

    async def set_settings(self, user: str, chat_id: str, settings: dict[str, Any]) -> None:
        """Replace the chat's settings; NotFound."""
        await self._change_chat(user, chat_id, "settings = ?", json.dumps(settings))

    async def count_chats(self, user: str) -> int:
        """How many the user has."""
        sql = "SELECT count(*) FROM chats WHERE user_id = ?"
        return await self._read(lambda db: db.execute(sql, (user,)).fetchone()[0])

    async def open_branch(self, user: str, chat_id: str, turn_id: int) -> None:
        """Open the branch through a turn of this chat, down to its newest leaf; NotFound."""

        def query(db: sqlite3.Connection) -> None:
            _own_turn(db, user, chat_id, turn_id)
            turns = db.execute("SELECT id, parent FROM turns WHERE chat_id = ? ORDER BY id", (chat_id,))
            leaf = newest_leaf(turns, turn_id)
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (leaf, chat_id))

        await self._write(query)

    async def delete_chat(self, user: str, chat_id: str) -> None:
        """Delete the chat and all its turns, from the file's bytes too; NotFound."""

        def query(db: sqlite3.Connection) -> None:
            _own_chat(db, user, chat_id)
            db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

        await self._write(query, erase=True)

    async def _change_chat(self, user: str, chat_id: str, assignment: str, value: Any) -> None:
        def query(db: sqlite3.Connection) -> None:
            changed = db.execute(
                f"UPDATE chats SET {assignment} WHERE id = ? AND user_id = ?", (value, chat_id, user)
            ).rowcount
            if not changed:
                raise NotFound(chat_id)

        await self._write(query)

    # -- turns -------------------------------------------------------------------------------------------------
    async def chat_and_turns(self, user: str, chat_id: str) -> tuple[ChatRow, list[TurnRow]]:
        """A chat with all turns of all its branches, oldest first (a parent stands before its children); NotFound."""

        def query(db: sqlite3.Connection) -> tuple[ChatRow, list[TurnRow]]:
            chat = chat_row(_own_chat(db, user, chat_id))
            rows = db.execute("SELECT * FROM turns WHERE chat_id = ? ORDER BY id", (chat_id,))
            return chat, [turn_row(row) for row in rows]

        return await self._read(query)

    async def path(self, user: str, chat_id: str, leaf: int | None) -> list[TurnRow]:
        """The branch from the root to `leaf`, both included; [] for None; NotFound."""

        def query(db: sqlite3.Connection) -> list[TurnRow]:
            _own_chat(db, user, chat_id)
            if leaf is None:
                return []
            _own_turn(db, user, chat_id, leaf)
            sql = """
                WITH RECURSIVE branch(id, parent) AS (
                    SELECT id, parent FROM turns WHERE id = ?
                    UNION ALL SELECT turns.id, turns.parent FROM turns JOIN branch ON turns.id = branch.parent
                ) SELECT turns.* FROM turns JOIN branch USING (id) ORDER BY id
            """
            return [turn_row(row) for row in db.execute(sql, (leaf,))]

        return await self._read(query)

    async def add_turns(self, user: str, chat_id: str, turns: Sequence[TurnRow], title: str = "") -> list[int]:
        """Append turns, each the child of the one before it, the first of `turns[0].parent`; the last becomes the
        open leaf. `title` replaces the chat's title unless the user named it. Returns the new ids; NotFound."""
        now = time.time()

        def query(db: sqlite3.Connection) -> list[int]:
            _own_chat(db, user, chat_id)
            parent = turns[0].parent
            if parent is not None:
                _own_turn(db, user, chat_id, parent)
            ids: list[int] = []
            for turn in turns:
                parent = _insert(db, chat_id, parent, turn, turn.created or now)
                ids.append(parent)
            db.execute("UPDATE chats SET leaf = ?, updated = ? WHERE id = ?", (parent, now, chat_id))
            if title:
                db.execute("UPDATE chats SET title = ? WHERE id = ? AND named = 0", (title, chat_id))
            return ids

        return await self._write(query)

    async def save_turn(self, user: str, chat_id: str, turn: TurnRow) -> None:
        """Store the present state of a reply (all but its id, parent and role); NotFound once it was deleted."""
        values, ended = (
            _values(turn),
            turn.status != "running",
        )  # now: the caller may go on changing the row while the write waits its turn

        def query(db: sqlite3.Connection) -> None:
            _own_turn(db, user, chat_id, turn.id)
            db.execute(
                "UPDATE turns SET text = ?, status = ?, figures = ?, fingerprint = ?, common = ?, suffix = ?, reply = ?"
                " WHERE id = ?",
                (*values, turn.id),
            )
            if ended:
                db.execute("UPDATE chats SET updated = ? WHERE id = ?", (time.time(), chat_id))

        await self._write(query)

    async def withdraw_turns(self, user: str, chat_id: str, turn_ids: Sequence[int], leaf: int | None) -> None:
        """Take back turns that were just added (a refused send) and open `leaf` again."""

        def query(db: sqlite3.Connection) -> None:
            _own_chat(db, user, chat_id)
            for turn_id in turn_ids:
                db.execute("DELETE FROM turns WHERE id = ? AND chat_id = ?", (turn_id, chat_id))
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (leaf, chat_id))

        await self._write(query)

    async def import_turns(
        self, user: str, title: str, settings: dict[str, Any], turns: Sequence[TurnRow], leaf: int | None
    ) -> str:
        """Add a chat with all branches at once. The turns' ids and parents are positions in `turns` (a parent before
        its children); returns the chat's id."""
        now = time.time()

        def query(db: sqlite3.Connection) -> str:
            chat_id = _insert_chat(db, user, title, settings)
            new_id: dict[int, int] = {}
            for turn in turns:
                parent = None if turn.parent is None else new_id[turn.parent]
                new_id[turn.id] = _insert(db, chat_id, parent, turn, turn.created or now)
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (None if leaf is None else new_id[leaf], chat_id))
            return chat_id

        return await self._write(query)


def _own_chat(db: sqlite3.Connection, user: str, chat_id: str) -> sqlite3.Row:
    row = db.execute("SELECT * FROM chats WHERE id = ? AND user_id = ?", (chat_id, user)).fetchone()
    if row is None:
        raise NotFound(chat_id)
    return row


def _own_turn(db: sqlite3.Connection, user: str, chat_id: str, turn_id: int) -> None:
    sql = """SELECT 1 FROM turns JOIN chats ON chats.id = turns.chat_id
             WHERE turns.id = ? AND chats.id = ? AND chats.user_id = ?"""
    if db.execute(sql, (turn_id, chat_id, user)).fetchone() is None:
        raise NotFound(turn_id)


def _insert_chat(db: sqlite3.Connection, user: str, title: str, settings: dict[str, Any]) -> str:
    chat_id, now = secrets.token_urlsafe(12), time.time()
    db.execute("INSERT OR IGNORE INTO users VALUES (?, ?)", (user, now))
    db.execute(
        "INSERT INTO chats (id, user_id, title, named, settings, created, updated) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (chat_id, user, title, bool(title), json.dumps(settings), now, now),
    )
    return chat_id


def _insert(db: sqlite3.Connection, chat_id: str, parent: int | None, turn: TurnRow, created: float) -> int:
    cursor = db.execute(
        "INSERT INTO turns (chat_id, parent, role, created, text, status, figures, fingerprint, common, suffix, reply)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (chat_id, parent, turn.role, created, *_values(turn)),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _values(turn: TurnRow) -> tuple[Any, ...]:
    figures = None if turn.figures is None else json.dumps(turn.figures)
    return turn.text, turn.status, figures, turn.fingerprint, turn.common, pack(turn.suffix), pack(turn.reply)


def _snippet(text: str | None, needle: str) -> str:
    """The text around the first hit, on one line."""
    if text is None:
        return ""
    # casefold may change lengths (ß -> ss); a few characters off only shift the window.
    at = max(0, text.casefold().find(needle) - SNIPPET_CHARS)
    piece = " ".join(text[at : at + 3 * SNIPPET_CHARS].split())
    return f"{'…' if at else ''}{piece}{'…' if at + 3 * SNIPPET_CHARS < len(text) else ''}"
