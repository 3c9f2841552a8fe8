"""Database: one SQLite file, one writer thread, a reading connection per thread, and the version of its schema.

Knows nothing of chats beyond the schema's text; app/store.py holds the queries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from app.data_folder import DataFolderUnwritable, StoreError

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0
# Reading every page takes about 1 ms a MiB; the port must open at once, so larger files are checked as they are read.
QUICK_CHECK_MAX_BYTES = 64 << 20

# Ids are never used again (AUTOINCREMENT): a tab opened before a deletion must not meet another turn under its id.
# A reply's prompt is stored as what it adds to its predecessor on the branch (see Store.full_ids).
_SCHEMA = """
CREATE TABLE users (id TEXT PRIMARY KEY, created REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE chats (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users(id) ON DELETE CASCADE,
    title TEXT NOT NULL,
    named INTEGER NOT NULL DEFAULT 0,
    settings TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    updated REAL NOT NULL,
    leaf INTEGER
);
CREATE INDEX chats_by_user ON chats(user_id, updated DESC);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chat_id TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
    parent INTEGER REFERENCES turns(id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    text TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'done', 'cut', 'stopped', 'error')),
    created REAL NOT NULL,
    figures TEXT,
    fingerprint TEXT,
    common INTEGER NOT NULL DEFAULT 0,
    suffix BLOB NOT NULL DEFAULT x'',
    reply BLOB NOT NULL DEFAULT x''
);
CREATE INDEX turns_by_chat ON turns(chat_id, id);
CREATE INDEX turns_by_parent ON turns(parent);
CREATE INDEX turns_running ON turns(status) WHERE status = 'running';
"""

# MIGRATIONS[v] takes a database from version v to v + 1.
MIGRATIONS: dict[int, str] = {}


class DatabaseCorrupt(StoreError):
    """The file is not a database or is damaged."""


class DatabaseTooNew(StoreError):
    """The file was written by a later version of PageTurn."""


class Database:
    """An open database. `write` may be called from any thread, `read` runs in the caller's."""

    def __init__(self, path: Path) -> None:
        """Open or create the file at `path` (its folder exists). Raises DatabaseCorrupt, DatabaseTooNew,
        DataFolderUnwritable."""
        self.path = path
        self._local = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[Query[Any], Future[Any], bool] | None] = queue.SimpleQueue()
        self._closed = False
        try:
            self._writer = self._prepare()
        except (sqlite3.OperationalError, OSError) as error:
            raise DataFolderUnwritable(
                f"database {path} cannot be opened ({error}); make it writable or choose another folder with --data-dir"
            ) from error
        except sqlite3.DatabaseError as error:
            raise DatabaseCorrupt(
                f"database {path} is damaged ({error}); move the file away to start with an empty one, "
                "or put a copy in its place"
            ) from error
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._thread.start()

    def read(self, query: Query[T]) -> T:
        """Run `query(connection)` on this thread's own reading connection; all its statements see one state."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = _connect(self.path)
            connection.execute("PRAGMA query_only=ON")
            with self._lock:
                if self._closed:
                    connection.close()
                    raise StoreError(f"database {self.path} is closed")
                self._readers.append(connection)
            self._local.connection = connection
        with _transaction(connection, "DEFERRED"):
            return query(connection)

    def write(self, query: Query[T], *, erase: bool = False) -> Future[T]:
        """Run `query(connection)` in a transaction on the writer thread, in the order of the calls; the future has
        its result or its exception, and then nothing of it was written. `erase` is for deletions: the write-ahead
        log, which still holds the pages as they were, is emptied too."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"database {self.path} is closed")
            self._inbox.put((query, future, erase))
        return future

    def close(self) -> None:
        """Finish the writes handed in so far and close; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(None)
        self._thread.join()
        with self._lock:
            for connection in self._readers:
                connection.close()
        self._writer.close()

    def _prepare(self) -> sqlite3.Connection:
        _create(self.path)
        existing = self.path.stat().st_size if self.path.exists() else 0
        connection = _connect(self.path)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise DatabaseTooNew(
                    f"database {self.path} has schema version {version}, this PageTurn knows up to {SCHEMA_VERSION}; "
                    "use a later PageTurn or choose another folder with --data-dir"
                )
            if existing and existing <= QUICK_CHECK_MAX_BYTES:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise sqlite3.DatabaseError(found.replace("\n", " "))
            _journal(connection)
            # Deleted text is overwritten with zeros in the file, not merely unlinked.
            connection.execute("PRAGMA secure_delete=ON")
            with _transaction(connection):
                if version == 0:
                    _run_script(connection, _SCHEMA)
                for step in range(max(version, 1), SCHEMA_VERSION):
                    _run_script(connection, MIGRATIONS[step])
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                # Nothing can be running yet: what is marked so was cut when the last server ended.
                connection.execute("UPDATE turns SET status = 'cut' WHERE status = 'running'")
        except BaseException:
            connection.close()
            raise
        return connection

    def _write_loop(self) -> None:
        while (item := self._inbox.get()) is not None:
            query, future, erase = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with _transaction(self._writer):
                    result = query(self._writer)
                if erase:
                    self._empty_log()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _empty_log(self) -> None:
        if self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            log.info("the write-ahead log of %s will be emptied later: a reader is in mid-query", self.path)


def _create(path: Path) -> None:
    """Make the file, empty and for its owner only, if there is none. SQLite gives its journals the same mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _connect(path: Path) -> sqlite3.Connection:
    # Every connection is used by one thread at a time; `close` alone comes from another one.
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


def _journal(connection: sqlite3.Connection) -> None:
    """WAL lets pages read while a reply is written; file systems without shared memory (some network mounts) refuse
    it, and get the rollback journal with a full sync instead."""
    with contextlib.suppress(sqlite3.OperationalError):
        if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] == "wal":
            # Survives the death of the process; only a power cut may lose the last seconds.
            connection.execute("PRAGMA synchronous=NORMAL")
            return
    mode = connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
    connection.execute("PRAGMA synchronous=FULL")
    log.info("SQLite's write-ahead log is not available here; using journal mode %s", mode)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have ended the transaction already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """Statement by statement: executescript would commit the transaction around it."""
    for statement in script.split(";"):
        if statement.strip():
            connection.execute(statement)
