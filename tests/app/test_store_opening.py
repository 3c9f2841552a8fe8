"""Opening a data folder: locks, damaged files, versions, journals, and what a dead server left."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import app.database
from app.records import TurnRow
from app.store import (
    DATABASE_NAME,
    DatabaseCorrupt,
    DatabaseTooNew,
    DataFolderInUse,
    DataFolderUnwritable,
    Store,
    StoreError,
)

ROOT = Path(__file__).resolve().parents[2]


async def fill(store: Store, texts: int = 200) -> str:
    chat = await store.create_chat("ann", "a chat")
    parent = None
    for n in range(texts):
        [parent] = await store.add_turns("ann", chat, [TurnRow(0, parent, "user", f"text {n} " * 40)])
    return chat


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_second_server_on_the_same_folder_is_refused_and_the_folder_comes_free_when_the_first_is_killed(tmp_path):
    program = f"from app.store import Store; s = Store({str(tmp_path)!r}); print('open', flush=True); input()"
    first = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None and first.stdin is not None
    assert first.stdout.readline() == "open\n"
    with pytest.raises(DataFolderInUse) as refused:
        Store(tmp_path)
    message = one_line(refused)
    assert str(tmp_path) in message and str(first.pid) in message and "--data-dir" in message
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdin.close()
    first.stdout.close()
    Store(tmp_path).close()


def test_a_refused_second_opening_does_not_disturb_the_first(tmp_path):
    first = Store(tmp_path)
    for _ in range(2):
        with pytest.raises(DataFolderInUse):
            Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/pageturn")):
        with pytest.raises(DataFolderUnwritable) as refused:
            Store(path)
        assert str(path) in one_line(refused) and "--data-dir" in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused_in_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataFolderUnwritable) as refused:
        Store(tmp_path)
    assert str(tmp_path) in one_line(refused)


def test_new_folders_are_for_their_owner_only(tmp_path):
    Store(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("umask", [0, 0o022])
async def test_in_a_folder_open_to_others_the_database_and_its_journals_are_for_their_owner_only(tmp_path, umask):
    before = os.umask(umask)
    try:
        store = Store(tmp_path)
        await fill(store)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert {DATABASE_NAME, f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm"} <= set(modes)
    assert set(modes.values()) == {0o600}


def test_the_mode_of_a_database_that_is_there_already_stays(tmp_path):
    Store(tmp_path).close()
    (tmp_path / DATABASE_NAME).chmod(0o640)
    Store(tmp_path).close()
    assert (tmp_path / DATABASE_NAME).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("damage", ["not sqlite", "truncated", "page overwritten"])
async def test_a_damaged_database_is_refused_in_one_line_and_left_as_it_is(tmp_path, damage):
    store = Store(tmp_path)
    await fill(store)
    store.close()
    path = tmp_path / DATABASE_NAME
    data = bytearray(path.read_bytes())
    if damage == "not sqlite":
        data[:100] = b"x" * 100
    elif damage == "truncated":
        del data[len(data) // 2 :]
    else:
        data[3 * 4096 : -4096] = b"\xff" * (len(data) - 4 * 4096)
    path.write_bytes(data)
    with pytest.raises(DatabaseCorrupt) as refused:
        Store(tmp_path)
    assert str(path) in one_line(refused)
    assert path.read_bytes() == data
    # The lock is given back: the next attempt meets the damage again, not a lock.
    with pytest.raises(DatabaseCorrupt):
        Store(tmp_path)


def test_a_database_of_a_later_version_is_refused_with_both_versions(tmp_path):
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(DatabaseTooNew) as refused:
        Store(tmp_path)
    message = one_line(refused)
    assert "99" in message and str(app.database.SCHEMA_VERSION) in message


async def test_an_older_database_is_migrated_and_keeps_its_chats(tmp_path, monkeypatch):
    store = Store(tmp_path)
    chat = await fill(store, 3)
    store.close()
    version = app.database.SCHEMA_VERSION
    monkeypatch.setattr(app.database, "SCHEMA_VERSION", version + 1)
    monkeypatch.setitem(app.database.MIGRATIONS, version, "ALTER TABLE chats ADD COLUMN pinned INTEGER DEFAULT 0")
    store = Store(tmp_path)
    _, turns = await store.chat_and_turns("ann", chat)
    assert len(turns) == 3
    columns = await store._read(lambda db: [row["name"] for row in db.execute("PRAGMA table_info(chats)")])
    assert "pinned" in columns
    store.close()


async def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    chat = await fill(store, 3)
    store.close()
    version = app.database.SCHEMA_VERSION
    with monkeypatch.context() as patch:
        patch.setattr(app.database, "SCHEMA_VERSION", version + 1)
        patch.setitem(app.database.MIGRATIONS, version, "DROP TABLE turns; ALTER TABLE nothing ADD COLUMN x")
        with pytest.raises(StoreError):
            Store(tmp_path)
    store = Store(tmp_path)
    _, turns = await store.chat_and_turns("ann", chat)
    assert len(turns) == 3
    store.close()


async def test_a_file_system_without_write_ahead_log_gets_the_rollback_journal(tmp_path, monkeypatch):
    class NoSharedMemory(sqlite3.Connection):
        def execute(self, sql, *args):
            if "journal_mode=WAL" in sql:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *args)

    real_connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real_connect(*a, **k, factory=NoSharedMemory))
    store = Store(tmp_path)
    chat = await fill(store, 5)
    assert (await store._read(lambda db: db.execute("PRAGMA journal_mode").fetchone()[0])) == "delete"
    assert len((await store.chat_and_turns("ann", chat))[1]) == 5
    await store.delete_chat("ann", chat)
    store.close()


def test_what_was_running_when_the_server_was_killed_is_marked_as_cut(tmp_path):
    program = textwrap.dedent(f"""
        import asyncio
        from app.records import TurnRow
        from app.store import Store

        async def main():
            store = Store({str(tmp_path)!r})
            chat = await store.create_chat("ann")
            question = TurnRow(0, None, "user", "question")
            running = TurnRow(0, None, "assistant", "half an ans", status="running", reply=[1, 2, 3])
            await store.add_turns("ann", chat, [question, running])
            print(chat, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    chat = server.stdout.readline().strip()
    server.kill()
    server.wait()
    server.stdout.close()
    store = Store(tmp_path)
    import asyncio

    row, turns = asyncio.run(store.chat_and_turns("ann", chat))
    assert [(t.text, t.status, list(t.reply)) for t in turns] == [
        ("question", "done", []),
        ("half an ans", "cut", [1, 2, 3]),
    ]
    assert row.leaf == turns[1].id
    store.close()
