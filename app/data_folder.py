"""DataFolder: the folder that holds the database, owned by one server at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK_NAME = "pageturn.lock"


class StoreError(RuntimeError):
    """The data folder or its database cannot be used; the message is one line saying what to do."""


class DataFolderUnwritable(StoreError):
    """The folder cannot be created or written."""


class DataFolderInUse(StoreError):
    """Another server holds the folder's lock."""


class DataFolder:
    """A locked data folder. The lock is the kernel's: it goes with the process, however that ends."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the folder if needed and lock it. Raises DataFolderUnwritable, DataFolderInUse."""
        self.path = Path(path).expanduser()
        lock_path = self.path / LOCK_NAME
        try:
            # Chats are private: others on the machine get no access to a folder that we create.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._probe()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise DataFolderInUse(
                f"data folder {self.path} is in use by another PageTurn server"
                f"{f' (process {holder})' if holder else ''}; stop that one or choose another folder with --data-dir"
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise _unwritable(self.path, error) from error

    def _probe(self) -> None:
        """Make and remove a file: SQLite must be able to put its journal beside the database."""
        probe = self.path / f".write-test-{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(b"x")
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unwritable(path: Path, error: OSError) -> DataFolderUnwritable:
    return DataFolderUnwritable(
        f"data folder {path} cannot be written ({error.strerror or error}); "
        "make it writable or choose another folder with --data-dir"
    )
